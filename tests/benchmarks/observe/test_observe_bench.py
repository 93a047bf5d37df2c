"""The observe bench: both sides run, the page is polled, and every figure is reported."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from benchmarks.common.gpt_job import GPTSpec
from benchmarks.observe.observe_bench import measure_line_us, measure_page_ms, render_table, run
from benchmarks.pipeline.culm_pipeline import CulmPool
from benchmarks.pipeline.pipeline_bench import PipelineEffort
from rich.console import Console

from benchmarks.observe import observe_bench
from culm.observe.report.load_run import RunFolderReader
from culm.observe.report.report_data import build_report_data

TINY = GPTSpec(name="tiny", width=8, tokens=4, blocks=2, heads=2, vocab=16, micro_batch=2, micro_batches=4)


def test_the_large_run_can_be_read_and_rendered(tmp_path: Path) -> None:
    assert min(measure_line_us(tmp_path / "run", 300, 30)) > 0
    result = build_report_data(RunFolderReader(str(tmp_path / "run")).read())
    assert (result.steps, result.preemptions, len(result.event_lines), result.every_sample_once) == (300, 10, 31, True)
    assert min(measure_page_ms(tmp_path / "run", 1).values()) > 0


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_the_quick_bench_polls_a_run_and_reports_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_bench, "STEPS", 1000)
    monkeypatch.setattr(observe_bench, "QUICK", PipelineEffort(jobs=(TINY,), rounds=2, starts=1, round_s=0.02))
    with CulmPool() as pool:
        result = run(pool, quick=True)
    assert result["rounds"] == 2
    assert result["polls"] >= 4
    assert result["ci"][0] <= result["ratio_median"] <= result["ci"][1]
    paper = io.StringIO()
    Console(file=paper, width=120).print(render_table(result))
    assert "100 steps and 1,000 events" in paper.getvalue()
