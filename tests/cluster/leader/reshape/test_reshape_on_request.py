"""The shape of a running run changes on request: other pipelines from the same state, with the same result. Changes by
policy are tested in test_reshape_by_policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reshape_runs import STEPS, events, job, members, reshaped

from culm.testing import Faults


def test_two_pipelines_of_three_become_three_of_two() -> None:
    run = reshaped((1, "3x2"), pipelines=2, stages=3)
    before, after = members(run)
    assert sorted(before.split()) == sorted(after.split())
    assert (run.summary["pipelines"], run.summary["stages"]) == (2, 3), "a summary says what was asked for"


def test_a_shape_can_change_and_change_back() -> None:
    run = reshaped((0, "1x4"), (3, "2x2"), pipelines=2, stages=2)
    assert len(members(run)) == 3


def test_an_empty_slot_becomes_two_unequal_pipelines() -> None:
    run = reshaped((2, "3+2"), pipelines=2, stages=3, faults=Faults().kill(5, step=1, nth=3))
    assert sorted(members(run)[-1].replace("-", "").split()) == ["0", "1", "2", "3", "4"]


def test_joining_nodes_form_further_pipelines() -> None:
    faults = Faults().join(0, step=1, count=4)
    run = reshaped((2, "3x2"), pipelines=1, stages=2, strategy="shadow", faults=faults)
    assert sorted(members(run)[-1].split()) == ["0", "1", "2", "3", "4", "5"]


def test_three_pipelines_of_which_one_is_shorter_with_split_backward() -> None:
    reshaped((1, "3+3+2"), pipelines=2, stages=4, schedule="zb")


@pytest.mark.parametrize(
    "features", [("clip", "tied"), ("batch norm", "weighted loss"), ("dropout", "evaluation"), ("bf16", "tied")]
)
def test_moved_layers_include_all_training_state(features: tuple[str, ...]) -> None:
    run = reshaped((0, "3+2"), (3, "2x2"), described=job(features), pipelines=1, stages=5, strategy="shadow-lazy")
    assert len(members(run)) == 3


@pytest.mark.parametrize("nodes", [(0,), (3,), (1, 3)])
@pytest.mark.parametrize("moment", ["inventory", "adopt", "layers_received"])
def test_a_loss_on_the_way_to_another_shape_loses_nothing(nodes: tuple[int, ...], moment: str) -> None:
    """The old holders still have everything: nothing is discarded before the first commit of the new shape."""
    faults = Faults().kill(nodes, at=moment, nth=2 if moment == "adopt" else 1)
    run = reshaped((1, "3x2"), pipelines=2, stages=3, faults=faults)
    assert run.summary["preemptions"] == len(nodes)


@pytest.mark.parametrize("moment", ["adopt", "layers_sent", "layers_received"])
@pytest.mark.parametrize("node", range(5))
def test_layers_of_a_node_without_a_slot_count_until_the_new_shape_has_started(node: int, moment: str) -> None:
    """Node 5 has no slot: its layers have one other holder, which is lost during the change. Each of the two strategies
    gets every node and every moment."""
    strategy = ("reroute", "templates")[(node + ["adopt", "layers_sent", "layers_received"].index(moment)) % 2]
    faults = Faults().kill(node, at=moment, nth=2 if moment == "adopt" else 1, silence=True)
    run = reshaped((1, "2+2+1"), pipelines=2, stages=3, faults=faults, strategy=strategy)
    assert run.summary["preemptions"] == 1


def test_a_node_without_a_slot_may_be_lost_before_it_reports() -> None:
    """Another node has sent its layers before: nothing is missing, and no answer is awaited."""
    faults = Faults().kill(1, at="layers_received").kill(5, at="inventory", nth=2)
    run = reshaped((3, "2+2+1"), pipelines=2, stages=3, faults=faults)
    assert run.summary["steps"] == STEPS


@pytest.mark.parametrize("nth", [4, 7, 10])
def test_a_loss_in_the_first_step_of_the_new_shape_loses_nothing(nth: int) -> None:
    run = reshaped((1, "3x2"), pipelines=2, stages=3, faults=Faults().kill(2, step=4, nth=nth))
    assert run.summary["preemptions"] == 1
    assert len(members(run)) > 2
    assert members(run)[1].split()[2] != "-", "it was lost in the new shape"


def test_a_loss_while_the_open_steps_drain_cancels_the_change_of_shape() -> None:
    faults = Faults().kill(2, step=3, nth=2)
    run = reshaped((1, "3x2"), pipelines=2, stages=3, faults=faults)
    assert members(run)[1:] == ["0 1 - 3 4 5"]


def test_after_a_loss_in_unequal_pipelines_a_joining_node_takes_all_stages_of_its_slot() -> None:
    faults = Faults().kill(0, step=5, nth=4).join(1, step=6)
    run = reshaped((1, "3+2"), pipelines=1, stages=5, strategy="shadow", faults=faults, described=job(steps=10))
    assert "5" in members(run)[-1].split()
    assert "0" not in members(run)[-1].split()


def test_the_leader_may_be_lost_in_unequal_pipelines() -> None:
    faults = Faults().kill(0, at="commit", step=5)
    run = reshaped((1, "3+2"), pipelines=1, stages=5, strategy="shadow", faults=faults)
    assert run.summary["preemptions"] == 1


@pytest.mark.parametrize(
    "faults",
    [
        Faults().warn(2, seconds=3, step=3, nth=3),
        Faults().warn(2, seconds=3, at="layers_received"),
        Faults().join(2, step=3, nth=3),
        Faults().pause(2, seconds=4, at="layers_received"),
        Faults().kill(0, at="layers_received", silence=True),
        Faults().delay_message(3, 1, seconds=0.4),
    ],
    ids=["notice", "notice in the move", "newcomer", "pause beyond the lease", "leader", "late"],
)
def test_other_faults_during_a_change_of_shape_change_nothing(faults: Faults) -> None:
    reshaped((1, "3x2"), pipelines=2, stages=3, faults=faults)


def test_checkpoints_of_all_shapes_are_complete(tmp_path: Path) -> None:
    run = reshaped((1, "3+2"), pipelines=1, stages=5, strategy="shadow", checkpoint_every=2, out=str(tmp_path))
    assert run.summary["checkpoints"][-1] == STEPS


def test_a_run_that_returns_to_a_checkpoint_keeps_its_shape(tmp_path: Path) -> None:
    """Both holders of a stage are lost at once: the others rebuild everything, in unequal pipelines."""
    faults = Faults().kill((0, 3), step=5, nth=2)
    run = reshaped(
        (0, "3+2"), pipelines=2, stages=3, faults=faults + Faults().kill(5, step=1, nth=2), out=str(tmp_path),
        checkpoint_every=1,
    )  # fmt: skip
    assert run.summary["preemptions"] == 3


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("4x2", "cannot use the requested layout 4x2: it needs 8 nodes and 4 are present"),
        ("2 by 2", "cannot use the requested layout '2 by 2': '2 by 2' is not a layout"),
        ("7+1", "stages is 7: 6 layers can fill at most 6 stages"),
    ],
)
def test_an_impossible_layout_is_refused_and_the_run_continues(tmp_path: Path, layout: str, why: str) -> None:
    run = reshaped((1, layout), pipelines=2, stages=2, out=str(tmp_path))
    assert why in events(tmp_path, "refused")[0]["why"]
    assert len(members(run)) == 1


def test_a_change_of_shape_is_logged_with_its_reason_and_cost(tmp_path: Path) -> None:
    reshaped((1, "3x2"), pipelines=2, stages=3, out=str(tmp_path))
    drain, made = events(tmp_path, "drain", "reshaped")
    assert (drain["layout"], drain["step"], drain["why"]) == ("3x2", 4, "3x2 was requested")
    assert (made["layout"], made["layers"]) == ("3x2", 8), "nobody is sent what it has"
    assert made["seconds"] > 0
