"""Eight real nodes under a storm: twenty SIGKILLs and five SIGSTOPs at random moments, while nodes come back.

The leader is among the killed. Whatever happens, every sample counts once and no bit of what is learned differs.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from culm.api import pickled
from culm.cluster.setup import Request, Result
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.testing import reference

from .jobs import Nap, job

pytestmark = pytest.mark.real
PATIENCE_S = 170.0
KILLS, STOPS = 20, 5
PIPELINES, STAGES = 4, 2
NODES = PIPELINES * STAGES
ENOUGH = 100_000
AFTER = 12
"""Steps that are trained after the storm."""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Storm:
    """Strikes agents of a run, each at a random step, and asks for a new node in place of every killed one."""

    def __init__(self, run: LocalRun, nursery: LocalNursery, seed: int) -> None:
        self.run, self.nursery, self.draw = run, nursery, random.Random(seed)
        self.there = set(range(NODES))
        self.led = 0
        """Leaders that were killed."""
        self.steps = 0

    async def rage(self) -> None:
        blows = ["kill"] * KILLS + ["stop"] * STOPS
        self.draw.shuffle(blows)
        for number, blow in enumerate(blows):
            await self.wait(self.draw.randint(1, 3))
            await (self.stop() if blow == "stop" else self.kill(leader=number % 8 == 3))

    async def wait(self, steps: int) -> None:
        """Let steps pass; nodes that came back by themselves are there from then on."""
        for _ in range(steps):
            metrics = await self.run.step()
            assert metrics is not None, (await self.run.result()).message
            self.steps = metrics["step"] + 1
        self.there = set(self.run.nodes.there)

    async def kill(self, *, leader: bool) -> None:
        leads = self.run.leader
        aimed = leader and leads in self.there
        node = leads if aimed and leads is not None else self.draw.choice(sorted(self.there))
        self.led += node == leads
        self.run.nodes.stop(node)
        self.there.discard(node)
        await self.run.nodes.start()

    async def stop(self) -> None:
        """A machine is paused, longer than one may be silent: it is fenced, wakes up, and comes back as a new node."""
        agent = self.draw.choice(children(self.nursery.pid))
        paused, lost = [agent, *children(agent)], len(self.run.lost)
        for process in paused:
            os.kill(process, signal.SIGSTOP)
        while len(self.run.lost) == lost:
            await self.wait(1)
        for process in reversed(paused):  # an agent that wakes up ends its worker
            os.kill(process, signal.SIGCONT)


async def stormy(nursery: LocalNursery, out: Path, seed: int) -> tuple[Result, Storm]:
    described = job(layers=[Nap] * 4, steps=ENOUGH, exact=True)
    request = Request(
        pipelines=PIPELINES,
        stages=STAGES,
        strategy="reroute",
        out=str(out),
        checkpoint_every=5,
        gate="outside",
        suspect_after=1.0,
    )
    async with local_run(nursery, pickled(described), request) as run:
        storm = Storm(run, nursery, seed)
        run.permit(ENOUGH)
        await storm.rage()
        run.finish(storm.steps + AFTER)
        return await run.result(), storm


def test_twenty_kills_and_five_stops_change_no_bit_of_what_is_learned(nursery: LocalNursery, tmp_path: Path) -> None:
    result, storm = asyncio.run(asyncio.wait_for(stormy(nursery, tmp_path / "run", seed=1), PATIENCE_S))
    assert result.summary is not None, result.message
    summary: dict[str, Any] = dict(result.summary)
    expected = reference(job(layers=[lambda: Nap(0.0)] * 4, steps=summary["steps"], exact=True))
    assert summary["state_sha256"] == expected.state_sha256
    assert summary["samples"] == summary["samples_expected"]
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    assert len(storm.run.lost) > (KILLS + STOPS) / 2, "who is struck before it has joined is nobody's loss"
    assert storm.led >= 1
