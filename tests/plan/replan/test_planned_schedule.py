"""The schedule `planned`: valid, within memory, and never predicted to be slower than the built-in schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.replan.planned_schedule import PLANNED, StepShape, bubble_free_step_s, plan_step, predict_step_s
from culm.schedule import Costs, Kind, Plan, check_plan, generate_plan, one_f_one_b, zero_bubble


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    """A step with any costs and any memory: it may be less than 1F1B needs."""
    stages, pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    seconds = st.floats(0.1, 4.0)

    def each(values: st.SearchStrategy[float] = seconds, count: int = stages) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    costs = Costs(
        forward=each(),
        input=each(),
        weight=each(),
        reduce=draw(st.floats(0, 1)),
        step=draw(st.floats(0, 1)),
        send=each(st.floats(0, 0.5), stages - 1),
        split=draw(st.sampled_from((0.0, 0.1, 1.0))),
    )
    return StepShape(
        pipelines=pipelines,
        stages=stages,
        micro_batches=draw(st.integers(pipelines, pipelines * 7)),
        costs=costs,
        max_activations=tuple(draw(st.integers(1, 2 * stages)) for _ in range(stages)),
        staggered=draw(st.booleans()),
    )


@given(shapes())
def test_a_planned_schedule_is_valid_and_keeps_the_memory_of_every_stage(shape: StepShape) -> None:
    planned = plan_step(shape)
    plan = planned.plan
    assert (plan.name, plan.pipelines, plan.micro_batches) == (PLANNED, shape.pipelines, shape.micro_batches)
    peaks = check_plan(plan).peak_activations
    assert shape.max_activations is not None
    assert all(peak <= shape.max_activations[slot % shape.stages] for slot, peak in enumerate(peaks))
    assert Plan.from_text(plan.to_text()) == plan


@given(shapes())
def test_it_is_as_fast_as_predicted_and_never_slower_than_1f1b_and_zb(shape: StepShape) -> None:
    planned = plan_step(shape)
    counts = {"pipelines": 1, "stages": shape.stages, "micro_batches": shape.one_pipeline.micro_batches}
    for plan in (one_f_one_b(**counts), zero_bubble(**counts)):
        if shape.one_pipeline.fits(plan):
            assert planned.step_s <= predict_step_s(plan, shape.costs, staggered=shape.staggered) * (1 + 1e-9)
    assert planned.step_s == pytest.approx(predict_step_s(planned.plan, shape.costs, staggered=shape.staggered))
    assert planned.step_s >= bubble_free_step_s(shape) * (1 - 1e-9)


@given(shapes())
def test_weight_gradients_keep_the_order_of_the_micro_batches(shape: StepShape) -> None:
    """Without `exact` the bits of a sum depend on it."""
    for row in plan_step(shape).plan.workers:
        micros = [action.micro for action in row if action.kind in (Kind.W, Kind.B)]
        assert micros == sorted(micros, key=lambda micro: -1 if micro is None else micro)


EVEN = StepShape(pipelines=1, stages=4, micro_batches=8, costs=Costs())


def test_with_the_memory_of_1f1b_it_meets_zb_and_with_twice_that_it_has_no_bubble() -> None:
    assert plan_step(EVEN).step_s == 27
    assert plan_step(replace(EVEN, max_activations=(8, 8, 8, 8))).step_s == bubble_free_step_s(EVEN) == 24
    together = replace(EVEN, max_activations=(8, 8, 8, 8), staggered=False)
    assert plan_step(together).step_s == 27, "stages that step together wait for each other"


def test_backwards_that_are_expensive_to_split_stay_whole() -> None:
    plan = plan_step(replace(EVEN, micro_batches=64, costs=Costs(split=3.0))).plan
    assert not any(action.kind is Kind.I for row in plan.workers for action in row)


def test_the_first_stage_splits_nothing_as_no_stage_waits_for_its_gradients() -> None:
    plan = plan_step(replace(EVEN, costs=Costs(split=0.1))).plan
    assert {action.kind for action in plan.workers[0]} == {Kind.F, Kind.B, Kind.R, Kind.S}
    assert any(action.kind is Kind.I for action in plan.workers[3])


@pytest.mark.parametrize("last", [0, 1, 3, 8, 20])
def test_zb_may_split_only_the_last_backwards(last: int) -> None:
    plan = zero_bubble(pipelines=2, stages=3, micro_batches=16, split_last=last)
    assert max(check_plan(plan).peak_activations) <= 3
    for row in plan.workers:
        assert sum(action.kind is Kind.I for action in row) == min(last, 8)
    if last >= 8:
        assert plan == generate_plan("zb", pipelines=2, stages=3, micro_batches=16)
