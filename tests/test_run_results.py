"""`culm.export`, `culm.cost`, `culm.report` and `culm.replay`: what a run has left, from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests import tiny_jobs
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

import culm
from culm.cli import main
from culm.testing import simulate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with averages on nodes that have a price, and its result."""
    folder = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"instance": "p3.2xlarge", "market": "spot", "node_price": 0.6}
    found = simulate(
        tiny_jobs.job(ema=0.5), pipelines=1, stages=2, strategy="none", out=str(folder), checkpoint_every=2, **options
    )
    return folder, found


def read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def test_the_weights_are_written_to_a_file(
    run: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, found = run
    target = tmp_path / "model.safetensors"
    report = culm.export(folder, target)
    assert (report.path, report.step, report.rejected) == (str(target), 3, ())
    assert torch.equal(read(target, "0.weight"), found.snapshot.tensors["0.weight"])
    with pytest.raises(culm.CulmError, match="exists: name another file"):
        culm.export(folder, target, step=2)
    assert culm.export(folder, target, step=2, averaged=True, overwrite=True).step == 2
    assert not torch.equal(read(target, "0.weight"), found.snapshot.tensors["0.weight"])
    assert capfd.readouterr() == ("", "")


def test_a_folder_of_torchs_distributed_checkpoints_is_written(run: tuple[Path, Any], tmp_path: Path) -> None:
    culm.export(run[0], tmp_path / "dcp", format="dcp")
    state = {"0.weight": torch.zeros(4, 4)}
    load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(state["0.weight"], run[1].snapshot.tensors["0.weight"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"format": "pickle"}, "format is 'pickle': use safetensors, hf or dcp"),
        ({"format": "hf"}, "was not trained with culm.hf.parts"),
        ({"format": "hf", "averaged": True}, "format is 'hf' and averaged is True"),
        ({"step": "last"}, "step is 'last': use the step of a checkpoint"),
        ({"step": True}, "step is True"),
        ({"step": 1}, "step 1 has no checkpoint"),
        ({"step": "best"}, "records no best checkpoint"),
    ],
)
def test_a_wrong_export_is_refused(
    run: tuple[Path, Any], tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(culm.CulmError, match=sentence):
        culm.export(run[0], tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_the_cost_is_that_of_the_command(run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    record = culm.cost(run[0])
    assert record is not None
    with pytest.raises(SystemExit):
        main(["cost", str(run[0]), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(record.as_json()))
    assert record.usd == pytest.approx(2 * 0.6 / 60)  # a minute of each node is billed at least
    assert [row["node"] for row in record.nodes] == ["node 0", "node 1"]


def test_without_a_price_there_is_no_cost_and_without_a_run_an_error(tmp_path: Path) -> None:
    simulate(tiny_jobs.job(), pipelines=1, stages=2, strategy="none", out=str(tmp_path / "a"))
    assert culm.cost(tmp_path / "a") is None
    with pytest.raises(culm.CulmError, match="there is no folder"):
        culm.cost(tmp_path / "nowhere")


def test_a_report_is_written_and_its_facts_are_returned(
    run: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, found = run
    report = culm.report(folder, out=tmp_path / "a.html")
    assert report.path == str(tmp_path / "a.html")
    assert "<html" in (tmp_path / "a.html").read_text()
    assert report.runs[0].summary["weights_sha256"] == found.weights_sha256
    assert culm.report(folder, folder, writes=False).same_weights is True
    monkeypatch.chdir(tmp_path)
    assert culm.report(folder, folder).path == "report.html"
    with pytest.raises(SystemExit):
        main(("report", str(folder), "--json"))
    assert json.loads(capsys.readouterr().out)["runs"][0]["steps"] == report.to_fields()["runs"][0]["steps"]
    with pytest.raises(culm.CulmError, match="no run is named"):
        culm.report()


def test_the_decisions_of_the_leaders_are_repeated(run: tuple[Path, Any], tmp_path: Path) -> None:
    (found,) = culm.replay(run[0])
    assert found.equal
    assert found.events > 3
    assert str(found) == f"{found.log}: {found.events} events, the same instructions"
    with pytest.raises(culm.CulmError, match="has no leader"):
        culm.replay(tmp_path)
