"""Real nodes that join a running run."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.tiny_jobs import job

from culm import Job
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.providers.run_events import NodeJoinedEvent
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.schedule import Plan
from culm.testing import reference
from culm.training import pickle_job

pytestmark = pytest.mark.real
PATIENCE_S = 90.0
SHAPE = RunConfig(pipelines=2, stages=2, strategy="reroute")


def described(steps: int) -> Job:
    return job(steps=steps, exact=True)


async def filled(run: RunHandle, node: int) -> int:
    """Wait until every slot has a worker that runs its stage, including this node's; returns the epoch's number."""
    async for _, value in run.store.watch("epoch"):
        epoch = messages.decode(value or b"")
        assert isinstance(epoch, Epoch)
        plan = Plan.from_text(epoch.plan)
        everywhere = all(plan.stages_of(slot) for slot in range(len(epoch.members)))
        if epoch.slot_of(node) is not None and None not in epoch.members and everywhere:
            return epoch.number
    raise AssertionError("a watch has no end")


async def steps_until(run: RunHandle, waited: asyncio.Task[Any], done: int) -> int:
    """Let steps run one by one until the task is done; returns the number of steps then."""
    while not waited.done():
        run.permit_steps_below(done + 1)
        metrics = await run.next_step()
        assert metrics is not None, (await run.wait_for_result()).message
        done = metrics["step"] + 1
    waited.result()
    return done


def grown(fork_server: ForkServerClient, victims: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    """The summary of a run whose victims are killed in turn, each replaced by a joining node, and its steps."""

    async def main() -> tuple[dict[str, Any], int]:
        async with local_run(fork_server, pickle_job(described(10**6)), SHAPE, gate="outside") as run:
            done = await steps_until(run, asyncio.create_task(_begun(run)), 0)
            for victim in victims:
                run.nodes.stop(victim)
                (newcomer,) = await run.nodes.start()
                done = await steps_until(run, asyncio.create_task(_level(run, newcomer)), done)
            run.finish_before(done + 2)
            run.permit_steps_below(done + 2)
            result = await run.wait_for_result()
            assert result.summary is not None, result.message
            return msgspec.to_builtins(result.summary), done + 2

    async def bounded() -> tuple[dict[str, Any], int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())


async def _begun(run: RunHandle) -> None:
    async for _ in run.store.watch("step"):
        return


async def _level(run: RunHandle, newcomer: int) -> None:
    while not (isinstance(event := await run.next_event(), NodeJoinedEvent) and event.node == newcomer):
        pass
    await filled(run, newcomer)


@pytest.mark.parametrize("victims", [(1,), (0, 4, 2, 3)])
def test_joining_nodes_fill_the_slots_of_killed_ones_and_no_bit_differs(
    fork_server: ForkServerClient, victims: tuple[int, ...]
) -> None:
    """One after the other, including a joined node and the leader."""
    summary, steps = grown(fork_server, victims)
    assert summary["steps"] == steps
    assert summary["preemptions"] == len(victims)
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    expected = reference(described(steps))
    assert summary["state_sha256"] == expected.state_sha256
    assert summary["weights_sha256"] == expected.weights_sha256
