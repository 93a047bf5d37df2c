"""Plans with two segments per worker: valid, within the memory of every worker, and half the bubbles of one segment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from culm.plan.model.model_profile import LayerCost
from culm.plan.rent.failure_free_step import failure_free_step_s
from culm.plan.replan.plan_case import PlanCase
from culm.plan.replan.planned_schedule import StepShape, bubble_free_step_s, plan_step, predict_step_s
from culm.plan.replan.two_range_schedule import TwoRanges, TwoRangeStep, two_range_plans, two_range_step_s
from culm.plan.reshape.run_schedule import ScheduledStep, choose_schedule
from culm.schedule import Costs, Kind, check_plan


@st.composite
def steps(draw: st.DrawFn) -> TwoRangeStep:
    """A step with any costs, and any room for the activations of at least one micro-batch."""
    P = draw(st.integers(2, 4))
    seconds, bytes_ = st.floats(0.1, 2.0), st.integers(1, 4)

    def each(values: st.SearchStrategy[float], count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    activation = tuple(draw(st.lists(bytes_, min_size=2 * P, max_size=2 * P)))
    return TwoRangeStep(
        costs=Costs(
            forward=each(seconds, 2 * P),
            input=each(seconds, 2 * P),
            weight=each(seconds, 2 * P),
            reduce=draw(st.floats(0, 1)),
            step=draw(st.floats(0, 1)),
            send=each(st.floats(0, 0.5), 2 * P - 1),
            split=draw(st.sampled_from((0.0, 0.1, 1.0))),
        ),
        activation=activation,
        room=tuple(activation[s] + activation[P + s] + draw(st.integers(0, 8 * P)) for s in range(P)),
        micro_batches=draw(st.integers(1, 7)),
        staggered=draw(st.booleans()),
    )


@given(steps())
def test_plans_are_valid_within_the_memory_and_as_fast_as_predicted(step: TwoRangeStep) -> None:
    plans = list(two_range_plans(step))
    assert plans, "there is room for a micro-batch"
    for plan in plans:
        check_plan(plan)
        assert step.fits(plan)
    seconds = min(predict_step_s(plan, step.costs, staggered=step.staggered) for plan in plans)
    if step.staggered:
        assert seconds == pytest.approx(two_range_step_s(step))
    else:  # the sums of the segment that ends first overlap with the rest
        assert seconds <= two_range_step_s(step) * (1 + 1e-9)


def even(stages: int, room: int) -> TwoRanges:
    """Equal segments that take half as long as a stage, and room for so many halves."""
    half = Costs(forward=0.5, input=0.5, weight=0.5)
    return TwoRanges(costs=half, activation=(1,) * (2 * stages), room=(room,) * stages)


@pytest.mark.parametrize("micro_batches", [8, 16, 32])
@pytest.mark.parametrize("stages", [4, 8])
def test_with_equal_costs_and_half_more_memory_than_1f1b_there_is_no_bubble(stages: int, micro_batches: int) -> None:
    """If the optimizer is staggered. Otherwise the last worker begins after P - 1 halves: the step of a V schedule."""
    ranges = even(stages, 3 * stages)
    staggered, together = (
        two_range_step_s(TwoRangeStep.of(ranges, micro_batches, staggered=each)) for each in (True, False)
    )
    if micro_batches >= 2 * stages:
        assert staggered == pytest.approx(3 * micro_batches)
    assert together == pytest.approx(3 * micro_batches + (stages - 1) / 2)


def test_the_plan_of_a_step_has_two_segments_per_worker_where_that_is_shorter() -> None:
    one = StepShape(pipelines=2, stages=4, micro_batches=32, costs=Costs(), staggered=False)
    two = replace(one, two_ranges=even(4, 12))
    assert plan_step(one).step_s == 51
    found = plan_step(two)
    assert found.step_s == pytest.approx(49.5)
    assert (found.plan.segments, found.plan.pipelines, found.plan.micro_batches) == (8, 2, 32)
    check_plan(found.plan)
    assert predict_step_s(found.plan, two.costs_of(found.plan), staggered=False) == pytest.approx(found.step_s)
    assert bubble_free_step_s(two, ranges=2) == 48
    narrow = replace(one, two_ranges=even(4, 1))
    assert plan_step(narrow).plan.segments == 4, "no worker has room for two segments"
    slow = replace(even(4, 12), costs=Costs(forward=0.5, input=0.5, weight=0.5, send=0.4))
    assert plan_step(replace(one, two_ranges=slow)).plan.segments == 4, "sends take longer than they gain"
    whole = replace(two, splits_backward=False)
    assert not any(action.kind is Kind.I for row in plan_step(whole).plan.workers for action in row)


@pytest.mark.parametrize("micro_batches", [6, 16, 80])
def test_an_estimate_for_a_fleet_is_the_step_of_a_run(micro_batches: int) -> None:
    """Above 16 micro-batches per pipeline, steps are extrapolated."""
    case = PlanCase(pipelines=2, stages=2, micro_batches=2 * micro_batches, costs=Costs(), two_ranges=even(2, 6))
    shape = StepShape(pipelines=2, stages=2, micro_batches=2 * micro_batches, costs=Costs(), two_ranges=even(2, 6))
    assert failure_free_step_s(case, "planned") == pytest.approx(plan_step(shape).step_s, rel=0.01)


def layers(count: int, activation_bytes: int = 100) -> tuple[LayerCost, ...]:
    return tuple(
        LayerCost(
            name=str(index), forward_s=1.0, input_s=1.0, weight_s=1.0, step_s=0.0, parameter_bytes=10, state_bytes=20,
            activation_bytes=activation_bytes, output_bytes=0,
        )
        for index in range(count)
    )  # fmt: skip


def test_a_run_is_cut_into_two_segments_per_worker_if_that_is_allowed_and_there_are_layers() -> None:
    step = ScheduledStep(
        layers=layers(8), cuts=(2, 4, 6), pipelines=1, stages=4, micro_batches=8, may_use_two_ranges=True
    )
    found = choose_schedule("planned", step)
    assert (found.plan.segments, found.cuts) == (8, (1, 2, 3, 4, 5, 6, 7))
    assert "with 2 segments per worker" in found.why
    assert found.prediction["of_bubble_free"] > 0.94, "within the memory of 1F1B; one segment reaches 0.89"
    forced = choose_schedule("planned", replace(step, may_use_two_ranges=False))
    assert (forced.plan.segments, forced.cuts) == (4, (2, 4, 6))
    few = replace(step, layers=layers(7), cuts=(2, 4, 6))
    assert choose_schedule("planned", few).plan.segments == 4
    unknown = replace(step, layers=layers(8, activation_bytes=0), max_activations=6)
    assert choose_schedule("planned", unknown).prediction["of_bubble_free"] == pytest.approx(1.0)


def test_the_first_segment_runs_its_whole_backward_as_w() -> None:
    """Nobody needs the gradient of its input."""
    step = ScheduledStep(
        layers=layers(8), cuts=(2, 4, 6), pipelines=1, stages=4, micro_batches=8, may_use_two_ranges=True
    )
    ranges = step.planner_shape.two_ranges
    assert ranges is not None
    assert (ranges.costs.input, ranges.costs.weight) == ((0.0, *(1.0,) * 7), (2.0, *(1.0,) * 7))


def test_memory_counts_the_activations_of_both_segments() -> None:
    uneven = tuple(replace_activation(layer, 100 if index < 4 else 400) for index, layer in enumerate(layers(8)))
    step = ScheduledStep(layers=uneven, cuts=(2, 4, 6), pipelines=1, stages=4, micro_batches=8, may_use_two_ranges=True)
    ranges = step.planner_shape.two_ranges
    assert ranges is not None
    assert ranges.activation == (100,) * 4 + (400,) * 4
    assert ranges.room == (1600,) * 4, "1F1B keeps two micro-batches of 800 in its third stage"


def replace_activation(layer: LayerCost, activation_bytes: int) -> LayerCost:
    return structs.replace(layer, activation_bytes=activation_bytes)
