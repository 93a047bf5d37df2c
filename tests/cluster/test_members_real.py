"""Real nodes that are stopped, hang, or lose their etcd for a while."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from culm.api import pickled
from culm.cluster.setup import Request, Result
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.providers.run import Came, Lost
from culm.testing import reference

from .jobs import Nap, job

pytestmark = [pytest.mark.real, pytest.mark.waits(4), pytest.mark.usefixtures("forked")]
PATIENCE_S = 180.0
ENDLESS = 10**6


@pytest.fixture(scope="module")
def nursery(forked: None) -> Iterator[LocalNursery]:
    """One of its own, since its etcd is killed."""
    with LocalNursery() as made:
        yield made


def bounded(main: Any) -> Any:
    async def patient() -> Any:
        return await asyncio.wait_for(main, PATIENCE_S)

    return asyncio.run(patient())


def worker_of(agent: int) -> int:
    (found,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(found)


async def heard(run: LocalRun, wanted: Lost | Came) -> None:
    while await run.news() != wanted:
        pass


async def stepping(run: LocalRun, until: asyncio.Task[None], done: int) -> int:
    """Let one step after the other run until something has happened; returns how many there are then."""
    while not until.done():
        run.permit(done + 1)
        metrics = await run.step()
        assert metrics is not None, (await run.result()).message
        done = metrics["step"] + 1
    until.result()
    return done


async def finished(run: LocalRun, done: int) -> Result:
    run.finish(done + 2)
    run.permit(done + 2)
    return await run.result()


def learned(steps: int) -> str:
    """The state after so many steps in which nobody stands still."""
    return reference(job(layers=[partial(Nap, 0.0)] * 4, steps=steps, exact=True)).state_sha256


@pytest.mark.parametrize("who", ["who leads", "another"])
@pytest.mark.parametrize("stopped", ["the whole node", "its worker alone"])
def test_a_node_that_stands_still_is_fenced_and_comes_back_as_a_new_one_and_no_bit_differs(
    nursery: LocalNursery, stopped: str, who: str
) -> None:
    stages = 1 if stopped == "its worker alone" else 2  # such a worker does not wake up: there is nobody to be fenced
    request = Request(pipelines=2, stages=stages, strategy="reroute", gate="outside", suspect_after=1.0)
    newcomer = 2 * stages

    async def main() -> tuple[Result, int]:
        async with local_run(nursery, pickled(job(layers=[Nap] * 4, steps=ENDLESS, exact=True)), request) as run:
            done = await stepping(run, asyncio.create_task(run.begun()), 0)
            assert run.leader is not None
            victim = run.leader if who == "who leads" else (run.leader + 1) % newcomer
            agent = nursery.board.agent(victim)
            processes = [worker_of(agent)] if stopped == "its worker alone" else [agent, worker_of(agent)]
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            done = await stepping(run, asyncio.create_task(heard(run, Lost(victim))), done)
            for process in reversed(processes) if stopped == "the whole node" else ():
                os.kill(process, signal.SIGCONT)  # it wakes up in an epoch that is over; its agent would end the worker
            done = await stepping(run, asyncio.create_task(heard(run, Came(newcomer))), done)
            done = await stepping(run, asyncio.create_task(run.filled()), done)
            return await finished(run, done), done + 2

    result, steps = bounded(main())
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned(steps)
    assert result.summary["preemptions"] == 1
    assert (result.summary["samples_lost"], result.summary["samples_duplicated"]) == (0, 0)


def test_etcd_may_be_killed_and_training_goes_on_until_it_is_back(nursery: LocalNursery, tmp_path: Path) -> None:
    """Nobody is taken for dead, and no bit differs."""
    steps = 40

    async def main() -> Result:
        request = Request(pipelines=2, stages=1, strategy="reroute", out=str(tmp_path / "run"))
        async with local_run(nursery, pickled(job(layers=[Nap] * 4, steps=steps, exact=True)), request) as run:
            for _ in range(5):
                await run.step()
            etcd = nursery.private
            assert etcd is not None
            etcd.kill()
            while len((tmp_path / "run/steps.jsonl").read_text().splitlines()) < 20:
                await asyncio.sleep(0.01)  # a file says nothing when it grows
            await etcd.start()
            return await run.result()

    result = bounded(main())
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned(steps)
    assert result.summary["preemptions"] == 0
