"""Losses at which a new leader has to find out who still holds the layers: nodes without a slot, nodes that return, and
nobody, because the run has just returned to a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import run_with_faults

from culm import Job
from culm.testing import Faults, SimulatedRun
from culm.testing.chaos import Scenario, make_job, run_scenario

ALL_MEMBERS = (0, 1, 2, 3)


@functools.cache
def job() -> Job:
    return make_job((), True, 4, 6)


def survived(faults: Faults, **request: Any) -> SimulatedRun:
    """A run of 2 x 2 with these faults whose result equals that of one process."""
    shape = {"pipelines": 2, "stages": 2, "strategy": "reroute", "reconfigure": "never"}
    return run_with_faults(job(), faults, **{**shape, **request})


def sources(run: SimulatedRun) -> list[tuple[list[int], str]]:
    return [(list(each["lost"]), each["source"]) for each in run.summary["recoveries"]]


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "templates"])
@pytest.mark.parametrize("joined", [1, 2])
def test_waiting_nodes_continue_from_the_checkpoint(strategy: str, joined: int, tmp_path: Path) -> None:
    faults = Faults().join(0, step=0, count=joined).kill(ALL_MEMBERS, step=3, nth=5)
    run = survived(faults, strategy=strategy, out=str(tmp_path), checkpoint_every=1)
    assert sources(run) == [([*ALL_MEMBERS], "checkpoint")]


def test_without_a_committed_step_waiting_nodes_start_the_run_again() -> None:
    run = survived(Faults().join(0, step=0, count=2).kill(ALL_MEMBERS, step=0, nth=6))
    assert sources(run) == [([*ALL_MEMBERS], "checkpoint")]


def test_without_a_checkpoint_the_run_ends_with_one_sentence() -> None:
    with pytest.raises(AssertionError, match=r"no other node holds its layers.*it had no checkpoint yet"):
        survived(Faults().join(0, step=0, count=2).kill(ALL_MEMBERS, step=3, nth=5))


@pytest.mark.parametrize(("at", "nth"), [("adopt", 3), ("layers_sent", 1), ("layers_received", 1)])
@pytest.mark.parametrize("workers_per_node", [1, 2])
def test_nodes_without_a_slot_in_the_new_shape_still_hold_the_old_one(workers_per_node: int, at: str, nth: int) -> None:
    """The smaller shape uses the first two workers; the others keep their layers until it has committed a step."""
    victims = tuple(range(2 // workers_per_node))
    faults = Faults().request_layout("1x2", step=1).kill(victims, at=at, nth=nth)
    run = survived(faults, workers_per_node=workers_per_node)
    assert sources(run) == [([*victims], "peers")]


def test_a_node_whose_session_has_expired_returns_to_a_run_that_a_newcomer_leads() -> None:
    """When the store is back, the first leader is dead, and nobody with a slot has a session."""
    faults = Faults().join(0, step=0).pause_store(1, step=1, seconds=5.0, expired=(2, 3)).kill((0, 1), step=1, nth=7)
    assert sources(survived(faults)) == [([0, 1], "peers")]


@pytest.mark.parametrize("seconds", [2.5, 4.5])
def test_the_leader_may_be_lost_while_the_run_waits_for_nodes_that_return(seconds: float) -> None:
    """Nobody else holds the second stage. The next leader waits for the same nodes."""
    faults = Faults().pause((1, 3), step=1, nth=3, seconds=6.0).kill(0, after_s=seconds)
    assert sources(survived(faults)) == [([0], "peers")]


def test_old_holders_report_in_every_epoch_until_the_new_shape_has_committed_a_step() -> None:
    """A notice makes an epoch between the change of shape and the loss."""
    faults = Faults().request_layout("1x2", step=1).warn(1, at="adopt", nth=2, seconds=3.0)
    assert sources(survived(faults.kill((0, 1), at="inventory", nth=3))) == [([0, 1], "peers")]


@pytest.mark.parametrize("strategy", ["shadow", "reroute"])
@pytest.mark.parametrize("pipelines", [2, 3])
def test_a_leader_may_leave_right_after_the_run_has_returned_to_a_checkpoint(
    strategy: str, pipelines: int, tmp_path: Path
) -> None:
    """The workers have not begun to rebuild: what they hold is of the steps with the flipped bit, and is not used."""
    faults = Faults().flip_memory(1, step=1, nth=2).warn(0, at="inventory", nth=1, seconds=0.3)
    run = survived(faults, strategy=strategy, pipelines=pipelines, out=str(tmp_path), checkpoint_every=1)
    assert run.summary["corruptions"] == 1


def test_a_loss_before_the_first_step_of_a_new_shape_does_not_return_to_the_start_of_the_run() -> None:
    """A notice has halted the new shape before; no worker has weights of it when the node is lost."""
    scenario = Scenario(
        seed=530163,
        features=("unequal layers", "weighted loss"),
        exact=True,
        micro_batches=6,
        pipelines=2,
        stages=2,
        schedule="1f1b",
        strategy="reroute",
        faults=Faults()
        .request_layout("2+1+1", node=2, step=1, nth=3)
        .request_layout("4x1", node=1, step=1, nth=9)
        .warn(1, step=3, nth=4, seconds=0.061),
        steps=10,
        reconfigure="never",
        zones=("a", "b", "c"),
    )
    assert run_scenario(scenario).failure == ""
