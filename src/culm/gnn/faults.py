"""Kills on purpose: `worker epoch=5`, `server=1 epoch=12`, `parameter=0 epoch=9`, `chaos workers=100 servers=5`.

A process is ended with SIGKILL once the epoch before has been reported: what it was doing then is up to chance.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import UsageError
from culm.gnn.lead import kill

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
    kind, *rest = text.split()
    kind, _, number = kind.partition("=")
    options = _options(text, rest)
    if kind == "chaos":
        draw = random.Random(seed)
        workers = [Kill(draw.randrange(epochs), "worker") for _ in range(options.get("workers", 0))]
        return workers + [Kill(draw.randrange(epochs), "server") for _ in range(options.get("servers", 0))]
    seats = {"worker": 1 << 30, "server": servers, "parameter": parameter_servers}
    if kind not in seats or not 0 <= options.get("epoch", -1) < epochs or (kind != "worker" and not number.isdecimal()):
        raise UsageError(
            f"--kill {text!r}: write 'worker epoch=5', 'server=1 epoch=5' or 'parameter=0 epoch=5', "
            f"with an epoch below {epochs}"
        )
    if number and int(number) >= seats[kind]:
        raise UsageError(f"--kill {text!r}: there are {seats[kind]}, counted from 0")
    role = {"server": "graph", "parameter": "parameter"}.get(kind)
    return [Kill(options["epoch"], "worker" if role is None else f"{role}-{number}")]


def _options(text: str, words: Sequence[str]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("epoch", "workers", "servers") or not value.isdecimal():
            raise UsageError(f"--kill {text!r} has {word!r}: write epoch=N (or, after chaos, workers=N servers=N)")
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
