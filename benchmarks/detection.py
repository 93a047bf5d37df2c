"""From the SIGKILL of a node to the last survivor that has taken the next epoch over, on real processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from culm import Job
from culm.api import pickled
from culm.cluster.recovered import Recovered
from culm.cluster.setup import Request
from culm.providers.local import LocalNursery, LocalRun, local_run

KILLS = 40
_WIDTH = 4
_PATIENCE_S = 60.0


class Nap(nn.Module):
    """A layer that sleeps: what is measured is the cluster, not the computing."""

    def __init__(self, seconds: float = 0.005) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(_WIDTH, _WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        made: Tensor = self.linear(x)
        return made


def napping() -> Job:
    items = [(torch.ones(_WIDTH), torch.zeros(_WIDTH)) for _ in range(32)]
    return Job(
        layers=[Nap] * 4,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=items,
        global_batch=8,
        micro_batch=1,
        steps=10**6,
    )


def detect_ms(nursery: LocalNursery, *, kills: int = KILLS, seed: int = 0) -> dict[str, float]:
    """{"median", "p90", "max"} in milliseconds over so many kills of a 2 x 2 run, whoever leads among them; after each
    a new node fills the slot. The moment that counts is when the last worker begins to take the epoch over, which is
    after its agent holds it."""
    return figures(asyncio.run(_kills(nursery, kills, random.Random(seed))))


def figures(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(1e3 * second for second in seconds)
    p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    return {"median": statistics.median(ordered), "p90": p90, "max": ordered[-1]}


async def _kills(nursery: LocalNursery, kills: int, draw: random.Random) -> list[float]:
    request = Request(pipelines=2, stages=2, strategy="reroute")
    async with local_run(nursery, pickled(napping()), request) as run:
        await run.begun()
        return [await asyncio.wait_for(_kill(nursery, run, draw), _PATIENCE_S) for _ in range(kills)]


async def _kill(nursery: LocalNursery, run: LocalRun, draw: random.Random) -> float:
    await run.filled()
    assert run.epoch is not None
    nodes = [member.node for member in run.epoch.alive]
    victim = draw.choice(nodes)
    others = [node for node in nodes if node != victim]
    await asyncio.sleep(draw.uniform(0.0, 0.2))  # at any moment of a step
    for node in others:
        nursery.board.forget(node)
    struck = time.monotonic()
    os.kill(nursery.board.agent(victim), signal.SIGKILL)
    while not (isinstance(news := await run.news(), Recovered) and victim in news.lost):
        pass
    adopted = [nursery.board.adopted_at(node) for node in others]
    await run.nodes.start()
    return max(at for at in adopted if at is not None) - struck
