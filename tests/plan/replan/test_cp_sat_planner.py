"""Constraint programming: known answers, proofs, and a file of cases that greedy plans are compared with."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from statistics import mean

import pytest
from benchmarks.planner.proved_optima import OPTIMA_FILE, case_from_row, random_case, row_from_case
from tests.plan.replan.test_greedy_planner import shortest_makespan

from culm.errors import PlanError
from culm.plan import PlanCase, Slot, plan_greedy, plan_optimal, step_lower_bound
from culm.schedule import Costs, check_plan

CASE_WITH_FAILURE = PlanCase(pipelines=3, stages=4, micro_batches=18, failed=frozenset({Slot(2, 2)}))
KNOWN_OPTIMA = json.loads(OPTIMA_FILE.read_text(encoding="utf-8"))


@functools.cache
def gaps_of_greedy() -> list[float]:
    return [plan_greedy(case_from_row(row)).step_time / row["optimum"] - 1 for row in KNOWN_OPTIMA]


def test_greedy_is_within_two_percent_of_the_optimum_on_average() -> None:
    gaps = gaps_of_greedy()
    assert len(gaps) >= 300
    assert min(gaps) >= -1e-9
    assert mean(gaps) <= 0.02


def test_no_bound_is_above_the_optimum() -> None:
    for row in KNOWN_OPTIMA:
        assert step_lower_bound(case_from_row(row)) <= row["optimum"] * (1 + 1e-9)


def test_the_file_has_capped_and_uncapped_cases_of_every_kind() -> None:
    for field in ("split", "stagger"):
        assert {row[field] for row in KNOWN_OPTIMA} == {True, False}
    assert {row["memory"] for row in KNOWN_OPTIMA} == {None, "1f1b", 2, 3}
    assert {len(row["failed"]) for row in KNOWN_OPTIMA} == {0, 1, 2}


def test_a_case_round_trips_through_a_row_of_the_file() -> None:
    for seed in range(40):
        case = random_case(seed)
        assert case_from_row(json.loads(json.dumps(row_from_case(case, 1.0)))) == case


def test_the_optimum_is_found_where_greedy_misses_it() -> None:
    pytest.importorskip("ortools")
    missed = [row for row, gap in zip(KNOWN_OPTIMA, gaps_of_greedy(), strict=True) if gap > 0.001]
    for row in missed[:3]:
        case = case_from_row(row)
        result = plan_optimal(case, workers=2)
        assert (result.step_time, result.gap, result.solver) == (row["optimum"], 0.0, "cp-sat")
        peaks = check_plan(result.plan).peak_activations
        assert peaks == result.peak_activations
        assert all(peak <= case.max_activations(worker % case.stages) for worker, peak in enumerate(peaks))


@pytest.mark.parametrize(
    ("failed", "split", "stagger", "slots"),
    [(set(), False, False, 27), ({Slot(2, 2)}, False, False, 33), ({Slot(2, 2)}, True, False, 29)],
)
def test_the_answers_of_the_paper_are_proved(failed: set[Slot], split: bool, stagger: bool, slots: int) -> None:
    result = plan_optimal(replace(CASE_WITH_FAILURE, failed=frozenset(failed), split=split, stagger=stagger))
    assert (result.step_time, result.lower_bound, result.gap) == (slots, slots, 0.0)


@pytest.mark.parametrize(("micro_batches", "stage", "memory"), [(2, 0, None), (3, 1, None), (3, 0, 1), (3, 1, 2)])
def test_no_plan_is_shorter_than_the_proved_one(micro_batches: int, stage: int, memory: int | None) -> None:
    pytest.importorskip("ortools")
    shape = PlanCase(pipelines=2, stages=2, micro_batches=micro_batches, failed=frozenset({Slot(1, stage)}))
    case = replace(shape, stagger=False, memory=memory)
    result = plan_optimal(case, workers=1)
    assert (result.step_time, result.gap) == (shortest_makespan(case), 0.0)


def test_an_unproved_plan_is_no_worse_than_greedy() -> None:
    pytest.importorskip("ortools")
    case = replace(CASE_WITH_FAILURE, memory="1f1b")
    result = plan_optimal(case, limit_s=0.5, workers=1)
    assert result.step_time <= plan_greedy(case).step_time
    assert step_lower_bound(case) <= result.lower_bound <= result.step_time


def test_fractional_costs_give_a_valid_bound() -> None:
    pytest.importorskip("ortools")
    case = PlanCase(
        pipelines=2,
        stages=2,
        micro_batches=4,
        failed=frozenset({Slot(1, 1)}),
        costs=Costs(forward=(0.1234567, 0.3), input=1 / 3, weight=0.29),
        memory=1,
    )
    result = plan_optimal(case, limit_s=5, workers=1)
    assert result.lower_bound <= result.step_time <= plan_greedy(case).step_time


def test_without_ortools_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"pip install culm\[planner\]"):
        plan_optimal(replace(CASE_WITH_FAILURE, memory="1f1b"))


@pytest.mark.parametrize(
    ("change", "limit_s", "sentence"),
    [
        ({}, 0.0, "the time limit is 0.0 s: use a number above 0"),
        ({}, float("nan"), "the time limit is nan s"),
        (
            {"micro_batches": 4000},
            1.0,
            "the case has 16,000 forwards, but cp-sat takes at most 12,000: use --solver greedy",
        ),
    ],
)
def test_unsupported_requests_to_the_solver_are_refused(change: dict[str, int], limit_s: float, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        plan_optimal(replace(CASE_WITH_FAILURE, **change), limit_s=limit_s)  # type: ignore[arg-type]
