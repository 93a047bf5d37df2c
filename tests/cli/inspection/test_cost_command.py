"""`culm cost` and the money of real runs: processes, SIGKILL, a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import JOBS
from tests.tiny_jobs import job
from typer.testing import CliRunner

from culm.cli import app
from culm.errors import UsageError
from culm.observe.report.load_run import RunFolderReader
from culm.observe.report.page_layout import layout_run
from culm.observe.report.report_data import build_report_data
from culm.testing import simulate


def invoke(*arguments: str) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.real
@pytest.mark.usefixtures("shared_fork_server")
def test_a_real_run_through_a_kill_costs_a_minute_of_each_node(tmp_path: Path) -> None:
    """It takes less than a minute, the shortest time that is billed. The simulator's rule, real processes."""
    folder = str(tmp_path / "run")
    shape = ("--pipelines", "2", "--stages", "1", "--strategy", "reroute", "--kill", "node=1 step=2 at=0B3")
    shown = invoke(
        "run", JOBS, "--out", folder, "--instance", "p3.2xlarge", "--market", "spot", "--price", "0.6", *shape
    )
    cost = json.loads(invoke("cost", folder, "--json"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert cost["cost_usd"] == summary["cost_usd"] == pytest.approx(2 * 0.6 / 60)
    assert "cost" in shown and "$0.02" in shown
    assert [(row["instance"], row["market"], row["nodes"]) for row in cost["kinds"]] == [("p3.2xlarge", "spot", 2)]
    first, second = cost["nodes"]
    assert 0 < second["hours"] < first["hours"]  # node 1 was killed
    table = invoke("cost", folder)
    assert "node 1" in table and "at least 60 s for each node" in table


def test_the_page_shows_what_a_run_costs(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "strategy": "reroute",
        "instance": "p3.2xlarge",
        "market": "spot",
    }
    simulate(job(steps=6), cost=lambda *_: 10.0, out=str(tmp_path / "run"), **options)
    page = layout_run(build_report_data(RunFolderReader(str(tmp_path / "run")).read()))
    text = "".join(block.html for block in page.blocks)
    assert "p3.2xlarge" in text and "on demand" in text and "<h2>Cost</h2>" in text


def test_a_run_without_prices_says_how_to_give_them(tmp_path: Path) -> None:
    simulate(job(), pipelines=2, stages=2, strategy="reroute", out=str(tmp_path / "run"))
    assert "give it with --price or --instance" in invoke("cost", str(tmp_path / "run"))
    assert json.loads(invoke("cost", str(tmp_path / "run"), "--json")) == {"cost_usd": 0.0}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget": 5.0}, "--budget ends the run with a checkpoint, which needs a folder"),
        ({"budget": 5.0, "out": "x"}, "--budget needs the price of a node"),
        ({"budget": 0.1, "out": "x", "node_price": 3.0}, "--budget 0.1 is too low: .* 4 nodes costs .0.2; use more"),
        ({"budget": -1.0, "out": "x", "node_price": 3.0}, "--budget is -1"),
        ({"market": "spot"}, "--market spot alone does not determine a price"),
        ({"deadline": 0.0}, "--deadline is 0"),
    ],
)
def test_wrong_requests_name_the_fix(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        simulate(job(), pipelines=2, stages=2, strategy="reroute", **options)
