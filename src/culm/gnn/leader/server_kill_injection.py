"""Kills on purpose: `worker epoch=5`, `server=1 epoch=12`, `parameter=0 epoch=9`, `chaos workers=100 servers=5`.

A process is killed with SIGKILL once the previous training epoch has been reported, at an arbitrary point of its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import UsageError

if TYPE_CHECKING:
    from typing import Any

    from culm.gnn.leader.gnn_leader import GnnLeader
    from culm.gnn.worker.worker_pool import WorkerPool

_POLL_S = 0.002


class ProcessKill(NamedTuple):
    """A process to kill, and the training epoch from which on to kill it."""

    epoch: int
    target: str
    """worker, graph-N, parameter-N, or server for any server."""


def parse_kills(text: str, servers: int, parameter_servers: int, epochs: int, seed: int = 0) -> list[ProcessKill]:
    """Return the kills of a description such as `worker epoch=5`. Raises UsageError for an invalid one."""
    target, *rest = text.split() or [""]
    kind, _, number = target.partition("=")
    options = _options(text, rest, ("workers", "servers") if kind == "chaos" else ("epoch",))
    if target == "chaos" and any(options.values()):
        rng = random.Random(seed)
        workers = [ProcessKill(rng.randrange(epochs), "worker") for _ in range(options.get("workers", 0))]
        return workers + [ProcessKill(rng.randrange(epochs), "server") for _ in range(options.get("servers", 0))]
    roles = {"server": ("graph", servers), "parameter": ("parameter", parameter_servers)}
    numbered = kind in roles and number.isdecimal()
    if not (target == "worker" or numbered) or not 0 <= options.get("epoch", -1) < epochs:
        raise UsageError(
            f"--kill {text!r}: write 'worker epoch=5', 'server=1 epoch=5', 'parameter=0 epoch=5', with an epoch "
            f"below {epochs}, or 'chaos workers=9 servers=1'"
        )
    if target == "worker":
        return [ProcessKill(options["epoch"], "worker")]
    role, count = roles[kind]
    if int(number) >= count:
        raise UsageError(f"--kill {text!r}: there are {count}, numbered from 0")
    return [ProcessKill(options["epoch"], f"{role}-{number}")]


def _options(text: str, words: Sequence[str], allowed: Sequence[str]) -> dict[str, int]:
    options = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in allowed or not value.isdecimal():
            raise UsageError(f"--kill {text!r} has {word!r}: write {' '.join(f'{k}=N' for k in allowed)}")
        options[name] = int(value)
    return options


async def inject_kills(
    kills: Sequence[ProcessKill],
    leader: GnnLeader,
    worker_pool: WorkerPool,
    on_event: Callable[..., Any],
    seed: int = 0,
) -> None:
    """Execute the kills in the order of epochs while the run goes on.

    A kill waits until its target exists. The leader does not decide on an evaluation before all kills up to its epoch
    have happened.
    """
    rng = random.Random(seed)
    pending = sorted(kills)
    leader.hold_evaluations_while(lambda epoch: any(due.epoch <= epoch for due in pending))
    while pending:
        while not _try_kill(pending[0], leader, worker_pool, on_event, rng):
            await asyncio.sleep(_POLL_S)
        del pending[0]
        await leader.decide_open_evaluation()


def _try_kill(
    planned: ProcessKill, leader: GnnLeader, worker_pool: WorkerPool, on_event: Callable[..., Any], rng: random.Random
) -> bool:
    last_epoch = max(leader.results.ledger.losses, default=-1)
    servers = leader.server_pids()
    if last_epoch < planned.epoch - 1:
        return False
    if planned.target == "worker":
        pids = dict(enumerate(worker_pool.worker_pids()))
    else:
        pids = {s: pid for s, pid in servers.items() if planned.target in (s, "server")}  # type: ignore[misc]
    if not pids:
        return False
    chosen = rng.choice(sorted(pids))
    on_event(
        kind="kill", node=planned.target if planned.target == "worker" else chosen, pid=pids[chosen], epoch=last_epoch
    )
    worker_pool.mark_killed(pids[chosen])
    leader.mark_killed(pids[chosen])
    kill_process(pids[chosen])
    return True


def kill_process(pid: int) -> None:
    """Kill a process with SIGKILL, as a preemption would."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
