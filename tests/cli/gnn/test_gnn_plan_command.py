"""`culm gnn plan`, and the sources of graph statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from culm.cli.gnn.gnn_plan_command import gnn_plan
from culm.errors import UsageError
from culm.gnn.plan import workload_for_graph

app = typer.Typer(add_completion=False)
app.command()(gnn_plan)
CORA = Path(__file__).parents[3] / "../shared/graphs/cora.npz"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def run_json(*arguments: str) -> dict[str, Any]:
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    plan: dict[str, Any] = json.loads(out)
    return plan


def test_a_plan_has_servers_intervals_workers_time_cost_and_value() -> None:
    plan = run_json("--graph", "amazon", "--instance", "c5n.2xlarge")
    assert plan["instance"] == "c5n.2xlarge"
    for key in ("servers", "intervals", "workers", "time_per_epoch_s", "cost_per_epoch_usd", "value"):
        assert plan[key] > 0
    assert {"cpu", "gpu", "sampling"} <= set(plan["value_against"])
    assert set(plan["systems"]) == {"elastic", *plan["value_against"]}
    assert plan["prices"]["as_of"] == "2026-08-22"


def test_prices_of_2021_come_with_the_rates_of_the_paper() -> None:
    in_2021, in_2026 = run_json("--graph", "amazon", "--prices", "2021"), run_json("--graph", "amazon")
    assert "not measured by us" in in_2021["rates"]["source"]
    assert in_2021["value_against"]["cpu"] > 1 > in_2026["value_against"]["cpu"]
    mixed = run_json("--graph", "amazon", "--prices", "2021", "--rates", "measured")
    assert mixed["rates"]["source"] == in_2026["rates"]["source"]


def test_the_published_table_is_shown_with_the_forecast() -> None:
    plan = run_json("--paper", "dorylus-table4")
    assert plan["agree"] is True
    assert [(row["graph"], row["model"]) for row in plan["rows"]] == [
        ("reddit-small", "gcn"), ("amazon", "gcn"), ("friendster", "gcn"), ("amazon", "gat")
    ]  # fmt: skip
    assert plan["rows"][0]["paper"]["gpu"] == {"s": 163, "usd": 0.28}
    assert "same direction" in run("--paper", "dorylus-table4")[1]


def test_the_table_shows_reasons() -> None:
    code, out, _ = run("--graph", "amazon", "--launcher", "ray", "--spot")
    assert code == 0
    assert "best value" in out and "sampling" in out


def test_a_graph_can_be_given_by_its_statistics() -> None:
    workload = workload_for_graph(
        "stats:vertices=9.2e6,edges=314e6,features=300,classes=25,hidden=64", model="gat", heads=4
    )
    assert (workload.vertices, workload.edges, workload.widths) == (9_200_000, 314_000_000, (300, 64, 25))
    assert (workload.model, workload.heads) == ("gat", 4)


def test_default_widths_are_those_of_a_run() -> None:
    source = "stats:vertices=10,edges=20,features=5,classes=2"
    assert workload_for_graph(source).widths == (5, 16, 2)
    gat = workload_for_graph(source, model="gat")
    assert (gat.widths, gat.heads) == ((5, 64, 2), 8)
    assert workload_for_graph("amazon", model="gat").heads == 1


def test_a_generator_is_planned_without_generating() -> None:
    workload = workload_for_graph("gen:rmat,scale=30,degree=16,features=64,classes=10")
    assert (workload.vertices, workload.edges, workload.features) == (2**30, 2**34, 64)


def test_a_file_is_planned_by_its_statistics(tmp_path: Path) -> None:
    path = tmp_path / "small.npz"
    np.savez(path, indptr=[0, 1, 2], indices=[1, 0], labels=[0, 2], feat_shape=[2, 7])
    workload = workload_for_graph(str(path), hidden=8)
    assert (workload.vertices, workload.edges, workload.widths) == (2, 2, (7, 8, 3))
    np.savez(path, edge_index=[[0, 1], [1, 0]], y=[0, 2], x=np.ones((2, 7)))
    assert workload_for_graph(str(path), hidden=8) == workload


@pytest.mark.skipif(not CORA.is_file(), reason="the real graphs are not available")
def test_cora_is_read() -> None:
    workload = workload_for_graph(str(CORA))
    assert (workload.vertices, workload.edges, workload.features, workload.classes) == (2708, 10556, 1433, 7)


def test_an_invalid_file_is_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", indptr=[0, 1, 2], labels=[0, 1])
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(UsageError, match="has no array"):
        workload_for_graph(str(tmp_path / "none.npz"))
    with pytest.raises(UsageError, match="cannot be read"):
        workload_for_graph(str(tmp_path / "text.npz"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--graph is missing"),
        (["--graph", "amazn"], "did you mean amazon?"),
        (["--graph", "stats:vertices=10"], "does not say edges"),
        (["--graph", "stats:vertices=10,edges=ten,features=1,classes=2"], "edges=ten"),
        (["--graph", "stats:nodes=10"], "'nodes'"),
        (["--graph", "amazon", "--model", "gin"], "there is no --model 'gin'"),
        (["--graph", "amazon", "--layers", "0"], "layers is 0"),
        (["--graph", "amazon", "--workers", "many"], "--workers is 'many'"),
        (["--graph", "amazon", "--mode", "fast"], "there is no --mode 'fast'"),
        (["--graph", "amazon", "--staleness", "-1"], "--staleness is -1"),
        (["--graph", "amazon", "--prices", "1999"], "use 2021, 2026"),
        (["--graph", "amazon", "--spot", "--instance", "c5.2xlarge"], "no spot price"),
        (["--graph", "amazon", "--launcher", "lamda"], "there is no --launcher 'lamda'"),
        (["--paper", "table9"], "there is no --paper 'table9'"),
    ],
)
def test_an_invalid_request_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
