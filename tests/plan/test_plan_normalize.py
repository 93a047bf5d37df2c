"""Failure normalization: where the holes hurt least, reached with the fewest moves, and plans that are made once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan import Case, Plans, Slot, bound, greedy, normalize, placed, spread
from culm.plan.normalize import spread_of
from culm.schedule import Costs, check

PAPER = Case(pipelines=3, stages=4, micro_batches=18)
HEAVY_END = Costs(forward=(1.0, 1.0, 1.0, 4.0))


@st.composite
def hurt(draw: st.DrawFn) -> Case:
    D, P = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    lost = [draw(st.sets(st.integers(0, D - 1), max_size=D - 1)) for _ in range(P)]
    price = st.sampled_from((0.5, 1.0, 2.0))
    return Case(
        pipelines=D,
        stages=P,
        micro_batches=draw(st.integers(D, 3 * D + 1)),
        failed=frozenset(Slot(d, s) for s, many in enumerate(lost) for d in many),
        costs=Costs(forward=draw(st.tuples(*[price] * P)), input=draw(price), send=draw(st.sampled_from((0.0, 0.5)))),
        split=draw(st.booleans()),
        stagger=draw(st.booleans()),
        memory=draw(st.sampled_from((None, "1f1b", 2))),
    )


def every_spread(case: Case) -> Iterator[tuple[int, ...]]:
    total = len(case.failed)
    return (
        lost for lost in product(range(min(total, case.pipelines - 1) + 1), repeat=case.stages) if sum(lost) == total
    )


@given(hurt())
def test_no_other_spread_has_a_lower_bound(case: Case) -> None:
    found = normalize(case)
    assert found.bound == pytest.approx(min(bound(placed(case, lost)) for lost in every_spread(case)))
    assert found.bound == pytest.approx(bound(placed(case, found.spread)))


@given(hurt())
def test_no_spread_that_is_as_good_takes_fewer_moves(case: Case) -> None:
    found = normalize(case)
    lost = spread_of(case.failed, case.stages)
    good = [other for other in every_spread(case) if bound(placed(case, other)) <= found.bound * (1 + 1e-9)]
    assert len(found.moves) == min(sum(max(0, a - b) for a, b in zip(other, lost, strict=True)) for other in good)


@given(hurt())
def test_moves_lead_from_live_slots_to_failed_ones_and_to_the_spread(case: Case) -> None:
    found = normalize(case)
    assert {move.target for move in found.moves} <= case.failed
    assert not {move.source for move in found.moves} & case.failed
    assert len({*(m.source for m in found.moves), *(m.target for m in found.moves)}) == 2 * len(found.moves)
    assert spread_of(found.failed, case.stages) == found.spread
    assert len(found.failed) == len(case.failed)


def test_two_failures_in_one_stage_become_one_in_each_of_two() -> None:
    found = normalize(replace(PAPER, failed=frozenset({Slot(1, 2), Slot(2, 2)})))
    assert sorted(found.spread) == [0, 0, 1, 1]
    assert [move.target for move in found.moves] in ([Slot(1, 2)], [Slot(2, 2)])
    assert greedy(replace(PAPER, failed=found.failed)).slots == 27


def test_the_slowest_stage_is_spared() -> None:
    assert spread(replace(PAPER, costs=HEAVY_END), 3)[3] == 0


def test_failures_of_nowhere_in_particular_are_spread_evenly() -> None:
    assert spread(PAPER, 4) == (1, 1, 1, 1)
    assert spread(PAPER, 8) == (2, 2, 2, 2)


@pytest.mark.parametrize("failures", [9, -1])
def test_more_failures_than_stages_can_lose_are_refused(failures: int) -> None:
    with pytest.raises(PlanError, match=f"failures is {failures}: 4 stages on 3 pipelines can lose 0 to 8 workers"):
        spread(PAPER, failures)


@given(hurt())
def test_a_plan_made_ahead_runs_and_is_as_short_as_one_made_for_the_case(case: Case) -> None:
    plans = Plans()
    mirrored = frozenset(Slot(case.pipelines - 1 - d, s) for d, s in case.failed)
    for asked in (case, replace(case, failed=mirrored)):
        found = plans.best(asked)
        report = check(found.plan)
        assert found.case == asked
        assert found.plan.failed == tuple(sorted(d * case.stages + s for d, s in asked.failed))
        assert found.peak_activations == report.peak_activations
        assert all(peak <= case.cap(worker % case.stages) for worker, peak in enumerate(found.peak_activations))


def test_the_same_failure_under_another_name_is_not_planned_again() -> None:
    plans = Plans()
    slots = {plans.best(replace(PAPER, failed=frozenset({Slot(d, 2)}))).slots for d in range(3)}
    assert slots == {27}
    assert (plans.misses, plans.hits) == (1, 2)


def test_pipelines_of_different_sizes_are_not_taken_for_each_other() -> None:
    plans, uneven = Plans(), replace(PAPER, micro_batches=19)
    for pipeline in range(3):
        check(plans.best(replace(uneven, failed=frozenset({Slot(pipeline, 2)}))).plan)
    assert (plans.misses, plans.hits) == (2, 1)


def test_after_planning_for_any_next_loss_that_loss_is_a_hit() -> None:
    plans = Plans()
    assert len(list(plans.next(PAPER))) == 12
    assert plans.misses == 4
    plans.best(replace(PAPER, failed=frozenset({Slot(1, 3)})))
    assert plans.misses == 4


def test_plans_for_more_and_more_failures_never_get_shorter() -> None:
    slots = [found.slots for found in Plans().ahead(PAPER, 5)]
    assert len(slots) == 5
    assert slots == sorted(slots)


def test_nobody_moves_where_moving_gains_nothing() -> None:
    apart = replace(PAPER, failed=frozenset({Slot(1, 1), Slot(2, 2)}))
    found, normal = Plans().normal(apart)
    assert (found.slots, normal.moves, normal.failed) == (27, (), apart.failed)
    same = replace(PAPER, failed=frozenset({Slot(1, 2), Slot(2, 2)}))
    found, normal = Plans().normal(same)
    assert (found.slots, len(normal.moves)) == (27, 1)
