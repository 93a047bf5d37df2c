"""Failure normalization: the best distribution, reached with the fewest moves, and plans that are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan import (
    PlanCache,
    PlanCase,
    Slot,
    optimal_spread,
    plan_greedy,
    rebalance_failures,
    step_lower_bound,
    with_failures_by_stage,
)
from culm.plan.replan.rebalance_failures import count_failures_by_stage
from culm.schedule import Costs, check_plan

PAPER_CASE = PlanCase(pipelines=3, stages=4, micro_batches=18)
COSTS_HEAVY_LAST_STAGE = Costs(forward=(1.0, 1.0, 1.0, 4.0))


@st.composite
def cases_with_failures(draw: st.DrawFn) -> PlanCase:
    D, P = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    lost = [draw(st.sets(st.integers(0, D - 1), max_size=D - 1)) for _ in range(P)]
    price = st.sampled_from((0.5, 1.0, 2.0))
    return PlanCase(
        pipelines=D,
        stages=P,
        micro_batches=draw(st.integers(D, 3 * D + 1)),
        failed=frozenset(Slot(d, s) for s, many in enumerate(lost) for d in many),
        costs=Costs(forward=draw(st.tuples(*[price] * P)), input=draw(price), send=draw(st.sampled_from((0.0, 0.5)))),
        split=draw(st.booleans()),
        stagger=draw(st.booleans()),
        memory=draw(st.sampled_from((None, "1f1b", 2))),
    )


def all_spreads(case: PlanCase) -> Iterator[tuple[int, ...]]:
    total = len(case.failed)
    return (
        lost for lost in product(range(min(total, case.pipelines - 1) + 1), repeat=case.stages) if sum(lost) == total
    )


@given(cases_with_failures())
def test_no_other_spread_has_a_lower_bound(case: PlanCase) -> None:
    result = rebalance_failures(case)
    assert result.lower_bound == pytest.approx(
        min(step_lower_bound(with_failures_by_stage(case, lost)) for lost in all_spreads(case))
    )
    assert result.lower_bound == pytest.approx(step_lower_bound(with_failures_by_stage(case, result.failures_by_stage)))


@given(cases_with_failures())
def test_no_spread_that_is_as_good_takes_fewer_moves(case: PlanCase) -> None:
    result = rebalance_failures(case)
    lost = count_failures_by_stage(case.failed, case.stages)
    good = [
        other
        for other in all_spreads(case)
        if step_lower_bound(with_failures_by_stage(case, other)) <= result.lower_bound * (1 + 1e-9)
    ]
    assert len(result.moves) == min(sum(max(0, a - b) for a, b in zip(other, lost, strict=True)) for other in good)


@given(cases_with_failures())
def test_moves_lead_from_live_slots_to_failed_ones_and_to_the_spread(case: PlanCase) -> None:
    result = rebalance_failures(case)
    assert {move.target for move in result.moves} <= case.failed
    assert not {move.source for move in result.moves} & case.failed
    assert len({*(m.source for m in result.moves), *(m.target for m in result.moves)}) == 2 * len(result.moves)
    assert count_failures_by_stage(result.failed, case.stages) == result.failures_by_stage
    assert len(result.failed) == len(case.failed)


def test_two_failures_in_one_stage_become_one_in_each_of_two() -> None:
    result = rebalance_failures(replace(PAPER_CASE, failed=frozenset({Slot(1, 2), Slot(2, 2)})))
    assert sorted(result.failures_by_stage) == [0, 0, 1, 1]
    assert [move.target for move in result.moves] in ([Slot(1, 2)], [Slot(2, 2)])
    assert plan_greedy(replace(PAPER_CASE, failed=result.failed)).step_time == 27


def test_the_slowest_stage_gets_no_failure() -> None:
    assert optimal_spread(replace(PAPER_CASE, costs=COSTS_HEAVY_LAST_STAGE), 3)[3] == 0


def test_failures_without_positions_are_spread_evenly() -> None:
    assert optimal_spread(PAPER_CASE, 4) == (1, 1, 1, 1)
    assert optimal_spread(PAPER_CASE, 8) == (2, 2, 2, 2)


@pytest.mark.parametrize("failures", [9, -1])
def test_more_failures_than_stages_can_lose_are_refused(failures: int) -> None:
    with pytest.raises(PlanError, match=f"failures is {failures}: 4 stages on 3 pipelines can lose 0 to 8 workers"):
        optimal_spread(PAPER_CASE, failures)


@given(cases_with_failures())
def test_a_cached_plan_is_valid_and_as_short_as_one_for_the_case(case: PlanCase) -> None:
    plans = PlanCache()
    mirrored = frozenset(Slot(case.pipelines - 1 - d, s) for d, s in case.failed)
    for asked in (case, replace(case, failed=mirrored)):
        result = plans.plan_for(asked)
        report = check_plan(result.plan)
        assert result.case == asked
        assert result.plan.failed == tuple(sorted(d * case.stages + s for d, s in asked.failed))
        assert result.peak_activations == report.peak_activations
        assert all(
            peak <= case.max_activations(worker % case.stages) for worker, peak in enumerate(result.peak_activations)
        )


def test_the_same_failure_under_another_name_is_not_planned_again() -> None:
    plans = PlanCache()
    slots = {plans.plan_for(replace(PAPER_CASE, failed=frozenset({Slot(d, 2)}))).step_time for d in range(3)}
    assert slots == {27}
    assert (plans.misses, plans.hits) == (1, 2)


def test_a_cache_with_a_limit_drops_the_plan_that_was_not_used_for_longest() -> None:
    plans = PlanCache(max_solutions=2)
    first, second, third = (replace(PAPER_CASE, failed=frozenset({Slot(0, stage)})) for stage in range(3))
    for case in (first, second, first, third, first):
        plans.plan_for(case)
    assert (plans.misses, plans.hits) == (3, 2)
    plans.plan_for(second)
    assert plans.misses == 4


def test_pipelines_of_different_sizes_are_not_exchanged() -> None:
    plans, uneven = PlanCache(), replace(PAPER_CASE, micro_batches=19)
    for pipeline in range(3):
        check_plan(plans.plan_for(replace(uneven, failed=frozenset({Slot(pipeline, 2)}))).plan)
    assert (plans.misses, plans.hits) == (2, 1)


def test_plans_for_the_next_loss_are_cache_hits() -> None:
    plans = PlanCache()
    assert len(list(plans.plan_next_losses(PAPER_CASE))) == 12
    assert plans.misses == 4
    plans.plan_for(replace(PAPER_CASE, failed=frozenset({Slot(1, 3)})))
    assert plans.misses == 4


def test_plans_for_more_and_more_failures_never_get_shorter() -> None:
    slots = [result.step_time for result in PlanCache().plan_failure_counts(PAPER_CASE, 5)]
    assert len(slots) == 5
    assert slots == sorted(slots)


def test_no_worker_moves_if_moving_gains_nothing() -> None:
    apart = replace(PAPER_CASE, failed=frozenset({Slot(1, 1), Slot(2, 2)}))
    result, normal = PlanCache().plan_after_moves(apart)
    assert (result.step_time, normal.moves, normal.failed) == (27, (), apart.failed)
    same = replace(PAPER_CASE, failed=frozenset({Slot(1, 2), Slot(2, 2)}))
    result, normal = PlanCache().plan_after_moves(same)
    assert (result.step_time, len(normal.moves)) == (27, 1)
