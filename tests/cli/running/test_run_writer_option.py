"""`culm run --writer`: named values of a real run through a SIGKILL, in every place where people look for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from culm.cli import app

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("shared_fork_server")]
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "own_metric.py")
NAMES = ("accuracy", "largest_logit", "z_loss")
STEPS = 8


def run(*arguments: str) -> dict[str, Any]:
    shape = ("--pipelines", "2", "--stages", "2", "--exact", "--steps", str(STEPS), "--strategy", "reroute")
    found = CliRunner().invoke(app, ["run", EXAMPLE, "--json", *shape, *arguments])
    assert found.exit_code == 0, found.output
    summary: dict[str, Any] = json.loads(found.stdout)
    return summary


def named_values(out: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    return [[line[name] for name in NAMES] for line in lines]


def test_values_of_a_run_that_loses_a_node_are_those_of_one_that_does_not(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run("--out", str(tmp_path / "calm"))
    writers = ("--writer", "tensorboard", "--writer", "prometheus")
    summary = run("--out", str(tmp_path / "hurt"), "--kill", "node=3 step=3 at=1B5", *writers)
    assert summary["preemptions"] == 1
    values = named_values(tmp_path / "hurt")
    assert values == named_values(tmp_path / "calm")
    read = accumulator.EventAccumulator(str(tmp_path / "hurt" / "tensorboard"))
    read.Reload()
    for column, name in enumerate(NAMES):
        points = {point.step: point.value for point in read.Scalars(name)}
        # If the killed node led the run, the point that it was writing is missing; steps.jsonl has every step.
        assert len(points) >= STEPS - 1
        assert all(value == pytest.approx(values[step][column]) for step, value in points.items())
    assert 'culm_value{run="hurt",name="z_loss"}' in (tmp_path / "hurt" / "metrics.prom").read_text()
    told = CliRunner().invoke(app, ["report", str(tmp_path / "hurt")])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "hurt" / "report.html").read_text()
    assert all(f"<h2>{name}</h2>" in page for name in NAMES)


def test_an_unknown_writer_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["run", EXAMPLE, "--stages", "2", "--out", str(tmp_path / "a"), "--writer", "tb"])
    assert found.exit_code == 2
    assert "use prometheus, tensorboard, wandb or MODULE:CLASS" in found.output
