"""Real processes change their shape after nodes have joined and after one was killed. No bit differs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.tiny_jobs import job, linear

from culm import Job
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.testing import reference
from culm.training import pickle_job

pytestmark = pytest.mark.real
PATIENCE_S = 120.0


def described(steps: int) -> Job:
    return job(layers=[linear] * 6, steps=steps, global_batch=12, exact=True)


async def reshaped(run: RunHandle, nodes: set[int]) -> None:
    """Wait until exactly these nodes form another shape."""
    async for _, value in run.store.watch("epoch"):
        epoch = messages.decode(value or b"")
        assert isinstance(epoch, Epoch)
        if epoch.changes_shape and {member.node for member in epoch.present_members} == nodes:
            return


async def steps_until(run: RunHandle, waited: asyncio.Task[None], done: int) -> int:
    """Let steps run one by one until the task is done; returns the number of steps then."""
    while not waited.done():
        run.permit_steps_below(done + 1)
        metrics = await run.next_step()
        assert metrics is not None, (await run.wait_for_result()).message
        done = metrics["step"] + 1
    waited.result()
    return done


def trained(
    fork_server: ForkServerClient, request: RunConfig, change: Callable[[RunHandle], Awaitable[set[int]]]
) -> tuple[dict[str, Any], int]:
    """The summary of a run that continues until the nodes left by `change` have another shape, and its steps."""

    async def main() -> tuple[dict[str, Any], int]:
        async with local_run(fork_server, pickle_job(described(10**6)), request, gate="outside") as run:
            done = await steps_until(run, asyncio.create_task(_begun(run)), 0)
            nodes = await change(run)
            done = await steps_until(run, asyncio.create_task(reshaped(run, nodes)), done)
            run.finish_before(done + 3)
            run.permit_steps_below(done + 3)
            result = await run.wait_for_result()
            assert result.summary is not None, result.message
            return result.summary, done + 3

    async def bounded() -> tuple[dict[str, Any], int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())


async def _begun(run: RunHandle) -> None:
    async for _ in run.store.watch("step"):
        return


def check(summary: dict[str, Any], steps: int) -> None:
    assert summary["steps"] == steps
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    assert summary["state_sha256"] == reference(described(steps)).state_sha256


def test_joining_nodes_change_the_shape_of_a_real_run(fork_server: ForkServerClient) -> None:
    """By Bamboo's rule, which does not depend on time: a pipeline is added as soon as it fits."""

    async def grow(run: RunHandle) -> set[int]:
        return {0, 1, 2, 3, *await run.nodes.start(2)}

    # Without slow_factor=0, a busy machine makes the leader replace a node of such short steps.
    request = RunConfig(pipelines=2, stages=2, strategy="reroute", reconfigure="bamboo", slow_factor=0)
    summary, steps = trained(fork_server, request, grow)
    check(summary, steps)


def test_after_a_real_kill_pipelines_are_rebuilt_from_the_remaining_nodes(fork_server: ForkServerClient) -> None:
    async def lose(run: RunHandle) -> set[int]:
        run.nodes.stop(4)
        return {0, 1, 2, 3, 5}

    request = RunConfig(pipelines=2, stages=3, strategy="templates")
    summary, steps = trained(fork_server, request, lose)
    check(summary, steps)
    assert [recovered["source"] for recovered in summary["recoveries"]] == ["peers"]
