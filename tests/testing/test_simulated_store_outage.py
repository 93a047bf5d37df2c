"""Outages of the simulated store: all calls wait, no node is declared lost, and the run continues afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tests.cached_runs import run_with_faults

from culm import Job
from culm.errors import UsageError
from culm.testing import Faults, SimulatedRun
from culm.testing.chaos import make_job
from culm.testing.simulated_cluster import LEASE_S

SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}


@functools.cache
def job() -> Job:
    return make_job((), True, 4)


def run_small_job(faults: Faults) -> SimulatedRun:
    return run_with_faults(job(), faults, **SHAPE)


@pytest.mark.parametrize("seconds", [0.1, 3 * LEASE_S])
def test_an_outage_of_any_length_loses_no_node(seconds: float) -> None:
    run = run_small_job(Faults().outage(seconds=seconds, step=1, nth=2))
    assert run.summary["preemptions"] == 0
    assert "the store is back" in str(run.history)
    assert run.virtual_s > seconds


def test_a_node_silent_during_an_outage_has_a_whole_lease_afterwards() -> None:
    silent = Faults().pause(1, seconds=LEASE_S + 2.5, step=1, nth=2)
    assert run_small_job(silent).summary["preemptions"] == 1
    assert run_small_job(silent.outage(0, seconds=LEASE_S + 1.5, at="0F0", step=1)).summary["preemptions"] == 0


def test_a_node_killed_during_an_outage_is_lost_when_the_store_is_back() -> None:
    run = run_small_job(Faults().outage(0, seconds=1.0, at="0F0", step=1).kill(3, step=1, nth=3))
    happened = [entry.what for entry in run.history.entries]
    assert happened.index("the store is back") < happened.index("nodes/3 is gone from the store")
    assert [each["lost"] for each in run.summary["recoveries"]] == [[3]]


def test_the_leader_may_be_lost_in_an_outage() -> None:
    run = run_small_job(Faults().outage(1, seconds=1.0, step=1, nth=2).kill(0, step=1, nth=5))
    assert run.summary["preemptions"] == 1


def test_an_outage_has_a_duration() -> None:
    with pytest.raises(UsageError, match="outage: -1 is not a duration"):
        Faults().outage(seconds=-1, step=0)
