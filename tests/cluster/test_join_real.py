"""Real nodes that come while a run goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from culm import Job
from culm.api import pickled
from culm.cluster.setup import Request
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.providers.run import Came
from culm.runtime import epoch as letters
from culm.schedule import Plan
from culm.testing import reference

from .jobs import job

pytestmark = pytest.mark.real
PATIENCE_S = 90.0
SHAPE = Request(pipelines=2, stages=2, strategy="reroute", gate="outside")


def described(steps: int) -> Job:
    return job(steps=steps, exact=True)


async def filled(run: LocalRun, node: int) -> int:
    """Wait until every slot has a worker that runs its stage, that of a node among them; returns the epoch's number."""
    async for _, value in run.store.watch("epoch"):
        epoch = letters.decode(value or b"")
        assert isinstance(epoch, letters.Epoch)
        plan = Plan.from_text(epoch.plan)
        everywhere = all(plan.stages_of(slot) for slot in range(len(epoch.members)))
        if epoch.slot_of(node) is not None and None not in epoch.members and everywhere:
            return epoch.number
    raise AssertionError("a watch has no end")


async def steps_until(run: LocalRun, waited: asyncio.Task[Any], done: int) -> int:
    """Let one step after the other run until something has happened; returns how many steps there are then."""
    while not waited.done():
        run.permit(done + 1)
        metrics = await run.step()
        assert metrics is not None, (await run.result()).message
        done = metrics["step"] + 1
    waited.result()
    return done


def grown(nursery: LocalNursery, victims: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    """The summary of a run whose victims are killed in turn, each followed by a newcomer, and the steps it took."""

    async def main() -> tuple[dict[str, Any], int]:
        async with local_run(nursery, pickled(described(10**6)), SHAPE) as run:
            done = await steps_until(run, asyncio.create_task(_begun(run)), 0)
            for victim in victims:
                run.nodes.stop(victim)
                (newcomer,) = await run.nodes.start()
                done = await steps_until(run, asyncio.create_task(_level(run, newcomer)), done)
            run.finish(done + 2)
            run.permit(done + 2)
            result = await run.result()
            assert result.summary is not None, result.message
            return msgspec.to_builtins(result.summary), done + 2

    async def bounded() -> tuple[dict[str, Any], int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())


async def _begun(run: LocalRun) -> None:
    async for _ in run.store.watch("step"):
        return


async def _level(run: LocalRun, newcomer: int) -> None:
    while await run.news() != Came(newcomer):
        pass
    await filled(run, newcomer)


@pytest.mark.parametrize("victims", [(1,), (0, 4, 2, 3)])
def test_newcomers_fill_the_slots_of_nodes_that_were_killed_and_no_bit_differs(
    nursery: LocalNursery, victims: tuple[int, ...]
) -> None:
    """One after the other, a newcomer and whoever leads among them."""
    summary, steps = grown(nursery, victims)
    assert summary["steps"] == steps
    assert summary["preemptions"] == len(victims)
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    expected = reference(described(steps))
    assert summary["state_sha256"] == expected.state_sha256
    assert summary["weights_sha256"] == expected.weights_sha256
