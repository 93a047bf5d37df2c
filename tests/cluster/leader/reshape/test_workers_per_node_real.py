"""Real nodes with two workers each: SIGKILL of all processes of a node, of one worker, and SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import reference_result
from tests.tiny_jobs import job, linear

from culm.config import RunConfig
from culm.job import Job
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.runtime.epoch import Epoch
from culm.testing import reference
from culm.training import pickle_job

pytestmark = pytest.mark.real
PATIENCE_S = 90.0
STEPS = 6
JOB = job(layers=[linear] * 4, steps=STEPS, exact=True)


def endless(steps: int) -> Job:
    return job(layers=[linear] * 4, steps=steps, exact=True)


def processes(fork_server: ForkServerClient, node: int) -> list[int]:
    """The agent of a node and its workers."""
    agent = fork_server.process_table.agent_pid(node)
    return [agent, *map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())]


def trained(fork_server: ForkServerClient, **request: Any) -> dict[str, Any]:
    """The summary of a run that must succeed."""

    async def main() -> dict[str, Any]:
        config = RunConfig(**{"pipelines": 2, "stages": 2, "workers_per_node": 2, **request})
        async with local_run(fork_server, pickle_job(JOB), config) as run:
            result = await run.wait_for_result()
            assert result.summary is not None, result.message
            return result.summary

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(
    ("strategy", "stages", "kill"),
    [("reroute", 2, "node=1 at=1B2"), ("shadow", 4, "node=0 at=1F1"), ("templates", 4, "node=3 at=2R")],
)
def test_a_node_killed_at_an_action_of_one_of_its_workers_changes_no_bit(
    fork_server: ForkServerClient, strategy: str, stages: int, kill: str
) -> None:
    summary = trained(fork_server, strategy=strategy, stages=stages, kills=(f"{kill} step=1",))
    assert summary["preemptions"] == 1
    assert summary["state_sha256"] == reference_result(JOB).state_sha256


def test_new_worker_processes_restart_from_the_checkpoint(fork_server: ForkServerClient, tmp_path: Path) -> None:
    summary = trained(
        fork_server,
        strategy="checkpoint",
        restart="cold",
        out=str(tmp_path / "run"),
        checkpoint_every=1,
        replace_within=0.0,
        kills=("node=1 step=3 at=1B3",),
    )
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["checkpoint"]
    assert summary["state_sha256"] == reference_result(JOB).state_sha256
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"node 0 worker 0: pipeline 0 stage 0", "node 0 worker 1: pipeline 0 stage 1"}


def disturbed(
    fork_server: ForkServerClient, disturb: Callable[[RunHandle], Awaitable[None]], joined: int | None = None
) -> tuple[dict[str, Any], Epoch]:
    """The summary and the last epoch of a run that is disturbed after its second step. It ends two steps after the
    workers of the node `joined` have the slots of a lost one, else some steps later."""

    async def main() -> tuple[dict[str, Any], Epoch]:
        config = RunConfig(pipelines=2, stages=2, workers_per_node=2, strategy="reroute")
        async with local_run(fork_server, pickle_job(endless(10**6)), config, gate="outside") as run:
            run.permit_steps_below(2)
            while (metrics := await run.next_step()) is not None and metrics["step"] < 1:
                pass
            await disturb(run)
            done = 2
            while done < STEPS or (joined is not None and not _is_member(run, joined)):
                run.permit_steps_below(done + 1)
                metrics = await run.next_step()
                assert metrics is not None, (await run.wait_for_result()).message
                done = metrics["step"] + 1
            run.finish_before(done + 2)
            run.permit_steps_below(done + 2)
            result = await run.wait_for_result()
            assert result.summary is not None, result.message
            assert run.epoch is not None
            return result.summary, run.epoch

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def _is_member(run: RunHandle, node: int) -> bool:
    return run.epoch is not None and len(run.epoch.slots_of_node(node)) == 2 and not run.epoch.shadows


def test_all_processes_of_a_node_are_killed_and_a_node_joins(fork_server: ForkServerClient) -> None:
    async def disturb(run: RunHandle) -> None:
        victims = processes(fork_server, 1)
        assert len(victims) == 3
        for process in victims:
            os.kill(process, signal.SIGKILL)
        await run.nodes.start()

    summary, epoch = disturbed(fork_server, disturb, joined=2)
    assert summary["preemptions"] == 1
    assert [member.node for member in epoch.present_members] == [0, 0, 2, 2]
    assert summary["state_sha256"] == reference(endless(summary["steps"])).state_sha256


@pytest.mark.parametrize("index", [0, 1])
def test_a_node_is_lost_as_a_whole_when_one_of_its_workers_dies(fork_server: ForkServerClient, index: int) -> None:
    victims: list[int] = []

    async def disturb(run: RunHandle) -> None:
        victims.extend(processes(fork_server, 1))
        os.kill(victims[1 + index], signal.SIGKILL)

    summary, epoch = disturbed(fork_server, disturb)
    assert summary["preemptions"] == 1
    assert {member.node for member in epoch.present_members} == {0}
    assert not any(Path(f"/proc/{process}/status").exists() for process in victims)
    assert summary["state_sha256"] == reference(endless(summary["steps"])).state_sha256


def test_a_node_with_notice_hands_over_and_leaves_as_a_whole(fork_server: ForkServerClient) -> None:
    async def disturb(run: RunHandle) -> None:
        os.kill(processes(fork_server, 1)[0], signal.SIGTERM)

    summary, epoch = disturbed(fork_server, disturb)
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["notice"]
    assert {member.node for member in epoch.present_members if epoch.slot_of(member.worker) in epoch.staying_slots} == {
        0
    }
    assert summary["state_sha256"] == reference(endless(summary["steps"])).state_sha256
