"""Step times of situations: planned where that is possible, in closed form where it is not."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan import Slot
from culm.plan.rent.failure_free_step import MAX_PLANNED_FORWARDS
from culm.schedule import Costs, generate_plan, time_plan
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.engine import SimulatedNode
from culm.sim.slot_table import SlotTable
from culm.sim.step_times import StepTimes
from culm.sim.workload import Workload

UNIT = Workload(pipelines=3, stages=4, micro_batches=18, costs=Costs(), split=True, stagger=True)


def steps(workload: Workload = UNIT) -> StepTimes:
    return StepTimes(workload, ClusterCosts())


def test_the_known_answers_of_rerouting_come_out() -> None:
    fused = replace(UNIT, split=False, stagger=False)
    lost = (0, 0, 1, 0)
    assert steps().one_f_one_b(3) == 27
    assert steps(fused).healthy(3) == pytest.approx(27)
    assert steps(replace(UNIT, stagger=False)).rerouted(3, lost) == pytest.approx(29, abs=1)
    assert steps().rerouted(3, lost) == pytest.approx(27)


def test_1f1b_in_closed_form_is_the_schedule_timed() -> None:
    work = replace(UNIT, costs=Costs(forward=1.0, input=1.0, weight=1.0, send=0.25, step=0.5))
    plan = generate_plan("1f1b", pipelines=1, stages=4, micro_batches=6)
    assert steps(work).one_f_one_b(3) == pytest.approx(time_plan(plan, work.costs).makespan, rel=0.05)


@given(st.integers(4, 40), st.integers(1, 60), st.integers(1, 6))
def test_uneven_pipelines_use_all_nodes_and_share_the_batch_best(nodes: int, micro: int, least: int) -> None:
    work = replace(UNIT, pipelines=1, micro_batches=micro, least_stages=least)
    seconds, depths = steps(work).unequal_depths(nodes, as_published=True)
    if not depths:
        assert nodes < least
        assert math.isinf(seconds)
        return
    assert sum(depths) == nodes
    assert max(depths) - min(depths) <= 1
    assert min(depths) >= least
    each = [work.micro_batch_s / depth for depth in depths]

    def room(limit: float) -> int:
        ramps = [depth * t for depth, t in zip(depths, each, strict=True)]
        return sum(1 + int((limit - r) / t + 1e-9) for r, t in zip(ramps, each, strict=True) if limit >= r - 1e-9)

    assert room(seconds) >= micro
    assert room(seconds * 0.999999 - 1e-6) < micro


def test_more_nodes_are_never_slower() -> None:
    found = [steps().unequal_depths(nodes)[0] for nodes in range(4, 30)]
    assert all(b <= a * 1.0001 for a, b in pairwise(found))


def test_a_shadow_costs_something_and_redundancy_as_published_more() -> None:
    assert steps().healthy(3) < steps().shadowed(3) < steps().redundant(3)


def test_the_cost_of_redundancy_is_set_to_that_measured_for_bert() -> None:
    bert = Workload(pipelines=4, stages=12, micro_batches=128, costs=Costs())
    assert steps(bert).redundant(4) / steps(bert).one_f_one_b(4) - 1 == pytest.approx(0.1977, abs=0.02)


def test_a_worker_with_two_stages_slows_its_pipeline_as_its_plan_says() -> None:
    assert steps().takeover_slowdown(3, []) == 1.0
    once, twice = (steps().takeover_slowdown(3, [Slot(d, 1) for d in range(many)]) for many in (1, 2))
    assert 1.3 < once < 2
    assert twice == once, "pipelines are hurt side by side"
    assert steps().takeover_slowdown(3, [Slot(0, 1), Slot(0, 3)]) >= once
    assert math.isinf(steps().takeover_slowdown(3, [Slot(0, 1), Slot(0, 2)])), (
        "neighbours leave a stage without a holder"
    )


def test_a_schedule_is_run_as_it_is_and_plans_are_run_with_what_actions_take() -> None:
    fixed = replace(UNIT, schedule="1f1b")
    assert steps(fixed).healthy(3) == steps(UNIT).one_f_one_b(3)
    slow = replace(fixed, planning_costs=UNIT.costs, costs=Costs(forward=2.0, input=2.0, weight=2.0))
    assert steps(slow).rerouted(3, (0, 1, 0, 0)) == pytest.approx(2 * steps(fixed).rerouted(3, (0, 1, 0, 0)))


def test_a_shallower_pipeline_has_more_to_sum_and_to_update() -> None:
    """One stage instead of four: four times the parameters. A ring of 12 sends 11/12 twice, not 2/3."""
    costs = replace(UNIT.costs, reduce=2 / 3, step=0.5)
    times = steps(replace(UNIT, costs=costs, schedule="1f1b", least_stages=1, layers=12))
    for pipelines, stages, end in ((3, 4, 2 / 3 + 0.5), (12, 1, 4 * (11 / 12 + 0.5)), (6, 2, 2 * (5 / 6 + 0.5))):
        alone = times.at_depth(pipelines, stages, as_published=True)
        without = steps(replace(UNIT, schedule="1f1b", least_stages=1, layers=12)).at_depth(
            pipelines, stages, as_published=True
        )
        assert alone - without == pytest.approx(end), (pipelines, stages)


def test_large_cases_are_taken_at_their_bound() -> None:
    large = replace(UNIT, pipelines=60, stages=16, micro_batches=60 * 32, planned_activations=(32,) * 16)
    assert large.stages * large.micro_batches > MAX_PLANNED_FORWARDS
    found = steps(large)
    assert not found.uses_plans
    assert found.rerouted(60, (0,) * 15 + (30,)) == pytest.approx(2 * found.healthy(60), rel=0.05)
    assert found.best_spread(60, 18) == (1,) * 14 + (2, 2)


def test_losing_every_holder_has_no_spread() -> None:
    assert steps().best_spread(3, 9) is None
    assert steps().best_spread(3, 8) == (2, 2, 2, 2)


@given(st.lists(st.integers(0, 11), unique=True, max_size=7), st.integers(0, 4))
def test_every_node_has_a_slot_or_stands_by(gone: list[int], spare: int) -> None:
    slots = SlotTable(4, 3)
    everyone = [SimulatedNode(f"n{n}", f"z{n % 2}") for n in range(12 + spare)]
    slots.add(everyone)
    slots.rebuild_pipelines()
    assert len(slots.standby) == spare
    slots.remove([node for n, node in enumerate(everyone) if n in gone])
    assert slots.members == 12 + spare - len(gone)
    assert len(slots.holes) + len(slots.nodes) == 12
    assert {node.name for node in slots.nodes.values()} == set(slots.slot_of)
