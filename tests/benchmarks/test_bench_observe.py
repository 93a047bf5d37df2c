"""The bench of observing: both sides run, somebody looks, and every figure is there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from benchmarks.job import GPTSpec
from benchmarks.observe import drawn, run, table, written
from benchmarks.ours import CulmPool
from benchmarks.pipeline import Effort
from rich.console import Console

from benchmarks import observe
from culm.observe.facts import facts
from culm.observe.reading import Folder

TINY = GPTSpec(name="tiny", width=8, tokens=4, blocks=2, heads=2, vocab=16, micro_batch=2, micro_batches=4)


def test_the_large_run_is_one_that_can_be_read_and_drawn(tmp_path: Path) -> None:
    assert min(written(tmp_path / "run", 300, 30)) > 0
    found = facts(Folder(str(tmp_path / "run")).look())
    assert (found.steps, found.preemptions, len(found.happened), found.once) == (300, 10, 31, True)
    assert min(drawn(tmp_path / "run", 1).values()) > 0


@pytest.mark.real
@pytest.mark.usefixtures("forked")
def test_the_quick_bench_looks_at_a_run_and_shows_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "STEPS", 1000)
    monkeypatch.setattr(observe, "QUICK", Effort(jobs=(TINY,), rounds=2, starts=1, round_s=0.02))
    with CulmPool() as pool:
        result = run(pool, quick=True)
    assert result["rounds"] == 2
    assert result["polls"] >= 4
    assert result["ci"][0] <= result["ratio_median"] <= result["ci"][1]
    paper = io.StringIO()
    Console(file=paper, width=120).print(table(result))
    assert "100 steps and 1,000 events" in paper.getvalue()
