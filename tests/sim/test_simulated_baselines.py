"""Simulated baselines do what the leader of a run would do: which pipelines run, rest, restart or are formed anew."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from culm.market import MarketTrace, NodeEvent
from culm.plan.reshape.pipeline_shape import best_depths
from culm.plan.reshape.reconfigure_policy import PipelineLayout
from culm.plan.reshape.whole_pipelines import choose_whole_pipelines, completes_another_pipeline
from culm.schedule import Costs
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, simulate_trace
from culm.sim.engine import StrategyRun
from culm.sim.simulated_strategy import SimulationContext
from culm.sim.workload import Workload

WORK = Workload(
    name="small",
    pipelines=3,
    stages=4,
    micro_batches=18,
    costs=Costs(forward=0.1, input=0.1, weight=0.1),
    state_bytes=4e9,
    least_stages=2,
    layers=12,
)
CHARGES = ClusterCosts(warm_up_s=0.0, restart_s=0.0)
HOUR = 3600.0


def simulated(
    name: str, *changes: tuple[float, str, int], work: Workload = WORK, nodes: int = 12, costs: ClusterCosts = CHARGES
) -> StrategyRun:
    """A run of two hours on so many nodes from the start; then (second, add or remove, number of the node)."""
    there = [NodeEvent(0.0, "add", f"n{n:02}") for n in range(nodes)]
    later = [NodeEvent(t, "add" if kind == "add" else "remove", f"n{n:02}") for t, kind, n in changes]
    return simulate_trace(
        SimulationContext.create(work, costs), name, MarketTrace((*there, *later), 2 * HOUR), NodePrice(1.0, 3.0)
    )


def rates(run: StrategyRun) -> list[float]:
    """Samples per second, from the start to the end, whenever they changed."""
    found = [point.rate for point in run.points if point.rate > 0]
    return [rate for i, rate in enumerate(found) if i == 0 or not math.isclose(rate, found[i - 1])]


TIMES = SimulationContext.create(WORK, CHARGES).step_times
WHOLE, TWO_THIRDS = WORK.samples / TIMES.healthy(3), WORK.samples / TIMES.rerouted(3, (1, 1, 1, 1))
LOST, BACK = (0.5 * HOUR, "remove", 5), (HOUR, "add", 20)


def test_checkpoint_restarts_on_whole_pipelines_and_again_when_another_is_complete() -> None:
    run = simulated("checkpoint", LOST, BACK)
    assert run.rollbacks == 2, "a newcomer that completes a pipeline joins by a restart, too"
    assert rates(run) == pytest.approx([WHOLE, TWO_THIRDS, WHOLE])


def test_checkpoint_leaves_newcomers_on_standby_until_they_complete_a_pipeline() -> None:
    run = simulated("checkpoint", LOST, (0.6 * HOUR, "remove", 6), BACK)
    assert run.rollbacks == 1, "the second loss is of a node on standby, and the newcomer completes no pipeline"
    assert rates(run) == pytest.approx([WHOLE, TWO_THIRDS])


def test_checkpoint_goes_on_with_fewer_nodes_than_stages() -> None:
    run = simulated("checkpoint", *((HOUR, "remove", n) for n in range(10)))
    left = rates(run)[-1]
    assert 0 < left <= WORK.samples / (WORK.micro_batches * WORK.micro_batch_s / 2), "two nodes run every stage"


def test_migrate_hands_over_within_the_notice_and_peers_run_the_work_until_a_node_joins() -> None:
    run = simulated("migrate", LOST, BACK)
    assert not run.rollbacks
    assert rates(run) == pytest.approx([WHOLE, WORK.samples / TIMES.rerouted(3, (0, 1, 0, 0)), WHOLE])


def test_migrate_returns_to_the_checkpoint_if_the_notice_is_too_short() -> None:
    run = simulated("migrate", LOST, costs=replace(CHARGES, notice_s=0.1))
    assert run.rollbacks == 1
    assert rates(run) == pytest.approx([WHOLE, TWO_THIRDS])


def test_drop_lets_the_damaged_pipeline_rest_until_its_slot_is_filled() -> None:
    run = simulated("drop", LOST, BACK)
    assert not run.rollbacks
    assert rates(run) == pytest.approx([WHOLE, WHOLE * 2 / 3, WHOLE])


def test_drop_runs_everything_where_no_pipeline_is_complete() -> None:
    run = simulated("drop", (HOUR, "remove", 0), (HOUR, "remove", 5), (HOUR, "remove", 10))
    assert rates(run) == pytest.approx([WHOLE, WORK.samples / TIMES.layout_step_s(PipelineLayout((4, 4, 4), 3))])


@pytest.mark.parametrize("schedule", ["planned", "1f1b"])
def test_templates_form_the_pipelines_that_a_leader_would_form(schedule: str) -> None:
    """Where shapes are planned as in a run, by the function of the leader; else by the estimate of its step times."""
    work = replace(WORK, schedule=schedule)
    run = simulated("templates", LOST, work=work)
    times = SimulationContext.create(work, CHARGES).shape_step_times
    formed = best_depths(times.planning_model, 11) if times.plans_shapes else times.step_times.unequal_depths(11)[1]
    assert run.decision_counts["re-instantiate"] == 1
    assert len(formed) >= 2, "another loss must leave a holder of every layer"
    assert rates(run)[-1] == pytest.approx(work.samples / times.predicted_step_s(formed))


def test_templates_take_newcomers_in_when_the_members_have_settled() -> None:
    run = simulated("templates", LOST, BACK)
    assert rates(run)[-1] == pytest.approx(WHOLE)


@pytest.mark.parametrize(
    ("filled", "waiting", "slots", "completes"),
    [
        ({0, 1, 2, 3}, 0, [0, 1, 2, 3], False),
        ({0, 1, 2}, 0, [0, 1], False),
        ({0, 2, 3}, 1, [0, 1, 2, 3], False),
        ({2, 3}, 1, [2, 3], False),
        ({2, 3}, 2, [0, 1, 2, 3], True),
        ({1}, 0, [0, 1], False),
    ],
)
def test_whole_pipelines_are_chosen_by_the_fewest_empty_slots(
    filled: set[int], waiting: int, slots: list[int], completes: bool
) -> None:
    assert choose_whole_pipelines(2, 2, filled, waiting) == slots
    assert completes_another_pipeline(2, 2, filled, waiting) is completes
