"""examples/own_metric.py: three lines of a user are in steps.jsonl, on the page and in TensorBoard, through a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from culm.cli import app
from culm.job import load_job
from culm.observe.report.load_run import RunFolderReader
from culm.observe.report.page_layout import layout_run
from culm.observe.report.report_data import build_report_data
from culm.testing import Faults, simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_metric.py"
NAMES = ("accuracy", "largest_logit", "z_loss")
STEPS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The example without losses, and with a node lost that runs the last stage; exact, so that both are equal."""
    job = load_job(str(EXAMPLE), {"steps": str(STEPS), "exact": "true"})
    places = {name: tmp_path_factory.mktemp("runs") / name for name in ("calm", "killed")}
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "writers": ("tensorboard",)}
    simulate(job, out=str(places["calm"]), **shape)
    found = simulate(job, out=str(places["killed"]), faults=Faults().kill(3, step=5, nth=4), **shape)
    assert found.summary["preemptions"] == 1
    return places


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def test_the_lines_have_the_values_and_a_kill_does_not_change_them(runs: dict[str, Path]) -> None:
    found, calm = lines(runs["killed"]), lines(runs["calm"])
    assert [line["step"] for line in found] == list(range(STEPS))
    assert [[line[name] for name in NAMES] for line in found] == [[line[name] for name in NAMES] for line in calm]
    assert 0 <= found[0]["accuracy"] < found[-1]["accuracy"] <= 1


def test_the_page_has_a_chart_for_each_value(runs: dict[str, Path]) -> None:
    page = layout_run(build_report_data(RunFolderReader(str(runs["killed"])).read()))
    charts = {block.title: block.figure for block in page.blocks if block.id.startswith("value-")}
    assert tuple(charts) == NAMES
    for name, figure in charts.items():
        assert figure is not None
        assert figure["data"][0]["x"] == list(range(STEPS))
        assert figure["data"][0]["y"] == [float(f"{line[name]:.6g}") for line in lines(runs["killed"])]


def test_the_report_command_writes_them(runs: dict[str, Path], tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(runs["killed"]), "--json", "--out", str(tmp_path / "report.html")])
    assert told.exit_code == 0, told.output
    last = lines(runs["killed"])[-1]
    assert json.loads(told.output)["runs"][0]["values"] == {name: last[name] for name in NAMES}
    assert "<h2>z_loss</h2>" in (tmp_path / "report.html").read_text()


def test_tensorboard_has_them(runs: dict[str, Path]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(runs["killed"] / "tensorboard"))
    read.Reload()
    for name in NAMES:
        points = [(point.step, point.value) for point in read.Scalars(name)]
        assert points == [(line["step"], pytest.approx(line[name])) for line in lines(runs["killed"])]
