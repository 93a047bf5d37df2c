"""`culm bench planner`: the figures that scripts rely on, and a table of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import planner


def test_the_figures_have_their_names_and_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LARGE", replace(planner.LARGE, pipelines=18, micro_batches=18 * 8))
    told: list[str] = []
    found = planner.run(quick=True, progress=told.append)
    assert {"gap_mean", "gap_max", "ms_4x8x16", "s_1024", "replan_s_1024"} <= set(found)
    assert 0 <= found["gap_mean"] <= 0.02
    assert found["gap_mean"] <= found["gap_max"]
    assert all(found[name] > 0 for name in ("ms_4x8x16", "s_1024", "replan_s_1024"))
    assert len(told) == 4


def test_the_table_shows_them() -> None:
    figures = {"gap_mean": 0.003, "gap_max": 0.1, "optima": 300, "at_optimum": 0.9, "ms_4x8x16": 20.0}
    console = Console(record=True, width=120)
    console.print(planner.table({**figures, "s_1024": 0.25, "replan_s_1024": 0.2}))
    shown = console.export_text()
    assert "mean of 300 cases" in shown
    for figure in ("0.30%", "10.0%", "90%", "20.0 ms", "0.250 s", "0.200 s"):
        assert figure in shown
