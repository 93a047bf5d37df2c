"""`culm gnn plan`, and the graphs it can be asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from culm.cli.gnn_plan import gnn_plan
from culm.errors import UsageError
from culm.gnn.plan import shape_of

app = typer.Typer(add_completion=False)
app.command()(gnn_plan)
CORA = Path(__file__).parents[2] / "../shared/graphs/cora.npz"


def run(*arguments: str) -> tuple[int, str, str]:
    made = CliRunner().invoke(app, list(arguments))
    return made.exit_code, made.stdout, made.stderr


def answer(*arguments: str) -> dict[str, Any]:
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_plan_says_servers_intervals_workers_time_cost_and_value() -> None:
    found = answer("--graph", "amazon", "--instance", "c5n.2xlarge")
    assert found["instance"] == "c5n.2xlarge"
    for key in ("servers", "intervals", "workers", "time_per_epoch_s", "cost_per_epoch_usd", "value"):
        assert found[key] > 0
    assert {"cpu", "gpu", "sampling"} <= set(found["value_against"])
    assert set(found["systems"]) == {"elastic", *found["value_against"]}
    assert found["prices"]["as_of"] == "2026-08-22"


def test_prices_of_2021_come_with_the_rates_of_the_paper() -> None:
    then, now = answer("--graph", "amazon", "--prices", "2021"), answer("--graph", "amazon")
    assert "not measured by us" in then["rates"]["source"]
    assert then["value_against"]["cpu"] > 1 > now["value_against"]["cpu"]
    mixed = answer("--graph", "amazon", "--prices", "2021", "--rates", "measured")
    assert mixed["rates"]["source"] == now["rates"]["source"]


def test_the_published_table_stands_beside_the_forecast() -> None:
    found = answer("--paper", "dorylus-table4")
    assert found["agree"] is True
    assert [(row["graph"], row["model"]) for row in found["rows"]] == [
        ("reddit-small", "gcn"), ("amazon", "gcn"), ("friendster", "gcn"), ("amazon", "gat")
    ]  # fmt: skip
    assert found["rows"][0]["paper"]["gpu"] == {"s": 163, "usd": 0.28}
    assert "same direction" in run("--paper", "dorylus-table4")[1]


def test_people_get_a_table_with_reasons() -> None:
    code, out, _ = run("--graph", "amazon", "--launcher", "ray", "--spot")
    assert code == 0
    assert "best value" in out and "sampling" in out


def test_numbers_can_stand_for_a_graph() -> None:
    shape = shape_of("stats:vertices=9.2e6,edges=314e6,features=300,classes=25,hidden=64", model="gat", heads=4)
    assert (shape.vertices, shape.edges, shape.widths) == (9_200_000, 314_000_000, (300, 64, 25))
    assert (shape.model, shape.heads) == ("gat", 4)


def test_widths_that_nobody_gave_are_those_of_a_run() -> None:
    source = "stats:vertices=10,edges=20,features=5,classes=2"
    assert shape_of(source).widths == (5, 16, 2)
    attending = shape_of(source, model="gat")
    assert (attending.widths, attending.heads) == ((5, 64, 2), 8)
    assert shape_of("amazon", model="gat").heads == 1


def test_a_generator_is_planned_for_without_generating() -> None:
    shape = shape_of("gen:rmat,scale=30,degree=16,features=64,classes=10")
    assert (shape.vertices, shape.edges, shape.features) == (2**30, 2**34, 64)


def test_a_file_is_planned_for_by_its_statistics(tmp_path: Path) -> None:
    path = tmp_path / "small.npz"
    np.savez(path, indptr=[0, 1, 2], indices=[1, 0], labels=[0, 2], feat_shape=[2, 7])
    shape = shape_of(str(path), hidden=8)
    assert (shape.vertices, shape.edges, shape.widths) == (2, 2, (7, 8, 3))
    np.savez(path, edge_index=[[0, 1], [1, 0]], y=[0, 2], x=np.ones((2, 7)))
    assert shape_of(str(path), hidden=8) == shape


@pytest.mark.skipif(not CORA.is_file(), reason="the graphs are not beside this checkout")
def test_cora_is_read() -> None:
    shape = shape_of(str(CORA))
    assert (shape.vertices, shape.edges, shape.features, shape.classes) == (2708, 10556, 1433, 7)


def test_a_file_that_is_no_graph_is_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", indptr=[0, 1, 2], labels=[0, 1])
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(UsageError, match="has no array"):
        shape_of(str(tmp_path / "none.npz"))
    with pytest.raises(UsageError, match="can not be read"):
        shape_of(str(tmp_path / "text.npz"))


@pytest.mark.parametrize(
    ("arguments", "said"),
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
        (["--graph", "amazon", "--prices", "1999"], "there is 2021, 2026"),
        (["--graph", "amazon", "--spot", "--instance", "c5.2xlarge"], "no spot price"),
        (["--graph", "amazon", "--launcher", "lamda"], "there is no --launcher 'lamda'"),
        (["--paper", "table9"], "there is no --paper 'table9'"),
    ],
)
def test_a_wrong_request_ends_with_a_sentence_and_2(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
