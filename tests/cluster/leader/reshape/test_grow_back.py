"""Growing back: a node that joins a running run fills an empty slot, and the result does not change."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import run_with_faults

from culm import Job
from culm.errors import UsageError
from culm.testing import Faults, SimulatedRun
from culm.testing.chaos import make_job
from culm.testing.survival_check import random_action_cost

STEPS = 8


@functools.cache
def job(features: tuple[str, ...] = ()) -> Job:
    return replace(make_job(features, True, 4), steps=STEPS)


def grown(faults: Faults, *, features: tuple[str, ...] = (), **request: Any) -> SimulatedRun:
    """A run with these faults whose result equals that of one process."""
    return run_with_faults(job(features), faults, **{"pipelines": 2, "stages": 2, "strategy": "reroute", **request})


def members(run: SimulatedRun) -> list[str]:
    """The members of each epoch, by slot."""
    return [line.rpartition("members ")[2] for line in str(run.history).splitlines() if ": members " in line]


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
@pytest.mark.parametrize("victim", range(4))
def test_a_joining_node_fills_the_slot_of_a_lost_one_and_runs_its_stage(victim: int, strategy: str) -> None:
    witness = 0 if victim else 1
    done: set[tuple[int, int, str]] = set()

    def cost(*action: Any) -> float:
        done.add(action)
        return random_action_cost(0)(*action)

    run = grown(Faults().kill(victim, step=1, nth=3).join(witness, step=3), strategy=strategy, cost=cost)
    before, hurt, follows, whole = members(run)
    assert before.split() == ["0", "1", "2", "3"]
    assert hurt.split()[victim] == "-"
    assert follows == whole
    assert whole.split()[victim] == "4"
    assert run.summary["preemptions"] == 1
    assert {
        (4, STEPS - 1, f"{victim % 2}F{micro}") for micro in range(2 * (victim // 2), 2 + 2 * (victim // 2))
    } <= done


def test_each_epoch_event_has_a_reason(tmp_path: Path) -> None:
    grown(Faults().kill(1, step=1, nth=3).join(0, step=3), out=str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    whys = [event["why"] for event in events if event["kind"] == "epoch" and event["number"] > 2]
    assert whys == ["node 4 joined; copying stage 1 to it", "node 4 has caught up and runs stage 1"]


def test_several_nodes_join_in_one_epoch() -> None:
    faults = Faults().kill((1, 3), step=1, nth=3).join(0, step=3, count=2)
    run = grown(faults, pipelines=2, stages=3)
    assert len(members(run)) == 4
    assert sorted(members(run)[-1].split()) == ["0", "2", "4", "5", "6", "7"]


def test_more_nodes_than_slots_wait_and_the_next_loss_is_filled_at_once() -> None:
    run = grown(Faults().join(0, step=1).kill(1, step=3, nth=3))
    assert members(run) == ["0 1 2 3", "0 4 2 3", "0 4 2 3"]  # it comes in with the recovery, then takes its place


def test_a_joining_node_lost_while_catching_up_leaves_its_slot_empty() -> None:
    run = grown(Faults().kill(1, step=1, nth=3).join(0, step=3).kill(4, at="copy"))
    assert members(run) == ["0 1 2 3", "0 - 2 3", "0 4 2 3", "0 - 2 3"]
    assert run.summary["preemptions"] == 2


@pytest.mark.parametrize("moment", ["copy", "adopt", "inventory"])
def test_a_loss_while_a_node_catches_up_is_recovered_and_the_node_continues(moment: str) -> None:
    faults = Faults().kill(1, step=1, nth=3).join(0, step=3).kill(2, step=6)
    run = grown(faults.pause(6, at=moment, seconds=0.3), pipelines=3, stages=2)
    assert members(run)[-1] == "0 6 - 3 4 5"


def test_the_leader_may_be_lost_while_a_node_catches_up() -> None:
    run = grown(Faults().kill(1, step=1, nth=3).join(0, step=3).kill(0, step=6), pipelines=3, stages=2)
    assert members(run)[-1] == "- 6 2 3 4 5"


def test_a_joining_node_may_become_the_leader() -> None:
    faults = Faults().kill((1, 2, 3), step=1, nth=3).join(0, step=3, count=3).kill(0, step=7, nth=2)
    run = grown(faults, strategy="shadow", pipelines=2, stages=2)
    assert run.summary["samples_lost"] == 0


@pytest.mark.parametrize(
    "features",
    [("clip", "tied"), ("batch norm", "weighted loss"), ("dropout", "evaluation"), ("bf16", "clip"), ("tied",)],
)
def test_a_copy_includes_all_training_state_of_a_layer(features: tuple[str, ...]) -> None:
    run = grown(Faults().kill(0, step=1, nth=4).join(1, step=2), features=features, strategy="reroute")
    assert members(run)[-1].split()[0] == "4"


def test_after_a_move_a_joining_node_gets_the_stage_that_lacks_a_worker() -> None:
    faults = Faults().kill((0, 1), step=1, nth=3).join(2, step=6, count=2)
    run = grown(faults, pipelines=3, stages=2)
    assert "-" not in members(run)[-1]


def test_checkpoints_are_complete_while_a_node_catches_up(tmp_path: Path) -> None:
    faults = Faults().kill(1, step=1, nth=3).join(0, step=3)
    run = grown(faults, out=str(tmp_path), checkpoint_every=1)
    assert STEPS in run.summary["checkpoints"]


def test_the_run_may_end_while_a_node_catches_up() -> None:
    run = grown(Faults().kill(1, step=1, nth=3).join(0, step=STEPS - 2))
    assert run.summary["samples_lost"] == 0


def test_the_count_of_joining_nodes_is_at_least_one() -> None:
    with pytest.raises(UsageError, match="use at least 1 node"):
        Faults().join(0, step=1, count=0)
    with pytest.raises(AssertionError, match="there is no node 5: the last one is 4"):
        grown(Faults().join(0, step=1).kill(5, step=2))
