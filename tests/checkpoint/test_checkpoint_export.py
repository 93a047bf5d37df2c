from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.sample_states import files, same_tensors, save_checkpoint, state_tensors
from torch import nn

from culm.checkpoint import CheckpointCatalog, Storage, export
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 11, bias=False))
    layers[3].weight = layers[0].weight
    return layers


@pytest.fixture
def trained() -> nn.Sequential:
    """A model with a tied embedding and head, and buffers that have changed."""
    layers = model(0)
    layers(torch.arange(8)).sum().backward()
    return layers


@pytest.fixture
def run(tmp_path: Path, trained: nn.Sequential) -> Path:
    """A run folder with the trained model at step 30, spread over two workers, and an older checkpoint."""
    catalog = CheckpointCatalog(Storage(tmp_path / "run" / "checkpoints"))
    save_checkpoint(catalog, 20)
    names = [name for name in trained.state_dict() if name != "3.weight"]
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, name in enumerate(names):
        parts[number % 2][name] = trained.state_dict()[name]
        parts[number % 2][f"optimizer.{name}.exp_avg"] = torch.ones(3)
    receipts = [catalog.write_shard(30, catalog.shard_name(30, worker), part) for worker, part in enumerate(parts)]
    catalog.commit(30, receipts, {"optimizer.0.weight.step": 3}, {"tied": [["0.weight", "3.weight"]]}, 0.0)
    return tmp_path / "run"


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_an_export_loads_into_sequential(run: Path, trained: nn.Sequential, tmp_path: Path, below: str) -> None:
    report = export(run / below, tmp_path / "model.safetensors")
    other = model(1)
    other.load_state_dict(load_file(report.path))
    assert same_tensors(other.state_dict(), trained.state_dict())
    assert (report.step, report.tensors, report.rejected) == (30, 9, ())
    assert report.bytes == (tmp_path / "model.safetensors").stat().st_size


def test_an_export_says_where_it_comes_from(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "culm_step": "30"}


def test_the_same_checkpoint_gives_the_same_file(run: Path, tmp_path: Path) -> None:
    for name in "ab":
        export(run, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_older_step_can_be_requested(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "model.safetensors", step=20).step == 20
    weights = {name: tensor for name, tensor in state_tensors(20).items() if not name.startswith("optimizer.")}
    assert same_tensors(load_file(tmp_path / "model.safetensors"), weights)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"step 25 has no checkpoint in .*: choose one of 20, 30"):
        export(run, tmp_path / "model.safetensors", step=25)


def test_a_damaged_checkpoint_is_passed_over_and_reported(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "manifest.json").write_bytes(b"{")
    report = export(run, tmp_path / "model.safetensors")
    assert report.step == 20
    assert [step for step, _ in report.rejected] == [30]


def test_a_requested_step_that_is_damaged_is_an_error_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "manifest.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        export(run, tmp_path / "model.safetensors", step=30)
    assert not (tmp_path / "model.safetensors").exists()


def test_an_existing_file_is_kept_unless_overwrite(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"model.safetensors exists: name another file"):
        export(run, target)
    assert target.read_bytes() == b"precious"
    export(run, target, overwrite=True)
    assert "0.weight" in load_file(target)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no committed checkpoint: name a run folder"):
        export(tmp_path, tmp_path / "model.safetensors")
    assert files(tmp_path) == set()


def test_a_target_that_is_a_folder_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no file"):
        export(run, f"{tmp_path}/")
    with pytest.raises(CheckpointError, match="it is a folder"):
        export(run, tmp_path / "run")


def test_a_bare_file_name_lands_in_the_current_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export("run", "model.safetensors")
    assert "0.weight" in load_file(tmp_path / "model.safetensors")


def test_an_export_goes_from_url_to_url(memory_url: str) -> None:
    save_checkpoint(CheckpointCatalog(Storage(memory_url)), 4)
    report = export(memory_url.removesuffix("/checkpoints"), "memory://out/model.safetensors")
    assert Storage("memory://out").size("model.safetensors") == report.bytes


def test_a_tied_group_of_which_nothing_is_stored_is_an_error(tmp_path: Path) -> None:
    save_checkpoint(CheckpointCatalog(Storage(tmp_path)), 1, facts={"tied": [["8.weight", "9.weight"]]})
    with pytest.raises(CheckpointError, match=r"holds none of the tied 8.weight, 9.weight"):
        export(tmp_path, tmp_path / "model.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_folder_of_a_step_with_its_own_safetensors_reader(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    catalog = CheckpointCatalog(Storage(tmp_path))
    catalog.write_shard(6, catalog.shard_name(6, 9), {"0.weight": torch.zeros(3, 2)})
    save_checkpoint(catalog, 6, workers=3)
    wanted = state_tensors(6)
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000006"))
    load(found, storage_reader=reader, no_dist=True)
    assert same_tensors(found, wanted)
