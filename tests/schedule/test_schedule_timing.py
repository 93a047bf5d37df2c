"""The clock of a plan: who waits for what, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from culm.errors import ScheduleError
from culm.schedule import UNIT, Action, Costs, Span, generate, timing
from culm.schedule.lower import producer


def spans(text: str, row: tuple[Span, ...]) -> tuple[float, float]:
    found = next(span for span in row if span.action == Action.parse(text))
    return found.start, found.end


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 6), (8, 32)])
def test_the_bubble_of_1f1b_is_the_textbook_fraction(stages: int, micro_batches: int) -> None:
    timeline = timing(generate("1f1b", pipelines=1, stages=stages, micro_batches=micro_batches))
    assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert timeline.busy == (3 * micro_batches,) * stages


def test_a_fused_backward_costs_both_halves() -> None:
    timeline = timing(
        generate("1f1b", pipelines=1, stages=1, micro_batches=1), Costs(forward=1, input=2.5, weight=0.25)
    )
    assert spans("0B0", timeline.spans[0]) == (1, 3.75)


def test_costs_may_differ_by_segment() -> None:
    plan = generate("gpipe", pipelines=1, stages=2, micro_batches=1)
    timeline = timing(plan, Costs(forward=(1.0, 5.0), input=(2.0, 3.0), weight=0.0))
    assert spans("1F0", timeline.spans[1]) == (1, 6)
    assert spans("0B0", timeline.spans[0]) == (9, 11)


def test_sending_delays_the_receiver_both_ways_and_keeps_nobody_busy() -> None:
    plan = generate("gpipe", pipelines=1, stages=3, micro_batches=1)
    timeline = timing(plan, Costs(send=(0.5, 2.0)))
    assert [spans(f"{s}F0", timeline.spans[s])[0] for s in range(3)] == [0, 1.5, 4.5]
    assert [spans(f"{s}B0", timeline.spans[s])[0] for s in range(3)] == [12, 9.5, 5.5]
    assert timeline.busy == (3, 3, 3)


def test_nothing_is_sent_between_segments_of_one_worker() -> None:
    plan = generate("interleaved", pipelines=1, stages=1, micro_batches=2, ranges=3)
    assert timing(plan, Costs(send=100.0)) == timing(plan)


def test_the_reduce_of_a_segment_starts_on_all_holders_when_the_last_one_is_there() -> None:
    plan = generate("1f1b", pipelines=2, stages=2, micro_batches=3)
    timeline = timing(plan, Costs(reduce=(4.0, 2.0), step=0.5))
    assert spans("0R", timeline.spans[0]) == spans("0R", timeline.spans[2]) == (9, 13)
    assert spans("1R", timeline.spans[1]) == spans("1R", timeline.spans[3]) == (7, 9)
    assert spans("0S", timeline.spans[2]) == (13, 13.5)
    assert timeline.makespan == 13.5


def test_spans_follow_the_plan_and_never_overlap() -> None:
    plan = generate("zb", pipelines=2, stages=3, micro_batches=9)
    timeline = timing(plan, Costs(forward=1.1, input=0.9, weight=0.7, reduce=2.0, step=0.1, send=0.3))
    for actions, row in zip(plan.workers, timeline.spans, strict=True):
        assert tuple(span.action for span in row) == actions
        ends = [0.0, *(span.end for span in row)]
        assert all(span.start >= before for span, before in zip(row, ends, strict=False))


def test_a_plan_that_costs_nothing_has_no_bubble() -> None:
    free = Costs(forward=0, input=0, weight=0)
    timeline = timing(generate("1f1b", pipelines=1, stages=2, micro_batches=2), free)
    assert (timeline.makespan, timeline.bubble) == (0, 0)


def test_every_action_of_a_large_plan_is_looked_at_a_constant_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Action] = []

    def counted(action: Action, segments: int, placement: Mapping[Action, int]) -> Action | None:
        calls.append(action)
        return producer(action, segments, placement)

    monkeypatch.setattr("culm.schedule.walk.producer", counted)
    plan = generate("zb", pipelines=4, stages=8, micro_batches=64)
    timing(plan)
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
def test_costs_that_do_not_fit_are_refused_by_name(costs: dict[str, Any], says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        timing(generate("1f1b", pipelines=1, stages=2, micro_batches=2), Costs(**costs))
    assert says in str(error.value)


def test_the_default_costs_are_the_slots_of_the_papers() -> None:
    assert (UNIT.forward, UNIT.input, UNIT.weight, UNIT.reduce, UNIT.step, UNIT.send) == (1, 1, 1, 0, 0, 0)
