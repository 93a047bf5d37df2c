"""The dropping bench: drops follow the requested rate, and the table has every rate."""

from __future__ import annotations

import io

import pytest
from benchmarks.resilience.dropping_bench import DROP_RATES, PIPELINES, draw_dropped_pipelines, render_table, run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.resilience import dropping_bench


@given(st.sampled_from(DROP_RATES), st.integers(0, 9))
def test_a_step_never_loses_all_its_samples_and_loses_about_the_requested_share(rate: float, seed: int) -> None:
    dropped = draw_dropped_pipelines(rate, 400, seed)
    assert len(dropped) == 400
    assert all(len(set(lost)) == len(lost) < PIPELINES for lost in dropped.values())
    assert abs(sum(map(len, dropped.values())) / (400 * PIPELINES) - rate) < 0.08


def test_a_higher_rate_drops_what_a_lower_one_does_and_more() -> None:
    low, high = (draw_dropped_pipelines(rate, 100, 0) for rate in (0.1, 0.25))
    assert all(set(low[step]) <= set(high[step]) for step in range(100))
    assert low != high


def test_the_quick_bench_trains_with_and_without_drops_and_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropping_bench, "LENGTH", 8)
    monkeypatch.setattr(dropping_bench, "SAMPLES", 1)
    monkeypatch.setattr(dropping_bench, "_EVALUATION_SAMPLES", 8)
    result = run(quick=True)
    rates = [row["rate"] for row in result["rows"]]
    assert rates == [0.0, 0.10, 0.50]
    assert result["rows"][0]["above"] == 0.0
    assert result["rows"][-1]["losses"] != result["rows"][0]["losses"]
    paper = io.StringIO()
    Console(file=paper, width=120).print(render_table(result))
    shown = paper.getvalue()
    assert all(f"{rate:.1%}" in shown for rate in rates)
