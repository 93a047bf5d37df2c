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
from tests.tiny_jobs import Nap, job

from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.providers import private_etcd
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.providers.run_events import MachineEvent, NodeJoinedEvent, NodeLostEvent
from culm.testing import reference
from culm.training import pickle_job

pytestmark = [pytest.mark.real, pytest.mark.waits(4), pytest.mark.usefixtures("forked_programs")]
PATIENCE_S = 180.0
ENDLESS = 10**6


@pytest.fixture(scope="module")
def fork_server(forked_programs: None) -> Iterator[ForkServerClient]:
    """A fork server of this module, because its etcd is killed."""
    with ForkServerClient() as made:
        yield made


def bounded(main: Any) -> Any:
    async def patient() -> Any:
        return await asyncio.wait_for(main, PATIENCE_S)

    return asyncio.run(patient())


def worker_of(agent: int) -> int:
    (found,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(found)


async def wait_for_event(run: RunHandle, kind: type[NodeLostEvent | NodeJoinedEvent], node: int) -> None:
    while not (isinstance(event := await run.next_event(), kind) and event.node == node):
        pass


async def step_until(run: RunHandle, until: asyncio.Task[None], done: int) -> int:
    """Let steps run one by one until the task is done; returns the number of steps then."""
    while not until.done():
        run.permit_steps_below(done + 1)
        metrics = await run.next_step()
        assert metrics is not None, (await run.wait_for_result()).message
        done = metrics["step"] + 1
    until.result()
    return done


async def finished(run: RunHandle, done: int) -> RunResult:
    run.finish_before(done + 2)
    run.permit_steps_below(done + 2)
    return await run.wait_for_result()


def learned(steps: int) -> str:
    """The state after this many steps without a fault."""
    return reference(job(layers=[partial(Nap, 0.0)] * 4, steps=steps, exact=True)).state_sha256


@pytest.mark.parametrize("who", ["who leads", "another"])
@pytest.mark.parametrize("stopped", ["the whole node", "its worker alone"])
def test_a_stopped_node_is_fenced_and_rejoins_as_a_new_one_and_no_bit_differs(
    fork_server: ForkServerClient, stopped: str, who: str
) -> None:
    stages = 1 if stopped == "its worker alone" else 2  # such a worker does not wake up: there is nobody to be fenced
    request = RunConfig(pipelines=2, stages=stages, strategy="reroute", suspect_after=1.0)
    newcomer = 2 * stages

    async def main() -> tuple[RunResult, int]:
        async with local_run(
            fork_server, pickle_job(job(layers=[Nap] * 4, steps=ENDLESS, exact=True)), request, gate="outside"
        ) as run:
            done = await step_until(run, asyncio.create_task(run.wait_for_first_step()), 0)
            assert run.leader is not None
            victim = run.leader if who == "who leads" else (run.leader + 1) % newcomer
            agent = fork_server.process_table.agent_pid(victim)
            processes = [worker_of(agent)] if stopped == "its worker alone" else [agent, worker_of(agent)]
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            done = await step_until(run, asyncio.create_task(wait_for_event(run, NodeLostEvent, victim)), done)
            for process in reversed(processes) if stopped == "the whole node" else ():
                os.kill(process, signal.SIGCONT)  # it wakes up in an epoch that is over; its agent would end the worker
            done = await step_until(run, asyncio.create_task(wait_for_event(run, NodeJoinedEvent, newcomer)), done)
            done = await step_until(run, asyncio.create_task(run.wait_until_slots_filled()), done)
            return await finished(run, done), done + 2

    result, steps = bounded(main())
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned(steps)
    assert result.summary["preemptions"] == 1
    assert (result.summary["samples_lost"], result.summary["samples_duplicated"]) == (0, 0)


def test_etcd_may_be_killed_and_training_goes_on_until_it_is_back(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    """No node is declared lost, and no bit differs."""
    steps = 40

    async def main() -> RunResult:
        request = RunConfig(pipelines=2, stages=1, strategy="reroute", out=str(tmp_path / "run"))
        async with local_run(fork_server, pickle_job(job(layers=[Nap] * 4, steps=steps, exact=True)), request) as run:
            for _ in range(5):
                await run.next_step()
            etcd = fork_server.private_etcd
            assert etcd is not None
            etcd.kill()
            while len((tmp_path / "run/steps.jsonl").read_text().splitlines()) < 20:
                await asyncio.sleep(0.01)  # a file says nothing when it grows
            await etcd.start()
            return await run.wait_for_result()

    result = bounded(main())
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned(steps)
    assert result.summary["preemptions"] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped for good"])
@pytest.mark.parametrize("stopped_at", [5, 11], ids=["in mid-run", "after the last step"])
def test_a_private_etcd_that_ends_or_hangs_is_restarted_with_its_data(
    fork_server: ForkServerClient,
    tmp_path: Path,
    stopped_at: int,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run does not wait for anyone: no node is declared lost, and no bit differs. An etcd that is stopped in the
    last step but one cannot have the result of the run when it is killed."""
    steps, restarted = 12, []
    monkeypatch.setattr(private_etcd, "_PROBE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(private_etcd, "_PROBE_INTERVAL_S", 0.1)

    async def lines(count: int) -> None:
        while len((tmp_path / "run/steps.jsonl").read_text().splitlines()) < count:
            await asyncio.sleep(0.002)  # a file says nothing when it grows

    async def main() -> RunResult:
        request = RunConfig(pipelines=2, stages=1, strategy="reroute", out=str(tmp_path / "run"))
        async with local_run(fork_server, pickle_job(job(layers=[Nap] * 4, steps=steps, exact=True)), request) as run:
            await run.wait_for_first_step()
            await lines(stopped_at)
            etcd = fork_server.private_etcd
            assert etcd is not None
            os.kill(before := etcd.pid, signal.SIGSTOP)
            await lines(stopped_at + 1)
            os.kill(before, number)
            result = await run.wait_for_result()
            restarted.append(etcd.running and etcd.pid != before)
            assert [event for event in run.pending_events() if isinstance(event, MachineEvent)]
            return result

    result = bounded(main())
    assert restarted == [True]
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == learned(steps)
    assert result.summary["preemptions"] == 0
