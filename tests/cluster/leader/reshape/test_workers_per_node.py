"""Nodes with several workers are lost, warned and joined as a whole, and no bit of the result changes.

Two workers per node in the shapes 2 x 2 (a pipeline is a node) and 2 x 4 (a pipeline is two nodes). The tests of real
processes are in test_workers_per_node_real.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import cached_setup, reference_result
from tests.testing.small_job import job

from culm.cluster.node_faults import KillNode
from culm.cluster.run_setup import RunSetup
from culm.errors import UsageError
from culm.job import Job
from culm.schedule import Plan
from culm.testing import Faults, simulate
from culm.testing.chaos import random_scenario
from culm.testing.simulated_cluster import SimulatedRun
from culm.testing.survival_check import run_and_compare

K = 2
STEP = 1
STRATEGIES = ("reroute", "shadow", "shadow-lazy", "templates")
SHAPES = ((2, 2), (2, 4))


@functools.cache
def trained_job() -> Job:
    return job(steps=STEP + 4)


@functools.cache
def setup_of(pipelines: int, stages: int, strategy: str) -> RunSetup:
    shape: dict[str, Any] = {"pipelines": pipelines, "stages": stages, "workers_per_node": K}
    return cached_setup(trained_job(), strategy=strategy, **shape)


def survived(faults: Faults, setup: RunSetup, **options: Any) -> SimulatedRun:
    """A run with faults, all of which strike, that has the result of one process."""
    run = run_and_compare(trained_job(), setup, faults, 0, reference_result(trained_job()), **options)
    assert not run.faults_not_reached(faults)
    return run


def moments(setup: RunSetup, node: int) -> list[str]:
    """All actions of a node's workers in a step, and the leader's commit."""
    rows = Plan.from_text(setup.plan).workers[node * K : (node + 1) * K]
    actions = [str(action) for row in rows for action in row]
    return [*actions, *(f"{action}+" for action in actions if action.endswith("S")), *["commit"] * (node == 0)]


def members(run: SimulatedRun) -> list[str]:
    """The workers by slot, for each epoch."""
    return [line.partition("members ")[2] for line in str(run.history).splitlines() if "members " in line]


@pytest.mark.parametrize("shape", SHAPES, ids=["2x2", "2x4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_killed_at_an_action_of_any_of_its_workers_changes_no_bit(strategy: str, shape: tuple[int, int]) -> None:
    """Each strategy gets another part of the moments: together they have all of them in 2 x 2, and half in 2 x 4."""
    setup, count = setup_of(*shape, strategy), len(STRATEGIES) * shape[1] // 2
    for node in range(setup.nodes):
        for at in moments(setup, node)[STRATEGIES.index(strategy) :: count]:
            run = survived(Faults().kill(node, at=at, step=STEP), setup)
            assert run.summary["preemptions"] == 1
            assert [recovery["lost"] for recovery in run.summary["recoveries"]] == [[node]]


@pytest.mark.parametrize("moment", ["inventory", "adopt"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_second_node_may_be_lost_during_the_recovery_from_the_first(strategy: str, moment: str) -> None:
    """Nodes 0 and 1 are the first pipeline: node 2 still holds what node 0 held."""
    nth = 3 if moment == "adopt" else 1  # each worker of the node has adopted the first epoch
    faults = Faults().kill(0, at="1F1", step=STEP).kill(1, at=moment, nth=nth)
    assert survived(faults, setup_of(2, 4, strategy)).summary["preemptions"] == 2


def test_one_pipeline_on_two_nodes_survives_by_shadows_on_the_other_node() -> None:
    setup = setup_of(1, 4, "shadow")
    for node in (0, 1):
        for at in moments(setup, node)[node::4]:
            survived(Faults().kill(node, at=at, step=STEP), setup)


@pytest.mark.parametrize("strategy", ["checkpoint", "migrate"])
@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_after_the_loss_of_a_node_all_workers_restart_from_the_checkpoint(
    strategy: str, restart: str, tmp_path: Path
) -> None:
    for shape in SHAPES:
        request: dict[str, Any] = {"pipelines": shape[0], "stages": shape[1], "strategy": strategy}
        setup = cached_setup(
            trained_job(),
            workers_per_node=K,
            restart=restart,
            out=str(tmp_path / f"{shape[1]}"),
            checkpoint_every=1,
            replace_within=0.0,
            **request,
        )
        run = survived(Faults().kill(1, step=STEP + 2, nth=3), setup)
        assert run.summary["recoveries"][0]["source"] == "checkpoint"


def test_migrate_uses_the_notice_of_a_node_for_all_of_its_workers(tmp_path: Path) -> None:
    setup = cached_setup(
        trained_job(),
        pipelines=2,
        stages=2,
        workers_per_node=K,
        strategy="migrate",
        out=str(tmp_path),
        checkpoint_every=1,
    )
    run = survived(Faults().warn(1, step=STEP, seconds=10.0), setup)
    assert [recovery["source"] for recovery in run.summary["recoveries"]] == ["notice"]


@pytest.mark.parametrize("at", ["2F3", "2B2", "3R", "2S"])
def test_drop_leaves_out_what_it_leaves_out_for_the_same_workers_on_nodes_of_their_own(at: str) -> None:
    shape: dict[str, Any] = {"pipelines": 2, "stages": 4, "strategy": "drop"}
    together = simulate(trained_job(), faults=Faults().kill(3, at=at, step=STEP), workers_per_node=K, **shape)
    alone = simulate(trained_job(), faults=Faults().kill((6, 7), at=at, step=STEP), **shape)
    assert together.summary["samples_lost"] == alone.summary["samples_lost"] > 0
    assert together.state_sha256 == alone.state_sha256


@pytest.mark.parametrize("seconds", [0.02, 10.0], ids=["short", "long"])
@pytest.mark.parametrize("shape", SHAPES, ids=["2x2", "2x4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_with_notice_hands_over_the_state_of_all_its_workers(
    strategy: str, shape: tuple[int, int], seconds: float
) -> None:
    run = survived(Faults().warn(1, step=STEP, nth=3, seconds=seconds), setup_of(*shape, strategy))
    assert run.summary["preemptions"] == 1


def test_a_node_stays_as_a_whole_while_one_of_its_workers_has_the_only_copy_of_a_stage() -> None:
    """Nodes 2 and 3 are the second pipeline. When both are gone, nodes 0 and 1 hold every stage alone: node 1 leaves
    when node 0 has copies of both of its stages."""
    faults = Faults().kill((2, 3), step=0, nth=1).warn(1, step=STEP, nth=2, seconds=30.0)
    run = survived(faults, setup_of(2, 4, "reroute"))
    assert run.summary["preemptions"] == 3
    assert [recovery["source"] for recovery in run.summary["recoveries"]][-1] == "notice"
    assert members(run)[-2:] == ["0 1 2 3 - - - -"] * 2  # first its stages are copied, then it leaves
    assert "node 1   killed" not in str(run.history)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_workers_of_a_joining_node_fill_the_slots_of_a_lost_one(strategy: str) -> None:
    faults = Faults().kill(1, step=0, nth=2).join(0, step=1)
    run = survived(faults, setup_of(2, 2, strategy))
    assert sorted(members(run)[-1].split()) == ["0", "1", "4", "5"]


def test_the_leaders_node_may_be_lost_or_leave() -> None:
    for faults in (Faults().kill(0, at="commit", step=STEP), Faults().warn(0, step=STEP, seconds=10.0)):
        run = survived(faults, setup_of(2, 2, "reroute"))
        assert "node 1 leads" in str(run.history)


def test_a_node_that_is_silent_is_lost_with_all_of_its_workers() -> None:
    for faults in (Faults().pause(1, step=STEP, seconds=9.0), Faults().partition(1, step=STEP, seconds=9.0)):
        assert survived(faults, setup_of(2, 2, "reroute")).summary["preemptions"] == 1


def test_a_requested_layout_counts_workers() -> None:
    run = survived(Faults().request_layout("1x4", node=0, step=0), setup_of(2, 2, "shadow"))
    assert "made 1x4" in str(run.history)


def test_holders_are_on_different_nodes_and_in_different_zones() -> None:
    """By number, nodes 0 and 2 would both hold stages 0 and 1, and both are in zone a."""
    run = survived(Faults().kill((0, 2), step=STEP, nth=3), setup_of(2, 4, "reroute"), zones=("a", "b"))
    assert members(run)[0] != "0 1 2 3 4 5 6 7"
    assert run.summary["preemptions"] == 2


@pytest.mark.parametrize(
    ("request_fields", "sentence"),
    [
        ({"stages": 2, "strategy": "shadow"}, "--strategy shadow needs a holder on another node, and there is 1 node"),
        ({"pipelines": 2, "strategy": "reroute"}, "--strategy reroute needs a holder on another node"),
        ({"pipelines": 2, "strategy": "templates"}, "--strategy templates needs a holder on another node"),
        ({"pipelines": 2, "strategy": "drop"}, "--strategy drop needs a holder on another node"),
        ({"pipelines": 1, "stages": 3}, "--workers-per-node 2 does not divide the 3 workers of 1 x 3"),
        (
            {"pipelines": 2, "stages": 2, "nodes": 4},
            "--nodes 4 x --workers-per-node 2 is not --pipelines 2 x --stages 2",
        ),
        ({"stages": 2, "workers_per_node": 0}, "--workers-per-node is 0: use a whole number of at least 1"),
        ({"pipelines": 2, "stages": 2, "kills": ("node=2 step=1",)}, "there is no node 2: the last one is 1"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(request_fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        cached_setup(trained_job(), **{"workers_per_node": K, **request_fields})
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_auto_chooses_no_strategy_that_needs_another_node_if_there_is_one() -> None:
    setup = cached_setup(trained_job(), pipelines=2, stages=1, workers_per_node=2, strategy="auto")
    assert setup.strategy not in STRATEGIES


def test_a_kill_names_actions_of_all_workers_of_the_node() -> None:
    setup = cached_setup(trained_job(), pipelines=2, stages=2, workers_per_node=K, kills=("node=1 step=1 at=1B2",))
    assert KillNode.parse(setup.kills[0]).at == "1B2"
    with pytest.raises(UsageError, match="node 1 never runs 1B0"):
        cached_setup(trained_job(), pipelines=2, stages=2, workers_per_node=K, kills=("node=1 step=1 at=1B0",))


def test_chaos_keeps_the_scenarios_of_one_worker_per_node_and_refuses_too_many() -> None:
    assert str(random_scenario(3)) == str(random_scenario(3, workers_per_node=1))
    assert random_scenario(3, workers_per_node=2).workers_per_node == 2
    with pytest.raises(UsageError, match="--workers-per-node 7 is not tested by chaos: use 1 or 2 or 3"):
        random_scenario(3, workers_per_node=7)
