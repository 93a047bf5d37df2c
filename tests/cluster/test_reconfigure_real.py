"""Real processes go on in other pipelines: after nodes have come, and after one was killed. No bit differs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from culm import Job
from culm.api import pickled
from culm.cluster.setup import Request
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.runtime import epoch as letters
from culm.testing import reference

from .jobs import job, linear

pytestmark = pytest.mark.real
PATIENCE_S = 120.0


def described(steps: int) -> Job:
    return job(layers=[linear] * 6, steps=steps, global_batch=12, exact=True)


async def reshaped(run: LocalRun, nodes: set[int]) -> None:
    """Wait until these nodes, and no others, make up another shape."""
    async for _, value in run.store.watch("epoch"):
        epoch = letters.decode(value or b"")
        assert isinstance(epoch, letters.Epoch)
        if epoch.reshapes and {member.node for member in epoch.alive} == nodes:
            return


async def steps_until(run: LocalRun, waited: asyncio.Task[None], done: int) -> int:
    """Let one step after the other run until something has happened; returns how many steps there are then."""
    while not waited.done():
        run.permit(done + 1)
        metrics = await run.step()
        assert metrics is not None, (await run.result()).message
        done = metrics["step"] + 1
    waited.result()
    return done


def trained(
    nursery: LocalNursery, request: Request, change: Callable[[LocalRun], Awaitable[set[int]]]
) -> tuple[dict[str, Any], int]:
    """The summary of a run that goes on until those that a change leaves are in another shape, and its steps."""

    async def main() -> tuple[dict[str, Any], int]:
        async with local_run(nursery, pickled(described(10**6)), request) as run:
            done = await steps_until(run, asyncio.create_task(_begun(run)), 0)
            nodes = await change(run)
            done = await steps_until(run, asyncio.create_task(reshaped(run, nodes)), done)
            run.finish(done + 3)
            run.permit(done + 3)
            result = await run.result()
            assert result.summary is not None, result.message
            return result.summary, done + 3

    async def bounded() -> tuple[dict[str, Any], int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())


async def _begun(run: LocalRun) -> None:
    async for _ in run.store.watch("step"):
        return


def check(summary: dict[str, Any], steps: int) -> None:
    assert summary["steps"] == steps
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    assert summary["state_sha256"] == reference(described(steps)).state_sha256


def test_nodes_that_come_make_another_shape_of_a_real_run(nursery: LocalNursery) -> None:
    """By Bamboo's rule, which looks at no clock: a further pipeline is made as soon as it fits."""

    async def grow(run: LocalRun) -> set[int]:
        return {0, 1, 2, 3, *await run.nodes.start(2)}

    request = Request(pipelines=2, stages=2, strategy="reroute", reconfigure="bamboo", gate="outside")
    summary, steps = trained(nursery, request, grow)
    check(summary, steps)


def test_after_a_real_kill_pipelines_are_made_anew_out_of_those_that_are_left(nursery: LocalNursery) -> None:
    async def lose(run: LocalRun) -> set[int]:
        run.nodes.stop(4)
        return {0, 1, 2, 3, 5}

    request = Request(pipelines=2, stages=3, strategy="templates", gate="outside")
    summary, steps = trained(nursery, request, lose)
    check(summary, steps)
    assert [recovered["source"] for recovered in summary["recoveries"]] == ["peers"]
