"""Kills on purpose: `worker epoch=5`, `server=1 epoch=12`, `parameter=0 epoch=9`, `chaos workers=100 servers=5`.

A process is ended with SIGKILL once the epoch before has been reported: what it was doing then is up to chance.
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

    from culm.gnn.desk import Desk
    from culm.gnn.lead import Leader

_LOOK_S = 0.002


class Kill(NamedTuple):
    """Whom, and from which epoch on."""

    epoch: int
    who: str
    """worker, graph-N, parameter-N, or server: any of these."""


def parse(text: str, servers: int, parameter_servers: int, epochs: int, seed: int = 0) -> list[Kill]:
    """The kills that a description stands for. Raises UsageError for one that makes no sense."""
    what, *rest = text.split() or [""]
    kind, _, number = what.partition("=")
    options = _options(text, rest, ("workers", "servers") if kind == "chaos" else ("epoch",))
    if what == "chaos" and any(options.values()):
        draw = random.Random(seed)
        workers = [Kill(draw.randrange(epochs), "worker") for _ in range(options.get("workers", 0))]
        return workers + [Kill(draw.randrange(epochs), "server") for _ in range(options.get("servers", 0))]
    seats = {"server": ("graph", servers), "parameter": ("parameter", parameter_servers)}
    numbered = kind in seats and number.isdecimal()
    if not (what == "worker" or numbered) or not 0 <= options.get("epoch", -1) < epochs:
        raise UsageError(
            f"--kill {text!r}: write 'worker epoch=5', 'server=1 epoch=5', 'parameter=0 epoch=5', with an epoch "
            f"below {epochs}, or 'chaos workers=9 servers=1'"
        )
    if what == "worker":
        return [Kill(options["epoch"], "worker")]
    role, count = seats[kind]
    if int(number) >= count:
        raise UsageError(f"--kill {text!r}: there are {count}, counted from 0")
    return [Kill(options["epoch"], f"{role}-{number}")]


def _options(text: str, words: Sequence[str], known: Sequence[str]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value.isdecimal():
            raise UsageError(f"--kill {text!r} has {word!r}: write {' '.join(f'{k}=N' for k in known)}")
        found[name] = int(value)
    return found


async def inject(kills: Sequence[Kill], leader: Leader, desk: Desk, told: Callable[..., Any], seed: int = 0) -> None:
    """Do it, in the order of epochs, while the run goes on. A kill waits until its victim is there, and the run does
    not pass the next evaluation before the kills that are due have happened."""
    draw = random.Random(seed)
    left = sorted(kills)
    leader.hold_while(lambda epoch: any(due.epoch <= epoch for due in left))
    while left:
        while not _kill(left[0], leader, desk, told, draw):
            await asyncio.sleep(_LOOK_S)
        del left[0]
        await leader.go_on()


def _kill(due: Kill, leader: Leader, desk: Desk, told: Callable[..., Any], draw: random.Random) -> bool:
    reached = max(leader.found.ledger.losses, default=-1)
    servers = leader.pids()
    if reached < due.epoch - 1:
        return False
    if due.who == "worker":
        pids = dict(enumerate(desk.pids()))
    else:
        pids = {s: pid for s, pid in servers.items() if due.who in (s, "server")}  # type: ignore[misc]
    if not pids:
        return False
    chosen = draw.choice(sorted(pids))
    told(kind="kill", node=due.who if due.who == "worker" else chosen, pid=pids[chosen], epoch=reached)
    desk.forget(pids[chosen])
    leader.forget(pids[chosen])
    kill(pids[chosen])
    return True


def kill(pid: int) -> None:
    """End a process the hard way, as a machine that is taken away would."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
