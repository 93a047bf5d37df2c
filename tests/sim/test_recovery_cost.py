"""What a loss adds to its step is what the functions that recover real runs make of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.resilience import simulated_pause
from culm.plan import Slot
from culm.schedule import UNIT_COSTS, Plan, generate_plan, time_plan
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.recovery_cost import MAX_PLANNED_FORWARDS, RecoveryCost, step_delay, surviving_state
from culm.sim.step_times import StepTimes
from culm.sim.workload import Workload
from culm.strategies import get


def redo_of(micro_batches: int, pipelines: int = 2, stages: int = 4) -> tuple[RecoveryCost, Workload]:
    found = Workload(pipelines=pipelines, stages=stages, micro_batches=micro_batches, costs=UNIT_COSTS, schedule="1f1b")
    return RecoveryCost(StepTimes(found, ClusterCosts())), found


@pytest.mark.parametrize("strategy", ["reroute", "shadow-lazy"])
def test_it_agrees_with_a_simulated_cluster_that_loses_the_node(strategy: str) -> None:
    setup, job = simulated_pause.prepare_setup(strategy, "1f1b", 2, 4)
    plan = Plan.from_text(setup.plan)
    step = time_plan(plan).makespan
    for at in ("1B5", "1F6"):
        (real,) = simulated_pause.measure_pauses(setup, job, [(4, at)])
        end = next(span.end for span in time_plan(plan).spans[4] if str(span.action) == at)
        found = step_delay(plan, UNIT_COSTS, {4}, (end + 1e-6) / step, get(strategy)) / step
        assert found == pytest.approx(real.planned, abs=2 / step)


@settings(max_examples=25)
@given(st.data())
def test_survivors_hold_nothing_that_only_lost_workers_had(data: st.DataObject) -> None:
    plan = generate_plan(data.draw(st.sampled_from(("1f1b", "zb"))), pipelines=2, stages=3, micro_batches=8)
    lost, timeline = data.draw(st.integers(0, 5)), time_plan(plan)
    at = data.draw(st.floats(0, 1)) * timeline.makespan
    found = surviving_state(timeline, at, {lost}, get("reroute"))
    assert set(found) == set(range(6)) - {lost}
    for slot, standing in found.items():
        mine = {(action.segment, action.micro) for action in plan.workers[slot]}
        for cells in (standing.tapes_after_forward, standing.tapes_after_input_grad, standing.accumulated_grads):
            assert all((cell.segment, cell.micro) in mine for cell in cells)


def test_nothing_is_late_before_anything_was_done_but_the_work_that_is_left() -> None:
    plan = generate_plan("1f1b", pipelines=2, stages=4, micro_batches=12)
    early, middle = (step_delay(plan, UNIT_COSTS, {5}, phase, get("reroute")) for phase in (0.0, 0.5))
    assert 0 < early < 18, "the peer has the bubbles for half of it"
    assert 0 < middle < 18


def test_a_stage_without_a_holder_is_never_recovered() -> None:
    plan = generate_plan("1f1b", pipelines=2, stages=4, micro_batches=12)
    assert math.isinf(step_delay(plan, UNIT_COSTS, {1, 5}, 0.5, get("reroute")))
    assert step_delay(plan, UNIT_COSTS, {1, 5}, 0.5, get("shadow"), eager_forwards=True) < math.inf


def test_losses_of_one_stage_add_up_and_those_of_others_do_not() -> None:
    redo, _ = redo_of(12, pipelines=3)
    one = redo.recovery_s(get("reroute"), 3, [Slot(0, 1)], 0.5)
    assert redo.recovery_s(get("reroute"), 3, [Slot(0, 1), Slot(1, 1)], 0.5) == 2 * one > 0
    assert redo.recovery_s(get("reroute"), 3, [Slot(0, 1), Slot(1, 2)], 0.5) < 2 * one


def test_estimates_of_large_cases_are_close_to_searched_values() -> None:
    small, about = redo_of(96)
    assert about.stages * about.micro_batches <= MAX_PLANNED_FORWARDS
    for strategy in ("reroute", "shadow"):
        looked = small.recovery_s(get(strategy), 2, [Slot(1, 2)], 0.75)
        assert small._estimate_delay(get(strategy), 2, 0.75) == pytest.approx(looked, rel=0.6)


def test_many_pipelines_are_like_eight_with_less_to_do() -> None:
    redo, _ = redo_of(128, pipelines=16, stages=2)
    eight, sixteen = (redo.recovery_s(get("reroute"), many, [Slot(1, 1)], 0.5) for many in (8, 16))
    assert sixteen == pytest.approx(eight * 56 / 240)
