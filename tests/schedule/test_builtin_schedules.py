"""Every schedule of every shape is valid and as long as the papers say."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import ScheduleError
from culm.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Plan,
    check_plan,
    derive_transfers,
    forward_only,
    generate_plan,
    gpipe,
    interleaved,
    one_f_one_b,
    time_plan,
    zero_bubble,
)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    pipelines = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 6))
    micro_batches = pipelines + draw(st.integers(0, 3 * stages * pipelines))
    return {"pipelines": pipelines, "stages": stages, "micro_batches": micro_batches}


@given(st.sampled_from(sorted(SCHEDULES)), shapes(), st.integers(1, 4))
def test_every_generated_plan_is_valid(name: str, shape: dict[str, int], ranges: int) -> None:
    plan = generate_plan(name, **shape, ranges=ranges)
    per_micro = 3 if name == "zb" else 2
    report = check_plan(plan)
    held = shape["pipelines"] * plan.segments
    assert report.action_count == per_micro * plan.segments * shape["micro_batches"] + 2 * held
    assert plan.segments == shape["stages"] * (ranges if name == "interleaved" else 1)


@given(st.sampled_from(sorted(SCHEDULES)), shapes(), st.integers(1, 4))
def test_every_generated_plan_round_trips_through_text_and_csv(name: str, shape: dict[str, int], ranges: int) -> None:
    plan = generate_plan(name, **shape, ranges=ranges)
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_csv(plan.to_csv(), name=name) == plan


@given(st.sampled_from(sorted(SCHEDULES)), shapes(), st.integers(1, 4))
def test_no_plan_is_shorter_than_the_work_of_a_worker_or_the_path_of_a_micro_batch(
    name: str, shape: dict[str, int], ranges: int
) -> None:
    plan = generate_plan(name, **shape, ranges=ranges)
    costs = Costs(forward=2.0, input=3.0, weight=1.5, reduce=0.5, step=0.25, send=0.125)
    timeline = time_plan(plan, costs)
    held = plan.segments // plan.stages
    work = held * (6.5 * len(plan.micros_of(0)) + 0.75)
    way = plan.segments * 5.0 + 1.5 + (2 * (plan.segments - 1) * 0.125 if plan.stages > 1 else 0.0)
    assert timeline.makespan >= max(work, way) - 1e-9
    assert timeline.busy_time[0] == pytest.approx(work)
    assert 0 <= timeline.bubble_fraction < 1


@given(shapes(), st.integers(1, 4))
def test_a_forward_only_plan_has_all_forwards_and_nothing_else(shape: dict[str, int], ranges: int) -> None:
    plan = forward_only(**shape, ranges=ranges)
    assert check_plan(plan, forward_only=True).action_count == plan.segments * shape["micro_batches"]
    assert check_plan(plan, max_activations=1, forward_only=True).max_peak_activations == 1
    assert {action.kind for row in plan.workers for action in row} == {Kind.F}
    assert Plan.from_text(plan.to_text()) == plan
    assert derive_transfers(plan)


@given(shapes())
def test_zero_bubble_keeps_no_more_alive_than_1f1b_and_is_never_slower(shape: dict[str, int]) -> None:
    split, fused = zero_bubble(**shape), one_f_one_b(**shape)
    assert check_plan(split).max_peak_activations <= check_plan(fused).max_peak_activations
    assert time_plan(split).makespan <= time_plan(fused).makespan


@given(shapes())
def test_1f1b_keeps_one_activation_per_stage_from_its_own_to_the_last(shape: dict[str, int]) -> None:
    plan = one_f_one_b(**shape)
    expected = [
        min(len(plan.micros_of(worker)), plan.stages - worker % plan.stages) for worker in range(len(plan.workers))
    ]
    assert list(check_plan(plan).peak_activations) == expected


@given(shapes())
def test_gpipe_and_1f1b_take_three_slots_for_each_micro_batch_and_each_further_stage(shape: dict[str, int]) -> None:
    longest = -(-shape["micro_batches"] // shape["pipelines"])
    slots = 3 * (longest + shape["stages"] - 1)
    assert time_plan(gpipe(**shape)).makespan == slots
    assert time_plan(one_f_one_b(**shape)).makespan == slots


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 5, 12])
def test_zero_bubble_adds_one_slot_instead_of_three_per_further_stage(stages: int, more: int) -> None:
    micro_batches = stages + more
    plan = zero_bubble(pipelines=1, stages=stages, micro_batches=micro_batches)
    assert time_plan(plan).makespan == 3 * micro_batches + (stages - 1)


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("ranges", [1, 2, 3])
@pytest.mark.parametrize("more", [0, 1, 5, 6, 13])
def test_interleaving_divides_the_bubble_by_the_ranges_for_at_least_as_many_micro_batches_as_stages(
    stages: int, ranges: int, more: int
) -> None:
    plan = interleaved(pipelines=1, stages=stages, micro_batches=stages + more, ranges=ranges)
    # A segment is a stage cut into ranges parts: with unit times per segment the work grows by that factor.
    assert time_plan(plan).makespan == 3 * ranges * (stages + more) + 3 * (stages - 1)


def test_interleaving_needs_more_memory_if_the_stages_do_not_divide_the_micro_batches() -> None:
    even = interleaved(pipelines=1, stages=4, micro_batches=8)
    uneven = interleaved(pipelines=1, stages=4, micro_batches=6)
    assert check_plan(even).peak_activations == (11, 9, 7, 5)
    assert check_plan(uneven).peak_activations == (12, 11, 9, 7)


def test_known_makespan_of_re_routing_without_a_fault() -> None:
    assert time_plan(one_f_one_b(pipelines=3, stages=4, micro_batches=18)).makespan == 27


def test_the_fullest_pipeline_determines_the_makespan() -> None:
    plan = one_f_one_b(pipelines=2, stages=2, micro_batches=5)
    timeline = time_plan(plan)
    assert [row[-3].end for row in timeline.spans] == [12, 10, 9, 7]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("1F1B", "there is no schedule '1F1B': did you mean '1f1b'?"),
        ("gpip", "did you mean 'gpipe'?"),
        ("interleave", "did you mean 'interleaved'?"),
        ("chimera", "there is no schedule 'chimera': use one of gpipe, 1f1b, zb, interleaved"),
    ],
)
def test_an_unknown_schedule_gets_a_suggestion(name: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        generate_plan(name, pipelines=1, stages=2, micro_batches=4)
    assert says in str(error.value)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((0, 2, 4), "pipelines is 0"),
        ((1, 0, 4), "stages is 0"),
        ((3, 2, 2), "micro_batches is 2, fewer than the 3 pipelines: use at least 3 micro-batches, or fewer pipelines"),
    ],
)
def test_a_shape_without_work_for_every_pipeline_is_refused(name: str, shape: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        generate_plan(name, pipelines=shape[0], stages=shape[1], micro_batches=shape[2])
    assert says in str(error.value)


def test_interleaving_needs_at_least_one_range() -> None:
    with pytest.raises(ScheduleError, match="ranges is 0"):
        generate_plan("interleaved", pipelines=1, stages=2, micro_batches=4, ranges=0)


def test_schedules_import_no_torch_numpy_or_sockets() -> None:
    code = "import sys, culm.schedule; print(sorted({'torch', 'numpy', 'socket'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
