"""Timing of a plan: when actions start, and what they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from culm.errors import ScheduleError
from culm.schedule import UNIT_COSTS, Action, ActionSpan, Costs, generate_plan, time_plan
from culm.schedule.send_recv import producing_action


def span_of(text: str, row: tuple[ActionSpan, ...]) -> tuple[float, float]:
    result = next(span for span in row if span.action == Action.parse(text))
    return result.start, result.end


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 6), (8, 32)])
def test_the_bubble_of_1f1b_is_the_textbook_fraction(stages: int, micro_batches: int) -> None:
    timeline = time_plan(generate_plan("1f1b", pipelines=1, stages=stages, micro_batches=micro_batches))
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert timeline.busy_time == (3 * micro_batches,) * stages


def test_a_fused_backward_costs_both_halves() -> None:
    timeline = time_plan(
        generate_plan("1f1b", pipelines=1, stages=1, micro_batches=1), Costs(forward=1, input=2.5, weight=0.25)
    )
    assert span_of("0B0", timeline.spans[0]) == (1, 3.75)


def test_costs_may_differ_by_segment() -> None:
    plan = generate_plan("gpipe", pipelines=1, stages=2, micro_batches=1)
    timeline = time_plan(plan, Costs(forward=(1.0, 5.0), input=(2.0, 3.0), weight=0.0))
    assert span_of("1F0", timeline.spans[1]) == (1, 6)
    assert span_of("0B0", timeline.spans[0]) == (9, 11)


def test_sending_delays_the_receiver_in_both_directions_and_occupies_no_worker() -> None:
    plan = generate_plan("gpipe", pipelines=1, stages=3, micro_batches=1)
    timeline = time_plan(plan, Costs(send=(0.5, 2.0)))
    assert [span_of(f"{s}F0", timeline.spans[s])[0] for s in range(3)] == [0, 1.5, 4.5]
    assert [span_of(f"{s}B0", timeline.spans[s])[0] for s in range(3)] == [12, 9.5, 5.5]
    assert timeline.busy_time == (3, 3, 3)


def test_nothing_is_sent_between_segments_of_one_worker() -> None:
    plan = generate_plan("interleaved", pipelines=1, stages=1, micro_batches=2, ranges=3)
    assert time_plan(plan, Costs(send=100.0)) == time_plan(plan)


def test_reduce_starts_on_all_holders_when_the_last_one_reaches_it() -> None:
    plan = generate_plan("1f1b", pipelines=2, stages=2, micro_batches=3)
    timeline = time_plan(plan, Costs(reduce=(4.0, 2.0), step=0.5))
    assert span_of("0R", timeline.spans[0]) == span_of("0R", timeline.spans[2]) == (9, 13)
    assert span_of("1R", timeline.spans[1]) == span_of("1R", timeline.spans[3]) == (7, 9)
    assert span_of("0S", timeline.spans[2]) == (13, 13.5)
    assert timeline.makespan == 13.5


def test_spans_follow_the_plan_and_never_overlap() -> None:
    plan = generate_plan("zb", pipelines=2, stages=3, micro_batches=9)
    timeline = time_plan(plan, Costs(forward=1.1, input=0.9, weight=0.7, reduce=2.0, step=0.1, send=0.3))
    for actions, row in zip(plan.workers, timeline.spans, strict=True):
        assert tuple(span.action for span in row) == actions
        ends = [0.0, *(span.end for span in row)]
        assert all(span.start >= before for span, before in zip(row, ends, strict=False))


def test_a_plan_that_costs_nothing_has_no_bubble() -> None:
    free = Costs(forward=0, input=0, weight=0)
    timeline = time_plan(generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2), free)
    assert (timeline.makespan, timeline.bubble_fraction) == (0, 0)


def test_the_dry_run_examines_every_action_a_constant_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Action] = []

    def counted(action: Action, segments: int, placement: Mapping[Action, int]) -> Action | None:
        calls.append(action)
        return producing_action(action, segments, placement)

    monkeypatch.setattr("culm.schedule.dry_run.producing_action", counted)
    plan = generate_plan("zb", pipelines=4, stages=8, micro_batches=64)
    time_plan(plan)
    assert len(calls) <= 2 * sum(map(len, plan.workers))


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ({"forward": (1.0, 2.0, 3.0)}, "Costs.forward has 3 numbers: use 2 for this plan, or one for all"),
        ({"send": (1.0, 1.0)}, "Costs.send has 2 numbers: use 1 for this plan"),
        ({"weight": -1.0}, "Costs.weight is -1.0: use a number of at least 0"),
        ({"input": float("nan")}, "Costs.input is nan"),
        ({"reduce": (0.0, float("inf"))}, "Costs.reduce is inf"),
        ({"step": "1"}, "Costs.step is '1'"),
    ],
)
def test_invalid_costs_are_refused_by_field_name(costs: dict[str, Any], says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        time_plan(generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2), Costs(**costs))
    assert says in str(error.value)


def test_the_default_costs_are_the_slots_of_the_papers() -> None:
    assert (
        UNIT_COSTS.forward,
        UNIT_COSTS.input,
        UNIT_COSTS.weight,
        UNIT_COSTS.reduce,
        UNIT_COSTS.step,
        UNIT_COSTS.send,
    ) == (1, 1, 1, 0, 0, 0)
