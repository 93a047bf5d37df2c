"""A core for each worker, the same for both sides of a comparison: they take turns, and where a process happens to lie
would shift all of its rounds alike. Only the thread that computes is pinned; agents, Gloo and the bench float.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def places() -> list[int]:
    """Cores that this process may use, one thread of each first, and the siblings after them."""
    first: list[int] = []
    second: list[int] = []
    known: set[str] = set()
    for number in sorted(os.sched_getaffinity(0)):
        siblings = _siblings(number)
        (second if siblings in known else first).append(number)
        known.add(siblings)
    return first + second


def _siblings(core: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)


def pin(pids: Sequence[int], cores: Sequence[int] | None = None) -> None:
    """Each process to a core of its own, in this order; none of them where there are fewer cores than processes."""
    cores = places() if cores is None else cores
    if len(cores) < len(pids):
        return
    for pid, core in zip(pids, cores, strict=False):
        with suppress(ProcessLookupError):  # it has ended, and the bench will say so
            os.sched_setaffinity(pid, {core})


def workers(nursery: int) -> list[int]:
    """The computing processes of a nursery's nodes, in the order in which nodes were started: each is a child of its
    agent, which is a child of the nursery."""
    parents = _parents()
    agents = sorted(pid for pid, parent in parents.items() if parent == nursery)
    found = {parent: pid for pid, parent in parents.items() if parent in agents}
    return [found[agent] for agent in agents if agent in found]


def _parents() -> dict[int, int]:
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found
