"""`culm schedule` draws what the schedule package makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from culm.cli import main
from culm.schedule import Plan, generate_plan, render_text, time_plan


def stdout_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["schedule", *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_it_shows_the_grid_with_makespan_and_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    plan = generate_plan("1f1b", pipelines=2, stages=3, micro_batches=8)
    found = stdout_of(capsys, "1f1b", "--pipelines", "2", "--stages", "3", "--micro-batches", "8")
    assert found == render_text(time_plan(plan))
    assert "makespan" in found
    assert "bubble" in found


def test_times_change_the_makespan(capsys: pytest.CaptureFixture[str]) -> None:
    found = stdout_of(capsys, "gpipe", "--stages", "1", "--micro-batches", "2", "--times", "F=1,I=2,W=3")
    assert "makespan 12" in found


def test_it_writes_files_that_other_tools_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("svg", "csv", "perfetto")}
    stdout_of(capsys, "zb", *[part for name, file in files.items() for part in (f"--{name}", str(file))])
    assert files["svg"].read_text().startswith("<svg")
    assert (
        Plan.from_csv(files["csv"].read_text()).workers
        == generate_plan("zb", pipelines=1, stages=4, micro_batches=8).workers
    )
    assert json.loads(files["perfetto"].read_text())["traceEvents"]
