"""Slow nodes: who is slow, who runs what then, and when a change is worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.replan.slow_nodes import (
    WINDOW_STEPS,
    PaceHistory,
    SlowCase,
    UsualPaces,
    decide_slow_nodes,
    share_micro_batches,
    slow_factors,
    window_steps,
)
from culm.schedule import generate_plan

D, P, M = 4, 2, 64
PLAN = generate_plan("1f1b", pipelines=D, stages=P, micro_batches=M)
RUNNERS = {stage: tuple(range(stage, D * P, P)) for stage in range(P)}
HOMES = {(g, m): d * P + g for d, micros in enumerate(PLAN.micros_by_pipeline) for m in micros for g in range(P)}


def case(factors: Mapping[int, float], active: Mapping[int, float] | None = None, **fields: object) -> SlowCase:
    found = SlowCase(
        plan=PLAN,
        runners=RUNNERS,
        homes=HOMES,
        factors=factors,
        segment_s=(1.0, 1.0),
        active=active or {},
        step_s=10.0,
        steps_left=100,
    )
    return replace(found, **fields)  # type: ignore[arg-type]


def test_one_hiccup_is_not_slow() -> None:
    history = PaceHistory()
    for step in range(WINDOW_STEPS):
        for slot in range(4):
            history.add(slot, 50.0 if (slot, step) == (1, 2) else 1.0, 1.0)
    assert slow_factors(history.medians(), 2, 1.5) == {}


def test_a_pace_needs_a_full_window() -> None:
    history = PaceHistory()
    history.add(0, 3.0, 1.0)
    assert history.medians() == {}


def test_a_window_has_five_steps_and_five_seconds_at_least() -> None:
    assert [window_steps(each) for each in (None, 10.0, 0.5, 0.0001)] == [5, 5, 10, 512]


def test_only_the_last_steps_count() -> None:
    history = PaceHistory()
    for step in range(20):
        history.add(0, 9.0 if step < 10 else 1.0, 1.0)
    assert history.medians(10) == {0: 1.0}
    assert history.medians(21) == {}


def test_a_worker_is_compared_with_the_workers_of_its_stage_on_other_nodes() -> None:
    paces = {0: 1.0, 1: 5.0, 2: 1.0, 3: 5.0, 4: 2.0, 5: 5.0}
    assert slow_factors(paces, 2, 1.5) == {4: 2.0}
    assert slow_factors({0: 1.0, 1: 5.0}, 2, 1.5) == {}, "a stage with one worker tells nothing"
    assert slow_factors({0: 1.0, 2: 2.0}, 2, 1.5, nodes={0: 7, 2: 7}) == {}


def test_a_slow_worker_stays_slow_until_it_is_clearly_faster() -> None:
    paces = {0: 1.0, 2: 1.4, 4: 1.0}
    assert slow_factors(paces, 2, 1.5) == {}
    assert slow_factors(paces, 2, 1.5, slow_before=[2]) == {2: 1.4}
    assert slow_factors({**paces, 2: 1.2}, 2, 1.5, slow_before=[2]) == {}


def test_half_speed_costs_half_a_worker() -> None:
    shared = share_micro_batches(PLAN, RUNNERS, HOMES, {3: 2.0})
    load = Counter(slot for (g, _), slot in shared.items() if g == 1)
    assert load == {1: 18, 3: 9, 5: 18, 7: 19} or max(load[1], load[5], load[7], 2 * load[3]) <= 19
    assert {key: slot for key, slot in shared.items() if key[0] == 0} == {
        key: slot for key, slot in HOMES.items() if key[0] == 0
    }


@given(st.dictionaries(st.sampled_from(range(D * P)), st.floats(1.1, 50), max_size=3))
def test_every_micro_batch_keeps_one_runner_and_no_worker_gets_more_than_before(factors: dict[int, float]) -> None:
    shared = share_micro_batches(PLAN, RUNNERS, HOMES, factors)
    assert shared.keys() == HOMES.keys()
    assert all(slot in RUNNERS[g] for (g, _), slot in shared.items())

    def busiest(homes: Mapping[tuple[int, int], int]) -> float:
        load = Counter(homes.values())
        return max(count * factors.get(slot, 1.0) for slot, count in load.items())

    assert busiest(shared) <= busiest(HOMES)


def test_work_moves_if_that_pays_back() -> None:
    assert decide_slow_nodes(case({3: 2.0})).verdict == "share"
    assert decide_slow_nodes(case({3: 2.0}, steps_left=2)).verdict == "keep"
    assert decide_slow_nodes(case({3: 2.0}, step_s=0.001)).verdict == "keep"


def test_the_same_factor_does_not_change_the_plan_again() -> None:
    assert decide_slow_nodes(case({3: 2.1}, {3: 2.0})).verdict == "keep"
    assert decide_slow_nodes(case({3: 4.0}, {3: 2.0})).verdict == "share"
    over = decide_slow_nodes(case({}, {3: 2.0}))
    assert (over.verdict, over.factors) == ("share", {})


@pytest.mark.parametrize(("standby", "verdict"), [(True, "replace"), (False, "share")])
def test_a_slow_node_is_replaced_where_another_one_waits(standby: bool, verdict: str) -> None:
    decision = decide_slow_nodes(case({3: 2.0}, standby=standby))
    assert decision.verdict == verdict
    assert decision.replaced_slots == ((3,) if standby else ())


RUNS = {slot: (slot, (slot,)) for slot in range(4)}
"""One pipeline of four stages, a worker each."""


def alone(usual: UsualPaces, *paces: float, runs: Mapping[int, tuple[int, tuple[int, ...]]] = RUNS) -> dict[int, float]:
    return usual.slow_factors(dict(enumerate(paces)), 4, 1.5, runs)


def test_a_worker_without_peers_is_slow_when_its_pace_grows() -> None:
    usual = UsualPaces()
    assert alone(usual, 1.0, 9.0, 1.0, 2.0) == {}, "the estimated profile may be wrong about a stage"
    assert alone(usual, 1.0, 9.0, 2.0, 2.0) == {2: 2.0}
    assert alone(usual, 1.0, 9.0, 1.0, 2.0) == {}


def test_a_job_that_becomes_slower_as_a_whole_slows_no_node() -> None:
    usual = UsualPaces()
    alone(usual, 1.0, 1.0, 1.0, 1.0)
    assert alone(usual, 3.0, 3.0, 3.0, 3.0) == {}


def test_a_worker_is_not_slow_because_another_one_was_slow_before() -> None:
    usual = UsualPaces()
    runs = {0: (0, (0,)), 1: (1, (1,))}
    for paces in ({0: 1.0, 1: 4.0}, {0: 1.0, 1: 1.0}):
        assert usual.slow_factors(paces, 2, 1.5, runs) == {}


def test_a_measured_profile_finds_a_worker_that_was_slow_from_the_start() -> None:
    usual, paces = UsualPaces(), {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}
    assert usual.slow_factors(paces, 4, 1.5, RUNS, is_measured=True) == {2: 2.0}
    replaced = RUNS | {2: (9, (2,))}
    assert usual.slow_factors(paces, 4, 1.5, replaced, is_measured=True) == {}, "the profile is wrong about the stage"


def test_workers_with_peers_are_compared_with_them_only() -> None:
    usual, runs = UsualPaces(), {slot: (slot, (slot % 2,)) for slot in range(4)}
    usual.slow_factors(dict.fromkeys(range(4), 1.0), 2, 1.5, runs)
    assert usual.slow_factors({0: 1.0, 1: 1.0, 2: 3.0, 3: 1.0}, 2, 1.5, runs) == {}


def test_a_slow_worker_whose_work_no_other_can_do_is_reported_once() -> None:
    one: dict[str, Any] = {"runners": {0: (0, 2, 4, 6), 1: (3,)}}
    found = decide_slow_nodes(case({3: 2.0}, **one))
    assert (found.verdict, found.factors, found.reported_slots) == ("report", {3: 2.0}, (3,))
    assert "no other node runs their stages" in found.why
    assert decide_slow_nodes(case({3: 2.1}, {3: 2.0}, **one)).verdict == "keep"
    over = decide_slow_nodes(case({}, {3: 2.0}, **one))
    assert (over.verdict, over.factors, over.reported_slots) == ("report", {}, ())
    assert decide_slow_nodes(case({3: 2.0}, {3: 2.0}, standby=True, **one)).verdict == "replace"
