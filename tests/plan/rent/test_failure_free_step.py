"""One estimate of a failure-free step, for every schedule, and links that depend on where workers are."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from culm.plan import LayerCost, PlanCase, step_lower_bound
from culm.plan.model.shape_search import DEFAULT_BANDWIDTH
from culm.plan.rent.failure_free_step import ESTIMATED_SCHEDULES, failure_free_step_s, healthy_plan, resolve_schedule
from culm.plan.rent.link_costs import NodeLinks, stage_costs
from culm.plan.replan.planned_schedule import StepShape, plan_step
from culm.plan.replan.staggered_period import staggered_period
from culm.plan.reshape.run_schedule import ScheduledStep, make_run_plan, predicted_step_s
from culm.schedule import Costs, generate_plan
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.planned_workload import workload_toml
from culm.sim.shape_step_times import ShapeStepTimes
from culm.sim.step_times import StepTimes
from culm.sim.workload import Workload, workload_from_table
from culm.strategies.registry import get as get_strategy

THIRD = Costs(forward=1.0, input=1.0, weight=1.0)


@given(
    stages=st.integers(1, 5),
    micros=st.integers(1, 12),
    times=st.lists(st.floats(0.1, 1.0), min_size=5, max_size=5),
    room=st.integers(0, 3),
    split=st.floats(0.0, 0.3),
    stagger=st.booleans(),
)
def test_the_planned_step_is_that_of_a_run(
    stages: int, micros: int, times: list[float], room: int, split: float, stagger: bool
) -> None:
    """`culm plan` and the simulator predict what the runtime would choose, within the same limits of activations."""
    costs = Costs(forward=tuple(times[:stages]), input=0.3, weight=0.2, reduce=0.1, step=0.1, split=split)
    limits = tuple(stages - stage + room for stage in range(stages))
    shape = StepShape(
        pipelines=2, stages=stages, micro_batches=2 * micros, costs=costs, max_activations=limits, staggered=stagger
    )
    case = PlanCase(pipelines=2, stages=stages, micro_batches=2 * micros, costs=costs, stagger=stagger)
    assert failure_free_step_s(case, "planned", limits) == pytest.approx(plan_step(shape).step_s, rel=0.01)


def test_a_planned_step_is_never_longer_than_one_of_a_simpler_schedule_within_the_same_memory() -> None:
    case = PlanCase(pipelines=4, stages=12, micro_batches=4 * 32, costs=THIRD)
    planned, simple, split = (failure_free_step_s(case, name) for name in ("planned", "1f1b", "zb"))
    assert planned <= min(simple, split)
    plenty = failure_free_step_s(case, "planned", (24,) * 12)
    assert plenty == pytest.approx(32 * 3.0), "with room for twice as many activations there is no bubble"


def test_1f1b_takes_its_closed_form() -> None:
    case = PlanCase(pipelines=3, stages=4, micro_batches=18, costs=THIRD, stagger=False)
    assert failure_free_step_s(case, "1f1b") == 27


@given(
    stages=st.integers(1, 4),
    more=st.integers(1, 12),
    times=st.lists(st.floats(0.1, 1.0), min_size=4, max_size=4),
    schedule=st.sampled_from(["1f1b", "zb"]),
)
def test_long_steps_are_extrapolated_within_half_a_percent(
    stages: int, more: int, times: list[float], schedule: str
) -> None:
    costs = Costs(forward=tuple(times[:stages]), input=0.3, weight=0.2, reduce=0.1, step=0.1)
    case = PlanCase(pipelines=1, stages=stages, micro_batches=8 * stages + more, costs=costs)
    plan = generate_plan(schedule, pipelines=1, stages=stages, micro_batches=case.micro_batches)
    assert failure_free_step_s(case, schedule) == pytest.approx(staggered_period(plan, costs), rel=0.005)


def test_auto_is_the_fastest_schedule_and_none_beats_the_bound() -> None:
    case = PlanCase(pipelines=2, stages=4, micro_batches=16, costs=THIRD)
    seconds = {name: failure_free_step_s(case, name) for name in ESTIMATED_SCHEDULES}
    assert resolve_schedule(case, "auto") == "planned"
    assert seconds["planned"] == min(seconds.values())
    assert resolve_schedule(replace(case, stages=1), "auto") == "1f1b", "a gain of 2 % at least, as in a run"
    assert all(found >= step_lower_bound(case) for found in seconds.values())
    assert resolve_schedule(case, "zb") == "zb"


BLOCK = LayerCost(
    name="block", forward_s=1.0, input_s=1.0, weight_s=1.0, parameter_bytes=800, state_bytes=0, activation_bytes=0,
    output_bytes=100,
)  # fmt: skip
LINKS = NodeLinks(between_nodes=10.0, within_node=100.0, workers=4)


def test_a_boundary_within_every_node_is_faster_than_one_between_nodes() -> None:
    costs = stage_costs([(BLOCK,)] * 8, 2, LINKS)
    assert costs.send == (1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0)


def test_a_boundary_takes_as_long_as_in_its_slowest_pipeline() -> None:
    """Pipelines of three stages on nodes of four workers: node 0 has 0.0 to 0.2 and 1.0, node 1 has 1.1 ..."""
    assert stage_costs([(BLOCK,)] * 3, 2, LINKS).send == (10.0, 1.0)


def test_a_ring_between_nodes_shares_the_network_with_activations() -> None:
    """A stage sends 100 bytes forward and as many back in 3 s, each, over 1,000 bytes per second: a fifteenth."""
    busy = NodeLinks(between_nodes=1000.0)
    alone = 2 * 1 / 2 * 800 / 1000.0
    assert stage_costs([(BLOCK,)] * 3, 2, busy).reduce == pytest.approx((alone / (1 - 200 / 3 / 1000),) * 3)
    assert stage_costs([(BLOCK,)], 2, busy).reduce == (alone,), "nothing is sent with one stage"
    slow = NodeLinks(between_nodes=1.0)
    assert stage_costs([(BLOCK,)] * 3, 2, slow).reduce == pytest.approx((10 * 800.0,) * 3), "at most nine tenths"


def test_a_reduce_within_a_node_does_not_use_its_network() -> None:
    assert stage_costs([(BLOCK,)] * 2, 2, LINKS).reduce == (8.0, 8.0)


def test_rings_share_the_network_of_a_node() -> None:
    """Four stages on a node: four rings share 40 bytes per second. One stage: its ring has all of it."""
    assert stage_costs([(BLOCK,)] * 4, 2, LINKS).reduce == (80.0,) * 4, "no boundary is between nodes"
    assert stage_costs([(BLOCK,)], 8, LINKS).reduce == (2 * 7 / 8 * 800 / 40.0,)


def test_a_plan_the_simulator_and_a_run_send_gradients_early_in_the_same_step() -> None:
    """A 1F1B step with a measured profile is as long in `culm plan`, in a calm market and in the plan of a run."""
    layers = (structs.replace(BLOCK, halving_s=0.05),) * 8
    run = ScheduledStep(layers=layers, cuts=(2, 4, 6), pipelines=2, stages=4, micro_batches=16)
    split = make_run_plan("1f1b", run)
    assert split != generate_plan("1f1b", pipelines=2, stages=4, micro_batches=16)
    costs = stage_costs([layers[:2]] * 4, 2, NodeLinks(between_nodes=DEFAULT_BANDWIDTH))
    case = PlanCase(pipelines=2, stages=4, micro_batches=16, costs=costs, early_sends=True)
    assert healthy_plan(case, "1f1b") == split
    planned_s = failure_free_step_s(case, "1f1b")
    assert planned_s == pytest.approx(predicted_step_s(split, run))
    assert planned_s < failure_free_step_s(replace(case, early_sends=False), "1f1b")
    work = Workload(
        pipelines=2,
        stages=4,
        micro_batches=16,
        costs=costs,
        early_sends=True,
        schedule="1f1b",
        layers=8,
        least_stages=1,
    )
    steps = StepTimes(work, ClusterCosts())
    assert steps.healthy(2) == pytest.approx(planned_s)
    assert ShapeStepTimes(steps).actual_step_s((4, 4), frozenset(), get_strategy("reroute")) == pytest.approx(planned_s)
    read = workload_from_table(tomllib.loads(workload_toml(work)), "p.toml")
    assert read.costs.split == costs.split
    assert StepTimes(read, ClusterCosts()).healthy(2) == pytest.approx(planned_s)
