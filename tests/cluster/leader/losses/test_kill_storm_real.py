"""Eight real nodes under twenty SIGKILLs and five SIGSTOPs at random moments, while nodes rejoin.

The leader is among the killed. Every sample must count once, and no bit of the result may differ.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import Nap, job

from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.testing import reference
from culm.training import pickle_job

pytestmark = pytest.mark.real
PATIENCE_S = 170.0
KILLS, STOPS = 20, 5
PIPELINES, STAGES = 4, 2
NODES = PIPELINES * STAGES
ENOUGH = 100_000
AFTER = 12
"""Steps that are trained after the last fault."""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Storm:
    """Kills and stops agents of a run, each at a random step, and requests a new node for every killed one."""

    def __init__(self, run: RunHandle, fork_server: ForkServerClient, seed: int) -> None:
        self.run, self.fork_server, self.draw = run, fork_server, random.Random(seed)
        self.present = set(range(NODES))
        self.led = 0
        """Leaders that were killed."""
        self.steps = 0

    async def rage(self) -> None:
        faults = ["kill"] * KILLS + ["stop"] * STOPS
        self.draw.shuffle(faults)
        for number, fault in enumerate(faults):
            await self.wait(self.draw.randint(1, 3))
            await (self.stop() if fault == "stop" else self.kill(leader=number % 8 == 3))

    async def wait(self, steps: int) -> None:
        """Let steps pass; nodes that rejoin meanwhile are known afterwards."""
        for _ in range(steps):
            metrics = await self.run.next_step()
            assert metrics is not None, (await self.run.wait_for_result()).message
            self.steps = metrics["step"] + 1
        self.present = set(self.run.nodes.running)

    async def kill(self, *, leader: bool) -> None:
        leads = self.run.leader
        aimed = leader and leads in self.present
        node = leads if aimed and leads is not None else self.draw.choice(sorted(self.present))
        self.led += node == leads
        self.run.nodes.stop(node)
        self.present.discard(node)
        await self.run.nodes.start()

    async def stop(self) -> None:
        """Pause a machine for longer than allowed: it is fenced, wakes up, and rejoins as a new node."""
        agent = self.draw.choice(children(self.fork_server.pid))
        paused, lost = [agent, *children(agent)], len(self.run.lost_nodes)
        for process in paused:
            os.kill(process, signal.SIGSTOP)
        while len(self.run.lost_nodes) == lost:
            await self.wait(1)
        for process in reversed(paused):  # an agent that resumes ends its worker
            os.kill(process, signal.SIGCONT)


async def stormy(fork_server: ForkServerClient, out: Path, seed: int) -> tuple[RunResult, Storm]:
    described = job(layers=[Nap] * 4, steps=ENOUGH, exact=True)
    request = RunConfig(
        pipelines=PIPELINES,
        stages=STAGES,
        strategy="reroute",
        out=str(out),
        checkpoint_every=5,
        suspect_after=1.0,
    )
    async with local_run(fork_server, pickle_job(described), request, gate="outside") as run:
        storm = Storm(run, fork_server, seed)
        run.permit_steps_below(ENOUGH)
        await storm.rage()
        run.finish_before(storm.steps + AFTER)
        return await run.wait_for_result(), storm


def test_twenty_kills_and_five_stops_change_no_bit_of_what_is_learned(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    result, storm = asyncio.run(asyncio.wait_for(stormy(fork_server, tmp_path / "run", seed=1), PATIENCE_S))
    assert result.summary is not None, result.message
    summary: dict[str, Any] = dict(result.summary)
    expected = reference(job(layers=[lambda: Nap(0.0)] * 4, steps=summary["steps"], exact=True))
    assert summary["state_sha256"] == expected.state_sha256
    assert summary["samples"] == summary["samples_expected"]
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    assert len(storm.run.lost_nodes) > (KILLS + STOPS) / 2, "who is struck before it has joined is nobody's loss"
    assert storm.led >= 1
