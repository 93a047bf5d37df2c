"""Every schedule of every shape is good, and has the length that the papers give it."""

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
    check,
    forward_only,
    generate,
    gpipe,
    interleaved,
    lower,
    one_f_one_b,
    timing,
    zero_bubble,
)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    pipelines = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 6))
    micro_batches = pipelines + draw(st.integers(0, 3 * stages * pipelines))
    return {"pipelines": pipelines, "stages": stages, "micro_batches": micro_batches}


@given(st.sampled_from(sorted(SCHEDULES)), shapes(), st.integers(1, 4))
def test_every_generated_plan_keeps_the_rules(name: str, shape: dict[str, int], ranges: int) -> None:
    plan = generate(name, **shape, ranges=ranges)
    per_micro = 3 if name == "zb" else 2
    report = check(plan)
    held = shape["pipelines"] * plan.segments
    assert report.actions == per_micro * plan.segments * shape["micro_batches"] + 2 * held
    assert plan.segments == shape["stages"] * (ranges if name == "interleaved" else 1)


@given(st.sampled_from(sorted(SCHEDULES)), shapes(), st.integers(1, 4))
def test_every_generated_plan_survives_its_files(name: str, shape: dict[str, int], ranges: int) -> None:
    plan = generate(name, **shape, ranges=ranges)
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_csv(plan.to_csv(), name=name) == plan


@given(st.sampled_from(sorted(SCHEDULES)), shapes(), st.integers(1, 4))
def test_no_plan_beats_the_work_of_a_worker_or_the_way_of_a_micro_batch(
    name: str, shape: dict[str, int], ranges: int
) -> None:
    plan = generate(name, **shape, ranges=ranges)
    costs = Costs(forward=2.0, input=3.0, weight=1.5, reduce=0.5, step=0.25, send=0.125)
    timeline = timing(plan, costs)
    held = plan.segments // plan.stages
    work = held * (6.5 * len(plan.micros_of(0)) + 0.75)
    way = plan.segments * 5.0 + 1.5 + (2 * (plan.segments - 1) * 0.125 if plan.stages > 1 else 0.0)
    assert timeline.makespan >= max(work, way) - 1e-9
    assert timeline.busy[0] == pytest.approx(work)
    assert 0 <= timeline.bubble < 1


@given(shapes(), st.integers(1, 4))
def test_a_forward_only_plan_has_all_forwards_and_nothing_else(shape: dict[str, int], ranges: int) -> None:
    plan = forward_only(**shape, ranges=ranges)
    assert check(plan, forward_only=True).actions == plan.segments * shape["micro_batches"]
    assert check(plan, memory=1, forward_only=True).peak == 1
    assert {action.kind for row in plan.workers for action in row} == {Kind.F}
    assert Plan.from_text(plan.to_text()) == plan
    assert lower(plan)


@given(shapes())
def test_zero_bubble_keeps_no_more_alive_than_1f1b_and_is_never_slower(shape: dict[str, int]) -> None:
    split, fused = zero_bubble(**shape), one_f_one_b(**shape)
    assert check(split).peak <= check(fused).peak
    assert timing(split).makespan <= timing(fused).makespan


@given(shapes())
def test_1f1b_keeps_alive_one_activation_for_each_stage_from_its_own_to_the_last(shape: dict[str, int]) -> None:
    plan = one_f_one_b(**shape)
    expected = [
        min(len(plan.micros_of(worker)), plan.stages - worker % plan.stages) for worker in range(len(plan.workers))
    ]
    assert list(check(plan).peak_activations) == expected


@given(shapes())
def test_gpipe_and_1f1b_take_three_slots_for_each_micro_batch_and_each_further_stage(shape: dict[str, int]) -> None:
    longest = -(-shape["micro_batches"] // shape["pipelines"])
    slots = 3 * (longest + shape["stages"] - 1)
    assert timing(gpipe(**shape)).makespan == slots
    assert timing(one_f_one_b(**shape)).makespan == slots


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 5, 12])
def test_zero_bubble_pays_one_slot_instead_of_three_for_each_further_stage(stages: int, more: int) -> None:
    micro_batches = stages + more
    plan = zero_bubble(pipelines=1, stages=stages, micro_batches=micro_batches)
    assert timing(plan).makespan == 3 * micro_batches + (stages - 1)


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("ranges", [1, 2, 3])
@pytest.mark.parametrize("more", [0, 1, 5, 6, 13])
def test_interleaving_cuts_the_bubble_by_the_ranges_for_any_count_from_the_stages_up(
    stages: int, ranges: int, more: int
) -> None:
    plan = interleaved(pipelines=1, stages=stages, micro_batches=stages + more, ranges=ranges)
    # A segment is a stage cut into ranges parts: with unit times per segment the work grows by that factor.
    assert timing(plan).makespan == 3 * ranges * (stages + more) + 3 * (stages - 1)


def test_interleaving_pays_with_memory_for_counts_that_the_stages_do_not_divide() -> None:
    even = interleaved(pipelines=1, stages=4, micro_batches=8)
    uneven = interleaved(pipelines=1, stages=4, micro_batches=6)
    assert check(even).peak_activations == (11, 9, 7, 5)
    assert check(uneven).peak_activations == (12, 11, 9, 7)


def test_the_known_answer_of_re_routing_without_a_fault() -> None:
    assert timing(one_f_one_b(pipelines=3, stages=4, micro_batches=18)).makespan == 27


def test_a_pipeline_with_one_micro_batch_more_than_the_others_sets_the_pace() -> None:
    plan = one_f_one_b(pipelines=2, stages=2, micro_batches=5)
    timeline = timing(plan)
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
        generate(name, pipelines=1, stages=2, micro_batches=4)
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
def test_a_shape_without_work_for_everyone_is_refused(name: str, shape: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        generate(name, pipelines=shape[0], stages=shape[1], micro_batches=shape[2])
    assert says in str(error.value)


def test_interleaving_needs_at_least_one_range() -> None:
    with pytest.raises(ScheduleError, match="ranges is 0"):
        generate("interleaved", pipelines=1, stages=2, micro_batches=4, ranges=0)


def test_schedules_are_made_without_torch_numpy_or_sockets() -> None:
    code = "import sys, culm.schedule; print(sorted({'torch', 'numpy', 'socket'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
