"""`culm bench planner`: the figures that scripts rely on, and their table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.planner import planner_bench


def test_the_figures_have_their_names_and_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        planner_bench, "LARGE_CASE", replace(planner_bench.LARGE_CASE, pipelines=18, micro_batches=18 * 8)
    )
    text: list[str] = []
    result = planner_bench.run(quick=True, progress=text.append)
    assert {"gap_mean", "gap_max", "ms_4x8x16", "s_1024", "replan_s_1024"} <= set(result)
    assert 0 <= result["gap_mean"] <= 0.02
    assert result["gap_mean"] <= result["gap_max"]
    assert all(result[name] > 0 for name in ("ms_4x8x16", "s_1024", "replan_s_1024"))
    assert len(text) == 4


def test_the_table_shows_the_figures() -> None:
    figures = {"gap_mean": 0.003, "gap_max": 0.1, "optima": 300, "at_optimum": 0.9, "ms_4x8x16": 20.0}
    console = Console(record=True, width=120)
    console.print(planner_bench.render_table({**figures, "s_1024": 0.25, "replan_s_1024": 0.2}))
    shown = console.export_text()
    assert "mean of 300 cases" in shown
    for figure in ("0.30%", "10.0%", "90%", "20.0 ms", "0.250 s", "0.200 s"):
        assert figure in shown
