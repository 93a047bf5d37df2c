"""Large cases: equal pipelines are planned once, and a failure changes the plan of a few of them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan import PlanCase, Slot, plan_greedy, step_lower_bound
from culm.plan.replan.greedy_planner import plan_step_time
from culm.plan.replan.symmetry import affected_pipelines, restrict_to_pipelines, single_pipeline_case
from culm.schedule import Costs, check_plan

GREEDY = import_module("culm.plan.replan.greedy_planner")
"""The module; the package shows the function of that name."""

WIDE_CASE = PlanCase(pipelines=12, stages=4, micro_batches=12 * 8, memory="1f1b")


@st.composite
def wide_cases(draw: st.DrawFn) -> PlanCase:
    """Many pipelines, few failures."""
    D, P = draw(st.integers(4, 9)), draw(st.integers(1, 4))
    slots = st.builds(Slot, st.integers(0, D - 1), st.integers(0, P - 1))
    price = st.sampled_from((0.0, 0.5, 1.0, 2.0))
    return PlanCase(
        pipelines=D,
        stages=P,
        micro_batches=draw(st.integers(D, 5 * D)),
        failed=draw(st.frozensets(slots, max_size=3)),
        costs=Costs(forward=draw(st.tuples(*[price] * P)), weight=draw(price), reduce=draw(price), send=draw(price)),
        split=draw(st.booleans()),
        stagger=draw(st.booleans()),
        memory=draw(st.sampled_from((None, "1f1b", 2))),
    )


@given(wide_cases())
def test_a_partly_replanned_plan_is_valid_and_takes_no_longer_than_stated(case: PlanCase) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GREEDY, "LARGE_CASE_ACTIONS", 0)
        result = plan_greedy(case)
    report = check_plan(result.plan)
    assert report.peak_activations == result.peak_activations
    assert all(
        peak <= case.max_activations(worker % case.stages) for worker, peak in enumerate(result.peak_activations)
    )
    spent = plan_step_time(case, result.plan)
    assert step_lower_bound(case) <= spent * (1 + 1e-9)
    assert spent <= result.step_time * (1 + 1e-9)
    assert case.stagger or result.step_time == pytest.approx(spent)


@given(wide_cases())
def test_without_a_failure_every_pipeline_runs_the_lists_of_one(case: PlanCase) -> None:
    healthy = replace(case, failed=frozenset())
    result = plan_greedy(healthy)
    check_plan(result.plan)
    assert result.step_time == pytest.approx(plan_step_time(healthy, result.plan))
    assert result.step_time == plan_greedy(single_pipeline_case(healthy)).step_time


@pytest.mark.parametrize("failed", [{Slot(3, 1)}, {Slot(3, 1), Slot(7, 2)}, {Slot(3, 1), Slot(7, 1), Slot(3, 3)}])
def test_unaffected_pipelines_keep_their_lists(failed: set[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GREEDY, "LARGE_CASE_ACTIONS", 0)
    monkeypatch.setattr("culm.plan.replan.symmetry._MAX_EXTRA_HELPERS", 0)
    case = replace(WIDE_CASE, failed=frozenset(failed))
    healthy = plan_greedy(WIDE_CASE)
    few = affected_pipelines(case, healthy.step_time)
    assert {slot.pipeline for slot in failed} < set(few)
    assert len(few) < WIDE_CASE.pipelines
    changed = {
        worker // WIDE_CASE.stages
        for worker, (new, old) in enumerate(zip(plan_greedy(case).plan.workers, healthy.plan.workers, strict=True))
        if new != old
    }
    assert changed <= set(few)


def test_just_enough_pipelines_help_to_keep_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culm.plan.replan.symmetry._MAX_EXTRA_HELPERS", 0)
    case = replace(WIDE_CASE, failed=frozenset({Slot(0, 1)}), memory=None)
    few = affected_pipelines(case, 0.0)
    assert step_lower_bound(restrict_to_pipelines(case, few)) <= step_lower_bound(case) * (1 + 1e-9)
    assert step_lower_bound(restrict_to_pipelines(case, few[:-1])) > step_lower_bound(case)
