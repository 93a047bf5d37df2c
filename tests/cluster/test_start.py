"""Losses before the first epoch: the run begins with those that are left, whoever led, and others may come in."""

from __future__ import annotations

import asyncio
import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.known import hurt, truth

from culm import Job
from culm.api import pickled
from culm.cluster.setup import Request
from culm.providers.local import LocalNursery, local_run
from culm.testing import Faults, Simulated
from culm.testing.chaos import job_of

SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}
PATIENCE_S = 60.0


@functools.cache
def job() -> Job:
    return replace(job_of((), True, 4), steps=3)


def begun(faults: Faults, **request: Any) -> Simulated:
    """A run that learned what one process does, though these faults struck."""
    return hurt(job(), faults, **{**SHAPE, **request})


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "checkpoint", "templates"])
@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.001, 0.002])
def test_whoever_led_before_the_first_epoch_may_vanish_at_any_moment(
    after_s: float, strategy: str, tmp_path: Path
) -> None:
    run = begun(Faults().kill(0, after_s=after_s), strategy=strategy, out=str(tmp_path / "run"))
    assert run.summary["preemptions"] == 1


@pytest.mark.parametrize("pair", list(itertools.combinations(range(4), 2)))
def test_two_may_vanish_at_once_before_anybody_knew_them(pair: tuple[int, int]) -> None:
    run = begun(Faults().kill(pair, after_s=0.0))
    others = " ".join(str(node) for node in range(4) if node not in pair)
    assert f"epoch 1: members {others} -" in str(run.history)
    assert run.summary["preemptions"] == 2


def test_who_comes_in_the_place_of_one_that_vanished_at_the_start_takes_a_slot() -> None:
    run = begun(Faults().kill(0, after_s=0.0).join(2, after_s=0.1))
    assert ": members 1 2 3 4" in str(run.history)


@pytest.mark.parametrize(
    ("strategy", "source"), [("reroute", "peers"), ("shadow", "shadow"), ("shadow-lazy", "shadow")]
)
@pytest.mark.parametrize("at", ["1F0", "1B0", "1S"])
def test_a_loss_in_the_first_step_is_made_good_as_in_any_other(at: str, strategy: str, source: str) -> None:
    run = begun(Faults().kill(1, at=at, step=0), strategy=strategy, pipelines=2 if strategy == "reroute" else 1)
    assert [each["source"] for each in run.summary["recoveries"]] == [source]


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.parametrize("moment", ["at once", "leads", "is up"])
def test_a_real_node_may_be_killed_while_the_run_starts(moment: str) -> None:
    """At once: before it has joined. Leads: the one that does, before there is an epoch."""
    request = Request(pipelines=2, stages=2, strategy="reroute")

    async def struck() -> dict[str, Any]:
        async with local_run(nursery, pickled(job()), request) as run:
            if moment == "leads":
                await run.led()
            elif moment == "is up":
                await run.node_up()
            run.nodes.stop(run.leader or 0)
            result = await run.result()
        if result.summary is None:
            raise result.failure()
        return dict(result.summary)

    with LocalNursery() as nursery:
        summary = asyncio.run(asyncio.wait_for(struck(), PATIENCE_S))
    assert summary["state_sha256"] == truth(job()).state_sha256
    assert summary["samples_lost"] == 0
