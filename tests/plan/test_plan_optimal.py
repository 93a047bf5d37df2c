"""Constraint programming: known answers, proofs, and a file of cases that the greedy plans are held against."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from statistics import mean

import pytest
from benchmarks.optima import FILE, case_of, random_case, row_of

from culm.errors import PlanError
from culm.plan import Case, Slot, bound, greedy, optimal
from culm.schedule import Costs, check

from .test_plan_greedy import shortest

HURT = Case(pipelines=3, stages=4, micro_batches=18, failed=frozenset({Slot(2, 2)}))
ROWS = json.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def gaps_of_greedy() -> list[float]:
    return [greedy(case_of(row)).slots / row["optimum"] - 1 for row in ROWS]


def test_greedy_is_within_two_percent_of_the_optimum_on_average() -> None:
    gaps = gaps_of_greedy()
    assert len(gaps) >= 300
    assert min(gaps) >= -1e-9
    assert mean(gaps) <= 0.02


def test_no_bound_is_above_the_optimum() -> None:
    for row in ROWS:
        assert bound(case_of(row)) <= row["optimum"] * (1 + 1e-9)


def test_the_file_has_capped_and_uncapped_cases_of_every_kind() -> None:
    for field in ("split", "stagger"):
        assert {row[field] for row in ROWS} == {True, False}
    assert {row["memory"] for row in ROWS} == {None, "1f1b", 2, 3}
    assert {len(row["failed"]) for row in ROWS} == {0, 1, 2}


def test_a_row_of_the_file_says_all_of_a_case() -> None:
    for seed in range(40):
        case = random_case(seed)
        assert case_of(json.loads(json.dumps(row_of(case, 1.0)))) == case


def test_the_optimum_is_found_where_greedy_misses_it() -> None:
    pytest.importorskip("ortools")
    missed = [row for row, gap in zip(ROWS, gaps_of_greedy(), strict=True) if gap > 0.001]
    for row in missed[:3]:
        case = case_of(row)
        found = optimal(case, workers=2)
        assert (found.slots, found.gap, found.solver) == (row["optimum"], 0.0, "cp-sat")
        peaks = check(found.plan).peak_activations
        assert peaks == found.peak_activations
        assert all(peak <= case.cap(worker % case.stages) for worker, peak in enumerate(peaks))


@pytest.mark.parametrize(
    ("failed", "split", "stagger", "slots"),
    [(set(), False, False, 27), ({Slot(2, 2)}, False, False, 33), ({Slot(2, 2)}, True, False, 29)],
)
def test_the_answers_of_the_paper_are_proved(failed: set[Slot], split: bool, stagger: bool, slots: int) -> None:
    found = optimal(replace(HURT, failed=frozenset(failed), split=split, stagger=stagger))
    assert (found.slots, found.bound, found.gap) == (slots, slots, 0.0)


@pytest.mark.parametrize(("micro_batches", "stage", "memory"), [(2, 0, None), (3, 1, None), (3, 0, 1), (3, 1, 2)])
def test_no_plan_at_all_is_shorter_than_the_proved_one(micro_batches: int, stage: int, memory: int | None) -> None:
    pytest.importorskip("ortools")
    shape = Case(pipelines=2, stages=2, micro_batches=micro_batches, failed=frozenset({Slot(1, stage)}))
    case = replace(shape, stagger=False, memory=memory)
    found = optimal(case, workers=1)
    assert (found.slots, found.gap) == (shortest(case), 0.0)


def test_what_is_not_proved_in_the_time_is_still_no_worse_than_greedy() -> None:
    pytest.importorskip("ortools")
    case = replace(HURT, memory="1f1b")
    found = optimal(case, limit_s=0.5, workers=1)
    assert found.slots <= greedy(case).slots
    assert bound(case) <= found.bound <= found.slots


def test_costs_that_are_no_whole_numbers_give_a_bound_that_holds() -> None:
    pytest.importorskip("ortools")
    case = Case(
        pipelines=2,
        stages=2,
        micro_batches=4,
        failed=frozenset({Slot(1, 1)}),
        costs=Costs(forward=(0.1234567, 0.3), input=1 / 3, weight=0.29),
        memory=1,
    )
    found = optimal(case, limit_s=5, workers=1)
    assert found.bound <= found.slots <= greedy(case).slots


def test_without_ortools_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"pip install culm\[planner\]"):
        optimal(replace(HURT, memory="1f1b"))


@pytest.mark.parametrize(
    ("change", "limit_s", "sentence"),
    [
        ({}, 0.0, "the time limit is 0.0 s: use a number above 0"),
        ({}, float("nan"), "the time limit is nan s"),
        ({"micro_batches": 4000}, 1.0, "the case has 16,000 forwards, and cp-sat takes 12,000 at most: use greedy"),
    ],
)
def test_what_the_solver_can_not_do_is_refused(change: dict[str, int], limit_s: float, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        optimal(replace(HURT, **change), limit_s=limit_s)  # type: ignore[arg-type]
