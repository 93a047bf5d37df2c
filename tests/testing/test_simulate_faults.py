"""Faults on a simulated cluster: they are injected at their moment, reproducibly, and appear in the history."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import cached_setup, reference_result
from tests.testing.small_job import job

from culm.errors import NodeLost, RunError, UsageError
from culm.schedule import generate_plan
from culm.schedule.action import Kind
from culm.testing import Deadlock, Faults, SimulatedRun, reference, simulate
from culm.testing.simulated_cluster import run_prepared

JOB = job()


def run_with_faults(faults: Faults, *, seed: int = 0, **request: Any) -> SimulatedRun:
    setup = cached_setup(JOB, **{"pipelines": 2, "stages": 2, **request})
    return run_prepared(JOB, setup, faults=faults, seed=seed, cost=lambda *_: 0.01, latency=0.001)


@functools.cache
def failure_free_run(schedule: str = "1f1b") -> SimulatedRun:
    """A run without faults."""
    return run_with_faults(Faults(), schedule=schedule)


HARMLESS = {
    "a short pause": Faults().pause(1, at="1B0", step=1, seconds=1.5),
    "the leader pauses": Faults().pause(0, at="0F1", step=1, seconds=1.5),
    "all pause at once": Faults().pause((0, 1, 2, 3), after_s=0.1, seconds=1.5),
    "one pause after the other": Faults().pause(2, at="0F2", seconds=1.5).pause(2, at="0B2", seconds=1.5),
    "late": Faults().delay_message(0, 1, seconds=3.0, nth=5).delay_message(3, 2, seconds=1.0),
    "reordered": Faults().reorder(seconds=0.5),
    "slow links": Faults().slow_link(0, 1, latency=0.1).slow_link(2, seconds_per_byte=1e-3),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("name", HARMLESS)
def test_faults_that_only_delay_change_nothing_but_time(name: str, schedule: str) -> None:
    """Under split backward, B means W: each fault is injected under both schedules."""
    calm, found = failure_free_run(schedule), run_with_faults(HARMLESS[name], schedule=schedule)
    assert found.state_sha256 == calm.state_sha256 == reference_result(JOB).state_sha256
    assert found.losses == calm.losses
    assert {injected.fault for injected in found.injected_faults} == set(HARMLESS[name].all)
    assert found.virtual_s > calm.virtual_s


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
@pytest.mark.parametrize("node", [0, 1, 3])
def test_broken_connections_between_live_nodes_are_restored_and_no_node_is_lost(node: int, strategy: str) -> None:
    """Partitioned for less than the lease: afterwards every connection across the partition is broken."""
    found = run_with_faults(Faults().partition(node, step=1, nth=2, seconds=1.0), strategy=strategy)
    assert found.state_sha256 == reference_result(JOB).state_sha256
    assert found.summary["preemptions"] == 0


def test_reordering_comes_from_the_seed_alone() -> None:
    times = [run_with_faults(Faults().reorder(seconds=0.5), seed=seed).virtual_s for seed in (0, 0, 1)]
    assert times[0] == times[1] != times[2]


FATAL = {
    "killed": Faults().kill(1, at="1B0", step=1),
    "killed with its machine": Faults().kill(1, at="1F1", step=1, silence=True),
    "killed after a while": Faults().kill(1, after_s=0.1),
    "killed at its third action of a step": Faults().kill(1, step=1, nth=3),
    "paused for too long": Faults().pause(1, at="1B0", step=1, seconds=5),
    "cut off for too long": Faults().partition(1, at="1B0", step=1, seconds=5),
}


@pytest.mark.parametrize("name", FATAL)
def test_without_a_strategy_every_kind_of_loss_ends_the_run_with_the_node_number(name: str) -> None:
    with pytest.raises(NodeLost, match=r"node 1 was lost in step \d and strategy none survives no loss") as caught:
        run_with_faults(FATAL[name], strategy="none")
    (note,) = caught.value.__notes__
    assert note.startswith(f"{FATAL[name]}, seed 0:\n")
    assert f"the moment of {FATAL[name].all[0]}" in note


@pytest.mark.parametrize(
    "faults",
    [
        Faults().kill(0, at="0F0", step=1),
        Faults().pause(0, at="0F0", step=1, seconds=5),
        Faults().partition(0, at="0F0", step=1, seconds=5),
    ],
)
def test_without_a_strategy_a_lost_leader_ends_the_run_with_one_sentence_too(faults: Faults) -> None:
    with pytest.raises(NodeLost, match="node 0, the leader, was lost"):
        run_with_faults(faults, strategy="none")


def test_a_group_is_lost_at_one_moment() -> None:
    with pytest.raises(RunError) as caught:
        run_with_faults(Faults().kill((2, 3), at="1F2", step=1), strategy="none")
    struck = [line.split() for line in caught.value.__notes__[0].splitlines() if line.endswith("killed")]
    assert [line[2] for line in struck] == ["2", "3"]
    assert struck[0][0] == struck[1][0]


def test_the_output_of_the_action_at_which_a_node_was_killed_is_not_sent() -> None:
    """Node 0 dies at its first forward: the other stage never does anything."""
    with pytest.raises(NodeLost) as caught:
        run_with_faults(Faults().kill(0, at="0F0", step=0), pipelines=1, strategy="none")
    assert "node 0   was last at 0F0 of step 0" in caught.value.__notes__[0]
    assert "node 1   was last at 1" not in caught.value.__notes__[0]


def test_a_run_with_faults_is_reproducible() -> None:
    faults = Faults().reorder(seconds=0.01, seed=3).pause(2, at="0B3", seconds=0.7).kill(1, after_s=0.5)
    notes = []
    for _ in range(2):
        with pytest.raises(NodeLost) as caught:
            run_with_faults(faults, seed=5, strategy="none")
        notes += caught.value.__notes__
    assert notes[0] == notes[1]


def test_a_lost_frame_that_is_not_resent_is_a_deadlock_and_not_a_hang() -> None:
    with pytest.raises(Deadlock) as caught:
        run_with_faults(Faults().drop_message(0, 1, kind="frame"), strategy="none")
    assert "the moment of drop_message(source=0, target=1, kind='frame')" in caught.value.__notes__[0]


@pytest.mark.parametrize("node", range(4))
def test_the_history_contains_the_last_action_of_every_node(node: int) -> None:
    history = str(failure_free_run().history)
    assert f"node {node} has joined" in history
    assert f"node {node}   was last at " in history
    assert "epoch 1: members 0 1 2 3" in history
    assert "step 2 is committed" in history


def test_a_slow_disk_delays_the_node_that_builds_and_writes(tmp_path: Path) -> None:
    """Layers may come from a file: building is one access, like each of the three checkpoints."""
    times = []
    for name, faults in (("quick", Faults()), ("slow", Faults().slow_disk(3, seconds=10))):
        found = run_with_faults(faults, out=str(tmp_path / name), checkpoint_every=1)
        assert found.summary["checkpoints"] == [1, 2, 3]
        times.append(found.virtual_s)
    assert times[1] - times[0] == pytest.approx(10 + 30, abs=0.5)


@pytest.mark.parametrize(
    "faults",
    [
        Faults().kill(4, step=0),
        Faults().kill((0, 4), step=0),
        Faults().slow_disk(4, seconds=1),
        Faults().drop_message(0, 4),
        Faults().slow_link(4, latency=1),
    ],
)
def test_an_unknown_node_is_refused(faults: Faults) -> None:
    with pytest.raises(UsageError, match="there is no node 4: the last one is 3"):
        run_with_faults(faults)


def test_a_kill_can_be_placed_at_every_action_of_the_plan() -> None:
    """Each action of each node occurs once in each step: the third occurrence is in step 2."""
    faults, actions = Faults(), []
    for segment, kind, micro in itertools.product((0, 1), "FB", range(4)):
        node, action = 2 * (micro // 2) + segment, f"{segment}{kind}{micro}"
        faults = faults.pause(node, at=action, step=2, seconds=0.1).pause(node, at=action, nth=3, seconds=0.1)
        actions += [action, action]
    found = run_with_faults(faults, strategy="none")
    assert sorted(injected.at for injected in found.injected_faults) == sorted(actions)
    assert found.faults_not_reached(faults) == []


@pytest.mark.parametrize("schedule", ["zb", "interleaved"])
def test_every_action_that_a_plan_writes_is_a_moment_of_its_node(schedule: str) -> None:
    plan = generate_plan(schedule, pipelines=2, stages=2, micro_batches=4, ranges=2 if schedule == "interleaved" else 1)
    faults = Faults()
    for node, row in enumerate(plan.workers):
        for action in (*map(str, row), *(f"{action}+" for action in row if action.kind is Kind.S)):
            faults = faults.pause(node, at=action, step=1, seconds=0.1)
    assert not run_with_faults(faults, schedule=schedule, strategy="none").faults_not_reached(faults)


def test_a_notice_to_a_node_that_does_not_exist_yet_only_reaches_the_others() -> None:
    """Node 4 joins two steps after the notice to nodes 3 and 4."""
    faults = Faults().warn((3, 4), step=0, nth=2, seconds=30.0).join(0, step=2)
    described = job(steps=5)
    run = simulate(described, faults=faults, pipelines=2, stages=2, strategy="reroute")
    assert run.faults_not_reached(faults) == []
    assert run.state_sha256 == reference(described).state_sha256
    assert [each["lost"] for each in run.summary["recoveries"]] == [[3]]
