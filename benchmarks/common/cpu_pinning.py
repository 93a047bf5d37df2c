"""Pin each worker to a core, to the same cores on both sides of a comparison: the sides alternate, and the placement of
a process would shift all of its rounds. Only the computing thread is pinned; agents, Gloo and the bench are not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def available_cores() -> list[int]:
    """Cores that this process may use: one hardware thread of each core first, then their siblings."""
    first: list[int] = []
    second: list[int] = []
    known: set[str] = set()
    for number in sorted(os.sched_getaffinity(0)):
        siblings = _sibling_threads(number)
        (second if siblings in known else first).append(number)
        known.add(siblings)
    return first + second


def _sibling_threads(core: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)


def pin_processes(pids: Sequence[int], cores: Sequence[int] | None = None) -> None:
    """Pin each process to its own core, in this order; pin none if there are fewer cores than processes."""
    cores = available_cores() if cores is None else cores
    if len(cores) < len(pids):
        return
    for pid, core in zip(pids, cores, strict=False):
        with suppress(ProcessLookupError):  # the process has ended; the bench reports it
            os.sched_setaffinity(pid, {core})


def worker_pids(fork_server_pid: int) -> list[int]:
    """The computing processes of a fork server's nodes, in the order in which the nodes were started. Each is a child
    of its agent, which is a child of the fork server."""
    parents = _parent_pids()
    agents = sorted(pid for pid, parent in parents.items() if parent == fork_server_pid)
    worker_of = {parent: pid for pid, parent in parents.items() if parent in agents}
    return [worker_of[agent] for agent in agents if agent in worker_of]


def _parent_pids() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents
