"""Preemption notices: a leaving node hands over its state. Nothing is redone, and nothing is lost."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import reference_result, run_with_faults

from culm import Job
from culm.errors import NodeLost
from culm.testing import Faults, SimulatedRun, simulate
from culm.testing.chaos import make_job

STEPS = 6
AMPLE_S, BRIEF_S = 60.0, 0.4
"""Seconds of notice: enough for many steps, and for the two open ones."""
SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}


@functools.cache
def job(features: tuple[str, ...] = ()) -> Job:
    return replace(make_job(features, True, 4), steps=STEPS)


def drained(faults: Faults, *, features: tuple[str, ...] = (), **request: Any) -> SimulatedRun:
    """A run with these faults whose result equals that of one process."""
    return run_with_faults(job(features), faults, **{**SHAPE, **request})


def left(run: SimulatedRun) -> list[tuple[list[int], int, str]]:
    """For each recovery: the lost nodes, the redone actions, and the source of the layers."""
    return [(r["lost"], r["redone_actions"], r["source"]) for r in run.summary["recoveries"]]


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
@pytest.mark.parametrize("node", range(4))
def test_a_node_with_notice_leaves_and_nothing_is_redone(node: int, strategy: str) -> None:
    run = drained(Faults().warn(node, seconds=AMPLE_S, step=3, nth=4), strategy=strategy)
    assert left(run) == [([node], 0, "notice")]
    assert run.summary["preemptions"] == 1


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_notice_as_long_as_the_open_steps_is_enough_whatever_the_node_was_at(nth: int) -> None:
    run = drained(Faults().warn(3, seconds=BRIEF_S, step=3, nth=nth))
    assert left(run) == [([3], 0, "notice")]


def test_a_node_that_vanishes_before_its_handover_is_a_normal_loss() -> None:
    run = drained(Faults().warn(3, seconds=0.001, step=3, nth=2))
    assert [lost for lost, _, _ in left(run)] == [[3]]


@pytest.mark.parametrize("features", [("clip", "tied"), ("batch norm", "weighted loss"), ("dropout", "evaluation")])
def test_all_training_state_of_a_layer_is_handed_over(features: tuple[str, ...]) -> None:
    assert left(drained(Faults().warn(1, seconds=AMPLE_S, step=2, nth=3), features=features)) == [([1], 0, "notice")]


def test_notices_may_overlap() -> None:
    faults = Faults().warn(1, seconds=AMPLE_S, step=3, nth=2).warn(2, seconds=AMPLE_S, step=3, nth=3)
    run = drained(faults, pipelines=3)
    assert sorted(node for lost, _, _ in left(run) for node in lost) == [1, 2]
    assert sum(redone for _, redone, _ in left(run)) == 0


def test_the_last_holder_of_a_stage_stays_until_another_node_has_a_copy() -> None:
    faults = Faults().warn((1, 3), seconds=AMPLE_S, step=2, nth=2)
    run = drained(faults)
    assert sorted(node for lost, _, _ in left(run) for node in lost) == [1, 3]
    assert sum(redone for _, redone, _ in left(run)) == 0


def test_a_notice_during_a_recovery_loses_nothing() -> None:
    faults = Faults().kill(1, step=2, nth=3).warn(4, seconds=AMPLE_S, at="inventory")
    run = drained(faults, pipelines=3)
    assert sorted(node for lost, _, _ in left(run) for node in lost) == [1, 4]


def test_a_loss_during_a_drain_is_recovered_from() -> None:
    faults = Faults().warn(1, seconds=AMPLE_S, step=3, nth=2).kill(4, at="adopt", nth=2)
    run = drained(faults, pipelines=3)
    assert run.summary["preemptions"] == 2


def test_a_joining_node_replaces_a_leaving_one() -> None:
    run = drained(Faults().join(0, step=0).warn(1, seconds=AMPLE_S, step=2, nth=2))
    assert ": members 0 4 2 3" in str(run.history)


def test_a_node_that_waits_for_a_slot_may_go_at_once() -> None:
    run = drained(Faults().join(0, step=0).warn(4, seconds=AMPLE_S, after_s=0.3))
    assert run.summary["recoveries"] == []


def test_a_notice_in_the_last_step_changes_nothing_of_it() -> None:
    run = drained(Faults().warn(1, seconds=AMPLE_S, at="1S+", step=STEPS - 1))
    assert [redone for _, redone, _ in left(run)] in ([], [0])


@pytest.mark.parametrize("node", [0, 1])
def test_a_run_starts_without_a_node_that_leaves_before_the_first_step(node: int) -> None:
    faults = Faults().warn(node, seconds=AMPLE_S, after_s=0.0).join(2, after_s=0.1)
    others = " ".join(str(other) for other in range(4) if other != node)
    history = str(drained(faults).history)
    assert f"epoch 1: members {others} -" in history
    assert f": members {others} 4" in history


def test_if_every_node_has_notice_the_run_ends_with_a_checkpoint_and_can_be_resumed(tmp_path: Path) -> None:
    faults = Faults().warn((0, 1, 2, 3), seconds=AMPLE_S, step=3, nth=2)
    with pytest.raises(NodeLost, match=r"every node has notice: the run ended before step \d; resume it with --resume"):
        simulate(job(), faults=faults, out=str(tmp_path), cost=lambda *_: 0.01, latency=0.001, **SHAPE)
    resumed = simulate(job(), resume=str(tmp_path), **SHAPE)
    assert resumed.state_sha256 == reference_result(job()).state_sha256


def test_a_node_may_leave_while_it_catches_up_and_the_next_one_joins() -> None:
    faults = Faults().kill(1, step=1, nth=2).join(0, step=1, nth=3).warn(4, seconds=AMPLE_S, at="copy").join(2, step=4)
    run = drained(faults)
    assert [lost for lost, _, source in left(run) if source == "notice"] == [[4]]
    assert sum(redone for _, redone, source in left(run) if source == "notice") == 0
    assert ": members 0 5 2 3" in str(run.history)


@pytest.mark.parametrize("moment", [{"at": "adopt"}, {"step": 0, "nth": 3}])
def test_a_notice_while_the_first_step_is_prepared_or_run_costs_nothing(moment: dict[str, Any]) -> None:
    run = drained(Faults().warn(1, seconds=AMPLE_S, **moment))
    assert left(run) == [([1], 0, "notice")]
    assert run.summary["preemptions"] == 1


def test_the_run_may_end_during_a_drain() -> None:
    run = drained(Faults().warn(2, seconds=AMPLE_S, step=STEPS - 1, nth=2))
    assert left(run) == [([2], 0, "notice")]


def test_a_node_that_vanishes_before_the_end_of_its_notice_is_a_normal_loss() -> None:
    faults = Faults().warn(3, seconds=AMPLE_S, step=3, nth=2).kill(3, at="adopt", nth=2)
    assert [lost for lost, _, _ in left(drained(faults))] == [[3]]


def test_a_notice_during_an_outage_is_handled_when_the_store_is_back() -> None:
    faults = Faults().outage(1, seconds=1.0, step=3, nth=2).warn(1, seconds=AMPLE_S, step=3, nth=3)
    assert left(drained(faults)) == [([1], 0, "notice")]


def test_the_leader_may_leave_with_half_a_step_of_notice() -> None:
    run = drained(Faults().warn(0, seconds=BRIEF_S, step=3, nth=3))
    assert left(run) == [([0], 0, "notice")]
    assert "node 0 leads" in str(run.history)
    assert run.summary["preemptions"] == 1


@pytest.mark.parametrize("came", [1, 4])
@pytest.mark.parametrize("strategy", ["reroute", "migrate"])
def test_if_all_members_have_notice_standby_nodes_continue(tmp_path: Path, strategy: str, came: int) -> None:
    faults = Faults().join(0, count=came, step=0).warn((0, 1, 2, 3), seconds=AMPLE_S, step=3, nth=2)
    run = drained(faults, strategy=strategy, out=str(tmp_path))
    assert sorted(node for lost, _, _ in left(run) for node in lost) == [0, 1, 2, 3]
    assert {(redone, source) for _, redone, source in left(run)} == {(0, "notice")}


@pytest.mark.parametrize("ends", [Faults().kill(4, at="copy"), Faults().warn(4, seconds=AMPLE_S, at="copy")])
def test_the_run_ends_when_standby_nodes_are_gone_too(tmp_path: Path, ends: Faults) -> None:
    faults = Faults().join(0, step=0).warn((0, 1, 2, 3), seconds=AMPLE_S, step=1, nth=2) + ends
    with pytest.raises(NodeLost, match="every node has notice: the run ended before step"):
        simulate(job(), faults=faults, out=str(tmp_path), cost=lambda *_: 0.01, latency=0.001, **SHAPE)


def test_a_run_that_ends_because_of_notices_survives_the_loss_of_its_leader(tmp_path: Path) -> None:
    faults = Faults().warn((0, 1, 2, 3), seconds=AMPLE_S, step=3, nth=2).kill(0, step=4, nth=3)
    with pytest.raises(NodeLost, match="every node has notice: the run ended before step"):
        simulate(job(), faults=faults, out=str(tmp_path), cost=lambda *_: 0.01, latency=0.001, **SHAPE)


def test_copies_that_leaving_nodes_could_not_finish_end_the_run_in_one_sentence() -> None:
    """The new leader knows the losses from its predecessor."""
    faults = Faults().join(0, count=4, step=0).warn((0, 1, 2, 3), seconds=0.05, step=3, nth=2)
    with pytest.raises(NodeLost, match=r"was lost in step \d and no other node holds its layers"):
        simulate(job(), faults=faults, cost=lambda *_: 0.01, latency=0.001, **SHAPE)


def test_notices_to_all_nodes_one_after_the_other_end_the_run(tmp_path: Path) -> None:
    faults = Faults().warn((0, 1), seconds=AMPLE_S, step=3, nth=2).warn((2, 3), seconds=AMPLE_S, step=3, nth=5)
    with pytest.raises(NodeLost, match="every node has notice: the run ended before step"):
        simulate(job(), faults=faults, out=str(tmp_path), cost=lambda *_: 0.01, latency=0.001, **SHAPE)
    resumed = simulate(job(), resume=str(tmp_path), **SHAPE)
    assert resumed.state_sha256 == reference_result(job()).state_sha256


def test_a_notice_to_all_before_the_first_step_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    faults = Faults().warn((0, 1, 2, 3), seconds=AMPLE_S, after_s=0.0)
    with pytest.raises(NodeLost, match="every node has notice: the run ended before step 0; nothing of it was saved"):
        simulate(job(), faults=faults, out=str(tmp_path), latency=0.001, **SHAPE)


def test_a_notice_to_all_in_the_last_steps_lets_the_run_complete() -> None:
    run = drained(Faults().warn((0, 1, 2, 3), seconds=AMPLE_S, step=STEPS - 1, nth=1))
    assert run.summary["steps"] == STEPS


def test_a_notice_before_all_layers_are_built_restarts_from_scratch() -> None:
    """The first node to build its layers receives a notice: nothing need be copied from it before the first update."""
    faults = Faults().warn(2, seconds=0.3, step=0).kill((0, 1), step=0, nth=6)
    assert drained(faults, strategy="shadow-lazy").summary["preemptions"] == 3
