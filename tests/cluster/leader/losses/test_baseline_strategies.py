"""The baseline strategies, simulated: what each loses, what it reports, and the resulting weights."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cached_runs import cached_setup, reference_result

from culm import Job
from culm.cluster.leader.checkpoints.checkpoint_epoch import assign_whole_pipelines
from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.plan.recover.recovery_plan import find_discarded_sums
from culm.runtime.epoch import Member
from culm.testing import Faults, SimulatedRun, reference
from culm.testing.chaos import make_job
from culm.testing.simulated_cluster import run_prepared
from culm.testing.survival_check import ActionCost, random_action_cost

STEPS = 6
BATCH = 16
"""Samples of a step."""


@functools.cache
def job(features: tuple[str, ...] = (), *, exact: bool = True) -> Job:
    return replace(make_job(features, exact, 4), steps=STEPS)


def run(
    out: Path, faults: Faults, *, features: tuple[str, ...] = (), cost: ActionCost | None = None, **request: Any
) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    """A run into which these faults were injected, and its events."""
    described = job(features)
    setup = cached_setup(described, **{"pipelines": 2, "stages": 2, "out": str(out), **request})
    found = run_prepared(described, setup, faults=faults, cost=cost or random_action_cost(0), latency=0.001)
    assert not found.faults_not_reached(faults)
    return found, [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def rewound(out: Path, faults: Faults, **request: Any) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    """A run under `checkpoint`, or as requested, whose result equals that of the failure-free run."""
    found, events = run(out, faults, **{"strategy": "checkpoint", "checkpoint_every": 2, **request})
    assert found.state_sha256 == reference_result(job(request.get("features", ()))).state_sha256
    assert found.summary["samples"] == found.summary["samples_expected"] == STEPS * BATCH
    assert (found.summary["samples_lost"], found.summary["samples_duplicated"]) == (0, 0)
    return found, events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


# checkpoint


@pytest.mark.parametrize("restart", ["warm", "cold"])
@pytest.mark.parametrize("victim", range(4))
def test_after_a_loss_all_nodes_restart_from_the_newest_checkpoint(tmp_path: Path, victim: int, restart: str) -> None:
    found, events = rewound(tmp_path, Faults().kill(victim, step=3, nth=3), restart=restart)
    (lost,) = found.summary["recoveries"]
    assert (lost["step"], lost["lost"], lost["source"]) == (3, [victim], "checkpoint")
    assert lost["redone_actions"] > 0
    assert lost["redo_ms"] > 0
    assert found.summary["samples_redone"] == BATCH  # step 2, which was committed; 3 was open
    (rewind,) = of(events, "rewound")
    assert (rewind["step"], rewind["steps"], rewind["samples"]) == (2, 1, BATCH)


def test_under_checkpoint_layers_on_peers_are_not_used(tmp_path: Path) -> None:
    """The same loss costs `reroute` nothing that was committed."""
    faults = Faults().kill(1, step=3, nth=3)
    assert rewound(tmp_path / "a", faults)[0].summary["samples_redone"] > 0
    assert rewound(tmp_path / "b", faults, strategy="reroute")[0].summary["samples_redone"] == 0


def test_steps_that_run_twice_are_logged_once(tmp_path: Path) -> None:
    rewound(tmp_path, Faults().kill(1, step=5, nth=3), checkpoint_every=4)
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))


def test_without_a_checkpoint_the_run_restarts_from_the_beginning(tmp_path: Path) -> None:
    found, events = rewound(tmp_path, Faults().kill(1, step=2, nth=3), checkpoint_every=4)
    assert found.summary["samples_redone"] == 2 * BATCH
    assert "all nodes restart from the start of the run" in of(events, "epoch")[-1]["why"]


@pytest.mark.parametrize("step", [3, STEPS - 1], ids=["midway", "the-last"])
def test_a_checkpoint_of_an_uncommitted_step_does_not_count(tmp_path: Path, step: int) -> None:
    """The last shard comes from a node that was silent for too long: the step is run, reported and counted again."""
    found, events = rewound(tmp_path, Faults().pause(3, at="1S+", step=step, seconds=3.0))
    assert of(events, "rewound")[0]["step"] == step - 1
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [each["loss"] for each in steps] == reference_result(job()).losses
    assert found.summary["final_loss"] == reference_result(job()).losses[-1]


def test_a_standby_node_replaces_a_lost_one_at_once(tmp_path: Path) -> None:
    found, events = rewound(tmp_path, Faults().join(2, step=1).kill(1, step=3, nth=3))
    assert not of(events, "waiting")
    assert of(events, "epoch")[-1]["members"] == [0, 4, 2, 3]
    assert of(events, "epoch")[-1]["why"].endswith("all slots filled")
    assert found.virtual_s < 2.0


def test_a_restart_waits_for_a_replacement_node(tmp_path: Path) -> None:
    """Nothing progresses meanwhile, so the node has to join by the clock."""
    faults = Faults().kill(1, step=3, nth=3).join(0, after_s=3.0)
    found, events = rewound(tmp_path, faults, replace_within=60.0)
    (waiting,) = of(events, "waiting")
    assert 59.0 < waiting["seconds"] <= 60.0
    assert of(events, "epoch")[-1]["members"] == [0, 4, 2, 3]
    assert 3.0 < found.virtual_s < 10.0


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_without_a_replacement_whole_pipelines_continue_and_the_rest_is_on_standby(
    tmp_path: Path, restart: str
) -> None:
    _, events = rewound(tmp_path, Faults().kill(1, step=3, nth=3), replace_within=2.0, restart=restart)
    last = of(events, "epoch")[-1]
    assert last["members"] == [2, 3]
    assert last["why"] == (
        "strategy checkpoint: node 1 is gone, all nodes restart from the checkpoint after step 2, "
        "on 1 whole pipeline of 2, node 0 is on standby"
    )


def test_standby_nodes_complete_a_pipeline_after_another_loss(tmp_path: Path) -> None:
    faults = Faults().kill(1, step=3, nth=3).kill(2, step=5, nth=3)
    _, events = rewound(tmp_path, faults, replace_within=0.0)
    assert of(events, "epoch")[-1]["members"] == [0, 3]


def test_fewer_nodes_than_a_pipeline_has_stages_carry_several_each(tmp_path: Path) -> None:
    _, events = rewound(tmp_path, Faults().kill((0, 1, 2), step=3, nth=3), replace_within=0.0)
    assert "on 1 node with several stages on each" in of(events, "epoch")[-1]["why"]


def test_joining_nodes_are_admitted_when_a_checkpoint_is_complete(tmp_path: Path) -> None:
    """Then hardly anything is redone."""
    faults = Faults().kill(1, step=1, nth=3).join(2, step=2)
    found, events = rewound(tmp_path, faults, replace_within=0.0)
    assert of(events, "epoch")[-1]["members"] == [0, 4, 2, 3]
    assert "from the checkpoint after step" in of(events, "epoch")[-1]["why"]
    assert found.summary["preemptions"] == 1


def test_a_restart_for_joining_nodes_does_not_wait_for_more(tmp_path: Path) -> None:
    faults = Faults().kill((1, 3, 5), step=1, nth=3).join(0, step=4)
    _, events = rewound(tmp_path, faults, pipelines=3, replace_within=2.0)
    assert [len(epoch["members"]) for epoch in of(events, "epoch")] == [6, 2, 4]
    assert len(of(events, "waiting")) == 1


def test_a_second_loss_while_steps_are_run_again_is_counted_too(tmp_path: Path) -> None:
    faults = Faults().kill(1, step=3, nth=3).kill(3, step=2, nth=9)
    found, _ = rewound(tmp_path, faults, pipelines=3, replace_within=0.0)
    assert [lost["lost"] for lost in found.summary["recoveries"]] == [[1, 3]]
    assert found.summary["preemptions"] == 2


def test_strategies_that_restart_from_a_checkpoint_keep_no_outputs(tmp_path: Path) -> None:
    kept = {
        strategy: rewound(tmp_path / strategy, Faults(), strategy=strategy)[0].summary["memory"]["kept_bytes"]
        for strategy in ("checkpoint", "reroute")
    }
    assert kept["checkpoint"] == 0 < kept["reroute"]


def test_a_connection_that_breaks_is_a_restart_too(tmp_path: Path) -> None:
    """No node is lost, but no outputs were kept that could be sent again."""
    found, events = rewound(tmp_path, Faults().drop_message(0, 1, nth=12, kind="frame"))
    assert found.summary["preemptions"] == 0
    assert of(events, "epoch")[-1]["number"] > 1


def test_cold_restarts_restart_every_worker_and_warm_ones_none(tmp_path: Path) -> None:
    for restart, expected in (("cold", [0, 2, 3]), ("warm", [])):
        _, events = rewound(tmp_path / restart, Faults().kill(1, step=3, nth=3), restart=restart)
        assert sorted(event["node"] for event in of(events, "worker_renewed")) == expected


@pytest.mark.parametrize(
    "moment",
    [{"at": "adopt", "nth": 2}, {"step": 2, "nth": 7}, {"step": 2, "nth": 9}],
    ids=["adopts", "begins", "redoes"],
)
def test_the_leader_may_be_lost_in_a_cold_restart(tmp_path: Path, moment: dict[str, Any]) -> None:
    faults = Faults().kill(3, step=3, nth=3).kill(0, **moment)
    found, _ = rewound(tmp_path, faults, restart="cold", replace_within=0.0)
    assert found.summary["preemptions"] == 2


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_whole_pipelines_are_assigned_to_present_nodes_once_each(D: int, P: int, data: st.DataObject) -> None:
    setup = cached_setup(job(), pipelines=D, stages=P, strategy="none")
    slots = data.draw(st.sets(st.integers(0, D * P - 1)))
    present = {slot: Member(slot, "") for slot in slots}
    waiting = [Member(100 + i, "") for i in range(data.draw(st.integers(0, 5)))]
    assigned = assign_whole_pipelines(setup, present, waiting)
    nodes = [member.node for member in assigned.values()]
    assert len(set(nodes)) == len(nodes)
    assert set(nodes) <= {member.node for member in (*present.values(), *waiting)}
    assert len(nodes) == min(D, (len(present) + len(waiting)) // P) * P or len(nodes) == len(present) + len(waiting) < P
    assert len({slot // P for slot in assigned}) <= max(1, len(nodes) // P)
    assert all(assigned[slot] == present[slot] for slot in assigned if slot in present)  # nobody moves without need


# migrate


@pytest.mark.parametrize("pipelines", [1, 2])
def test_with_notice_a_node_hands_over_and_nothing_is_redone(tmp_path: Path, pipelines: int) -> None:
    faults = Faults().warn(1, seconds=60.0, step=4, nth=3)
    found, _ = rewound(tmp_path, faults, strategy="migrate", pipelines=pipelines)
    (gone,) = found.summary["recoveries"]
    assert (gone["lost"], gone["source"], gone["redone_actions"]) == ([1], "notice", 0)
    assert found.summary["samples_redone"] == 0


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_without_notice_migrate_behaves_like_checkpoint(tmp_path: Path, restart: str) -> None:
    faults = Faults().kill(1, step=3, nth=3)
    found, _ = rewound(tmp_path, faults, strategy="migrate", restart=restart, replace_within=0.0)
    assert [lost["source"] for lost in found.summary["recoveries"]] == ["checkpoint"]
    assert found.summary["samples_redone"] == BATCH


def test_migrate_makes_no_copies_ahead_of_a_notice(tmp_path: Path) -> None:
    _, events = rewound(tmp_path, Faults().join(0, step=2), strategy="migrate", pipelines=1)
    assert not of(events, "protected")


# drop


def left_out(events: list[dict[str, Any]]) -> dict[int, list[int]]:
    """By step: the micro-batches that the run reports as left out. A later epoch decides again for open steps."""
    found: dict[int, list[int]] = {}
    for epoch, after in itertools.pairwise(events):
        if epoch["kind"] == "epoch" and epoch["number"] > 1:
            first = min(epoch["open_steps"], default=epoch["step"])
            found = {step: micros for step, micros in found.items() if step < first}
        if epoch["kind"] == "epoch" and after["kind"] == "dropping":
            found |= {int(step): micros for step, micros in after["open_steps"].items()}
            found |= dict.fromkeys(range(epoch["step"], STEPS), after["micro_batches"])
    return {step: micros for step, micros in found.items() if micros}


def dropped(
    out: Path, faults: Faults, **request: Any
) -> tuple[SimulatedRun, list[dict[str, Any]], dict[int, list[int]]]:
    """A run whose weights equal those of one process that leaves out the same micro-batches; checks the ledger."""
    found, events = run(out, faults, **{"strategy": "drop", **request})
    described = job(request.get("features", ()))
    without = left_out(events)
    assert found.state_sha256 == reference(described, dropped=without).state_sha256
    lost = described.micro_batch * sum(map(len, without.values()))
    assert found.summary["samples_lost"] == lost
    assert found.summary["samples"] + lost == found.summary["samples_expected"] == STEPS * BATCH
    return found, events, without


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_drop_leaves_out_the_samples_of_the_broken_pipeline_at_any_action(
    tmp_path: Path, schedule: str, nth: int
) -> None:
    found, _, without = dropped(tmp_path, Faults().kill(1, step=2, nth=nth), schedule=schedule)
    assert set(without) in ({2, 3, 4, 5}, {3, 4, 5})  # of a step that some layer has made already nothing is left out
    assert all(micros == [0, 1] for micros in without.values())
    assert [lost["source"] for lost in found.summary["recoveries"]] == ["drop"]


def test_drop_reports_that_training_changes(tmp_path: Path) -> None:
    found, events, _ = dropped(tmp_path, Faults().kill(1, step=2, nth=2))
    assert found.state_sha256 != reference_result(job()).state_sha256
    assert of(events, "dropping")[0]["why"].startswith("training changes")
    assert "which changes training" in of(events, "run_started")[0]["why"]


def test_under_drop_the_other_pipelines_are_not_slower(tmp_path: Path) -> None:
    """The batch shrinks: no worker runs more than its own micro-batches."""
    done: list[tuple[int, int, str]] = []

    def cost(node: int, step: int, action: str) -> float:
        done.append((node, step, action))
        return 0.01 if set(action) & set("FIWB") else 0.0

    dropped(tmp_path, Faults().kill(1, step=2, nth=2), cost=cost)
    forwards = [(node, action) for node, step, action in done if step == STEPS - 1 and "F" in action]
    assert sorted(forwards) == [(2, "0F2"), (2, "0F3"), (3, "1F2"), (3, "1F3")]


def test_under_drop_a_replacement_node_completes_its_pipeline(tmp_path: Path) -> None:
    _, events, without = dropped(tmp_path, Faults().kill(1, step=1, nth=2).join(2, step=2))
    assert min(without) == 1
    assert STEPS - 1 not in without
    assert of(events, "epoch")[-1]["members"] == [0, 4, 2, 3]


@pytest.mark.parametrize(
    "features", [("clip", "tied"), ("batch norm", "weighted loss"), ("dropout", "evaluation"), ("bf16", "clip")]
)
def test_the_divisor_the_norm_and_the_statistics_are_of_what_was_counted(
    tmp_path: Path, features: tuple[str, ...]
) -> None:
    _, _, without = dropped(tmp_path, Faults().kill(1, step=2, nth=2).join(2, step=4), features=features)
    assert without


def test_of_three_pipelines_two_may_be_hurt_one_after_the_other(tmp_path: Path) -> None:
    _, _, without = dropped(tmp_path, Faults().kill(1, step=2, nth=2).kill(2, step=4, nth=2), pipelines=3)
    assert [len(without[step]) for step in (3, 5)] == [2, 3]


@pytest.mark.parametrize("moment", ["inventory", "adopt"])
def test_where_no_pipeline_is_complete_peers_run_all_micro_batches(tmp_path: Path, moment: str) -> None:
    faults = Faults().kill(1, step=3, nth=4).kill(2, at=moment, nth=2 if moment == "adopt" else 1)
    found, _, _ = dropped(tmp_path, faults, schedule="zb")
    assert found.summary["recoveries"][-1]["source"] == "peers"


def test_a_sum_with_a_dropped_micro_batch_is_discarded() -> None:
    cells = (WorkKey(3, 0, 0), WorkKey(3, 0, 2), WorkKey(3, 1, 2), WorkKey(4, 0, 0))
    inventories = {7: WorkerInventory(accumulated_grads=cells)}
    assert find_discarded_sums(inventories, inventories, {3: (0, 1)}) == {(3, 0, 7)}
    assert find_discarded_sums(inventories, inventories, {}) == set()
