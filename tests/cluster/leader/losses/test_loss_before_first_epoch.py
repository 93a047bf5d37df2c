"""Losses before the first epoch: the run starts with the remaining nodes, and others may join."""

from __future__ import annotations

import asyncio
import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import reference_result, run_with_faults

from culm import Job
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, local_run
from culm.testing import Faults, SimulatedRun
from culm.testing.chaos import make_job
from culm.training import pickle_job

SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}
PATIENCE_S = 60.0


@functools.cache
def job() -> Job:
    return replace(make_job((), True, 4), steps=3)


def begun(faults: Faults, **request: Any) -> SimulatedRun:
    """A run with these faults whose result equals that of one process."""
    return run_with_faults(job(), faults, **{**SHAPE, **request})


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "checkpoint", "templates"])
@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.001, 0.002])
def test_the_leader_may_vanish_at_any_moment_before_the_first_epoch(
    after_s: float, strategy: str, tmp_path: Path
) -> None:
    run = begun(Faults().kill(0, after_s=after_s), strategy=strategy, out=str(tmp_path / "run"))
    assert run.summary["preemptions"] == 1


@pytest.mark.parametrize("pair", list(itertools.combinations(range(4), 2)))
def test_two_nodes_may_vanish_before_they_are_known(pair: tuple[int, int]) -> None:
    run = begun(Faults().kill(pair, after_s=0.0))
    others = " ".join(str(node) for node in range(4) if node not in pair)
    assert f"epoch 1: members {others} -" in str(run.history)
    assert run.summary["preemptions"] == 2


def test_a_node_that_replaces_one_lost_at_the_start_takes_a_slot() -> None:
    run = begun(Faults().kill(0, after_s=0.0).join(2, after_s=0.1))
    assert ": members 1 2 3 4" in str(run.history)


@pytest.mark.parametrize(
    ("strategy", "source"), [("reroute", "peers"), ("shadow", "shadow"), ("shadow-lazy", "shadow")]
)
@pytest.mark.parametrize("at", ["1F0", "1B0", "1S"])
def test_a_loss_in_the_first_step_is_recovered_as_in_any_other(at: str, strategy: str, source: str) -> None:
    run = begun(Faults().kill(1, at=at, step=0), strategy=strategy, pipelines=2 if strategy == "reroute" else 1)
    assert [each["source"] for each in run.summary["recoveries"]] == [source]


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.parametrize("moment", ["at once", "leads", "is up"])
def test_a_real_node_may_be_killed_while_the_run_starts(moment: str) -> None:
    """ "at once": before it has joined; "leads": the leader, before the first epoch."""
    request = RunConfig(pipelines=2, stages=2, strategy="reroute")

    async def run_and_kill() -> dict[str, Any]:
        async with local_run(fork_server, pickle_job(job()), request) as run:
            if moment == "leads":
                await run.wait_for_leader()
            elif moment == "is up":
                await run.next_node_up()
            run.nodes.stop(run.leader or 0)
            result = await run.wait_for_result()
        if result.summary is None:
            raise result.to_error()
        return dict(result.summary)

    with ForkServerClient() as fork_server:
        summary = asyncio.run(asyncio.wait_for(run_and_kill(), PATIENCE_S))
    assert summary["state_sha256"] == reference_result(job()).state_sha256
    assert summary["samples_lost"] == 0
