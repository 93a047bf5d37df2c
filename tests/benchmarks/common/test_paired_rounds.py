from __future__ import annotations

import random
from statistics import median

import pytest
from benchmarks.common.paired_rounds import compare_rounds, measure_paired, median_interval, round_order, steps_for
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import UsageError

seconds = st.floats(min_value=1e-3, max_value=1e3)


class Fake:
    """A side whose rounds take scripted times and that writes its name into a shared log."""

    def __init__(self, name: str, log: list[str], *, step_s: float = 1.0) -> None:
        self.name, self.log, self.step_s = name, log, step_s

    def run_round(self, steps: int) -> float:
        self.log.append(f"{self.name}{steps}")
        return steps * self.step_s


def test_sides_take_turns_in_the_order_abba_baab() -> None:
    log: list[str] = []
    measure_paired(Fake("a", log), Fake("b", log), rounds=4, steps=3, warmup=0)
    assert log == ["a3", "b3", "b3", "a3", "b3", "a3", "a3", "b3"]


def test_warmup_runs_before_the_rounds_and_is_not_counted() -> None:
    log: list[str] = []
    result = measure_paired(Fake("a", log), Fake("b", log), rounds=1, steps=3, warmup=5)
    assert log == ["a5", "b5", "a3", "b3"]
    assert len(result.ratios) == 1


def test_a_ratio_above_one_says_that_a_is_faster() -> None:
    result = measure_paired(Fake("a", [], step_s=0.5), Fake("b", [], step_s=0.75), rounds=4, steps=8, warmup=1)
    assert result.ratio_median == 1.5
    assert result.ci == (1.5, 1.5)
    assert result.a_s == (0.5,) * 4
    assert result.b_s == (0.75,) * 4


@pytest.mark.parametrize(("rounds", "power"), [(2, 1), (4, 2), (8, 3), (20, 2)])
def test_the_order_cancels_drift(rounds: int, power: int) -> None:
    """On average both sides run at the same times: this cancels linear drift after 2 rounds, quadratic after 4."""
    sides = [side for a_first in round_order(rounds) for side in ("ab" if a_first else "ba")]
    places = {name: sum(i**power for i, side in enumerate(sides) if side == name) for name in "ab"}
    assert places["a"] == places["b"]


@given(st.lists(seconds, min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_stays_inside_the_values(values: list[float]) -> None:
    low, high = median_interval(values)
    assert min(values) <= low <= median(values) <= high <= max(values)
    assert median_interval(values) == (low, high)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    spans = [median_interval([draw.gauss(1.0, 0.1) for _ in range(20)]) for _ in range(40)]
    assert sum(low <= 1.0 <= high for low, high in spans) >= 34


def test_ratios_are_paired_round_by_round() -> None:
    result = compare_rounds([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert result.ratios == (2.0, 1.0, 0.5)
    assert result.ratio_median == 1.0


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"steps": 0}, {"warmup": -1}])
def test_invalid_numbers_are_refused_by_name(wrong: dict[str, int]) -> None:
    log: list[str] = []
    with pytest.raises(UsageError, match=next(iter(wrong))):
        measure_paired(Fake("a", log), Fake("b", log), **({"rounds": 1, "steps": 1, "warmup": 0} | wrong))
    assert log == []


@given(st.floats(min_value=1e-4, max_value=0.3))
def test_steps_are_chosen_so_that_a_round_lasts_about_as_long_as_requested(step_s: float) -> None:
    assert 0.3 <= steps_for(step_s, round_s=0.5) * step_s <= 1.0


def test_a_step_longer_than_a_round_is_a_round_by_itself() -> None:
    assert steps_for(7.0, round_s=0.5) == 1
