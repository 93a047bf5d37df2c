"""Outages of the simulated store: everybody waits, nobody is taken for dead, and the run goes on when it is back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.known import hurt

from culm import Job
from culm.errors import UsageError
from culm.testing import Faults, Simulated
from culm.testing.chaos import job_of
from culm.testing.cluster import LEASE_S

SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}


@functools.cache
def job() -> Job:
    return job_of((), True, 4)


def endured(faults: Faults) -> Simulated:
    return hurt(job(), faults, **SHAPE)


@pytest.mark.parametrize("seconds", [0.1, 3 * LEASE_S])
def test_nobody_is_lost_by_an_outage_however_long(seconds: float) -> None:
    run = endured(Faults().outage(seconds=seconds, step=1, nth=2))
    assert run.summary["preemptions"] == 0
    assert "the store is back" in str(run.history)
    assert run.virtual_s > seconds


def test_who_is_silent_in_an_outage_has_a_whole_lease_afterwards() -> None:
    silent = Faults().pause(1, seconds=LEASE_S + 0.5, step=1, nth=2)
    assert endured(silent).summary["preemptions"] == 1
    assert endured(silent.outage(0, seconds=LEASE_S - 0.5, at="0F0", step=1)).summary["preemptions"] == 0


def test_a_node_that_is_killed_in_an_outage_is_missed_when_the_store_is_back() -> None:
    run = endured(Faults().outage(0, seconds=1.0, at="0F0", step=1).kill(3, step=1, nth=3))
    happened = [entry.what for entry in run.history.entries]
    assert happened.index("the store is back") < happened.index("nodes/3 is gone from the store")
    assert [each["lost"] for each in run.summary["recoveries"]] == [[3]]


def test_the_leader_may_be_lost_in_an_outage() -> None:
    run = endured(Faults().outage(1, seconds=1.0, step=1, nth=2).kill(0, step=1, nth=5))
    assert run.summary["preemptions"] == 1


def test_an_outage_has_a_duration() -> None:
    with pytest.raises(UsageError, match="outage: -1 is no duration"):
        Faults().outage(seconds=-1, step=0)
