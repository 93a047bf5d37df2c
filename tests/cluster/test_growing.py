"""Growing back: a node that comes while a run goes on fills an empty slot, and nobody sees it in what is learned."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.known import hurt

from culm import Job
from culm.errors import UsageError
from culm.testing import Faults, Simulated
from culm.testing.chaos import job_of
from culm.testing.survive import varied

STEPS = 8


@functools.cache
def job(features: tuple[str, ...] = ()) -> Job:
    return replace(job_of(features, True, 4), steps=STEPS)


def grown(faults: Faults, *, features: tuple[str, ...] = (), **request: Any) -> Simulated:
    """A run that learned what one process does, though these faults struck."""
    return hurt(job(features), faults, **{"pipelines": 2, "stages": 2, "strategy": "reroute", **request})


def members(run: Simulated) -> list[str]:
    """Who filled the slots of each epoch, in order."""
    return [line.rpartition("members ")[2] for line in str(run.history).splitlines() if ": members " in line]


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
@pytest.mark.parametrize("victim", range(4))
def test_a_newcomer_fills_the_slot_of_the_lost_node_and_runs_its_stage(victim: int, strategy: str) -> None:
    witness = 0 if victim else 1
    done: set[tuple[int, int, str]] = set()

    def cost(*action: Any) -> float:
        done.add(action)
        return varied(0)(*action)

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


def test_the_reason_of_each_epoch_is_told(tmp_path: Path) -> None:
    grown(Faults().kill(1, step=1, nth=3).join(0, step=3), out=str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    whys = [event["why"] for event in events if event["kind"] == "epoch" and event["number"] > 2]
    assert whys == ["node 4 joins: it follows stage 1 until it is level", "node 4 has caught up and runs stage 1"]


def test_several_newcomers_are_taken_in_one_epoch() -> None:
    faults = Faults().kill((1, 3), step=1, nth=3).join(0, step=3, count=2)
    run = grown(faults, pipelines=2, stages=3)
    assert len(members(run)) == 4
    assert sorted(members(run)[-1].split()) == ["0", "2", "4", "5", "6", "7"]


def test_more_nodes_than_slots_wait_and_the_next_loss_is_filled_at_once() -> None:
    run = grown(Faults().join(0, step=1).kill(1, step=3, nth=3))
    assert members(run) == ["0 1 2 3", "0 4 2 3", "0 4 2 3"]  # it comes in with the recovery, then takes its place


def test_a_newcomer_that_is_lost_while_it_follows_leaves_the_slot_empty_again() -> None:
    run = grown(Faults().kill(1, step=1, nth=3).join(0, step=3).kill(4, at="copy"))
    assert members(run) == ["0 1 2 3", "0 - 2 3", "0 4 2 3", "0 - 2 3"]
    assert run.summary["preemptions"] == 2


@pytest.mark.parametrize("moment", ["copy", "adopt", "standing"])
def test_a_loss_while_a_newcomer_follows_is_recovered_from_and_the_newcomer_goes_on(moment: str) -> None:
    faults = Faults().kill(1, step=1, nth=3).join(0, step=3).kill(2, step=6)
    run = grown(faults.pause(6, at=moment, seconds=0.3), pipelines=3, stages=2)
    assert members(run)[-1] == "0 6 - 3 4 5"


def test_the_leader_may_be_lost_while_a_newcomer_follows() -> None:
    run = grown(Faults().kill(1, step=1, nth=3).join(0, step=3).kill(0, step=6), pipelines=3, stages=2)
    assert members(run)[-1] == "- 6 2 3 4 5"


def test_a_newcomer_may_lead() -> None:
    faults = Faults().kill((1, 2, 3), step=1, nth=3).join(0, step=3, count=3).kill(0, step=7, nth=2)
    run = grown(faults, strategy="shadow", pipelines=2, stages=2)
    assert run.summary["samples_lost"] == 0


@pytest.mark.parametrize(
    "features",
    [("clip", "tied"), ("batch norm", "weighted loss"), ("dropout", "evaluation"), ("bf16", "clip"), ("tied",)],
)
def test_a_copy_brings_all_that_a_layer_learns_with(features: tuple[str, ...]) -> None:
    run = grown(Faults().kill(0, step=1, nth=4).join(1, step=2), features=features, strategy="reroute")
    assert members(run)[-1].split()[0] == "4"


def test_where_somebody_has_moved_the_newcomer_takes_the_stage_that_misses_a_worker() -> None:
    faults = Faults().kill((0, 1), step=1, nth=3).join(2, step=6, count=2)
    run = grown(faults, pipelines=3, stages=2)
    assert "-" not in members(run)[-1]


def test_checkpoints_are_complete_though_a_newcomer_has_no_part_in_them_yet(tmp_path: Path) -> None:
    faults = Faults().kill(1, step=1, nth=3).join(0, step=3)
    run = grown(faults, out=str(tmp_path), checkpoint_every=1)
    assert STEPS in run.summary["checkpoints"]


def test_the_run_may_end_while_a_newcomer_follows() -> None:
    run = grown(Faults().kill(1, step=1, nth=3).join(0, step=STEPS - 2))
    assert run.summary["samples_lost"] == 0


def test_nodes_that_come_are_counted_from_one() -> None:
    with pytest.raises(UsageError, match="let at least 1 node come"):
        Faults().join(0, step=1, count=0)
    with pytest.raises(AssertionError, match="there is no node 5: the last one is 4"):
        grown(Faults().join(0, step=1).kill(5, step=2))
