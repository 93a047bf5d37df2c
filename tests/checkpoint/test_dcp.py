"""torch.distributed.checkpoint reads culm's checkpoints and the folders that culm exports for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny_jobs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from culm.checkpoint import export
from culm.checkpoint.dcp_reader import DcpReader, export_dcp
from culm.errors import CheckpointError, UsageError
from culm.testing import simulate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with momentum, averages and a tied parameter, saved by two workers."""
    folder = tmp_path_factory.mktemp("run")
    job = tiny_jobs.job(ema=0.5, tied=[("0.weight", "3.weight")])
    found = simulate(job, pipelines=1, stages=2, strategy="none", out=str(folder), checkpoint_every=2)
    return folder, found


def model() -> torch.nn.Module:
    torch.manual_seed(9)
    return torch.nn.Sequential(*(tiny_jobs.linear() for _ in range(4)))


def test_dcp_loads_weights_and_optimizer_state_of_a_checkpoint(run: tuple[Path, Any]) -> None:
    folder, found = run
    state = {**model().state_dict(), "optimizer.1.weight.momentum_buffer": torch.zeros(4, 4)}
    reader = DcpReader(folder)
    load(state, storage_reader=reader, no_dist=True)
    assert reader.step == 3
    expected = found.snapshot.tensors
    for name, value in state.items():
        assert torch.equal(value, expected["0.weight" if name == "3.weight" else name]), name
    assert DcpReader.validate_checkpoint_id(folder)
    assert not DcpReader.validate_checkpoint_id(folder / "none")


def test_an_older_step_and_a_part_of_the_tensors_can_be_read(run: tuple[Path, Any]) -> None:
    state = {"2.bias": torch.zeros(4)}
    load(state, storage_reader=DcpReader(run[0], step=2), no_dist=True)
    assert state["2.bias"].any()
    with pytest.raises(UsageError, match="step 1 has no checkpoint"):
        DcpReader(run[0], step=1)


def test_a_tensor_of_another_shape_is_refused(run: tuple[Path, Any]) -> None:
    with pytest.raises((CheckpointError, CheckpointException, ValueError), match=r"2.bias|size"):
        load({"2.bias": torch.zeros(5)}, storage_reader=DcpReader(run[0]), no_dist=True)


@pytest.mark.parametrize("averaged", [False, True])
def test_an_exported_folder_is_read_by_dcp(run: tuple[Path, Any], tmp_path: Path, averaged: bool) -> None:
    folder, found = run
    report = export_dcp(folder, tmp_path / "dcp", averaged=averaged)
    assert (report.step, (tmp_path / "dcp" / ".metadata").is_file()) == (3, True)
    state = {**model().state_dict(), "optimizer.1.weight.momentum_buffer": torch.zeros(4, 4)}
    load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    expected = found.snapshot.tensors
    for name, value in state.items():
        stored = "0.weight" if name == "3.weight" else name
        average = expected.get(f"optimizer.{stored}.ema")
        assert torch.equal(value, average if averaged and average is not None else expected[stored]), name
    with pytest.raises(UsageError, match="not an empty folder"):
        export_dcp(folder, tmp_path / "dcp")


def test_tensors_without_a_dimension_are_exported(tmp_path: Path) -> None:
    """The step counts of AdamW: an export of every such run failed."""
    job = tiny_jobs.job(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    found = simulate(job, pipelines=1, stages=2, out=str(tmp_path / "run"))
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    for source in ({"checkpoint_id": str(tmp_path / "dcp")}, {"storage_reader": DcpReader(tmp_path / "run")}):
        state = {"optimizer.1.weight.step": torch.zeros(()), "optimizer.1.weight.exp_avg": torch.zeros(4, 4)}
        load(state, **source, no_dist=True)
        assert all(torch.equal(value, found.snapshot.tensors[name]) for name, value in state.items())
        assert state["optimizer.1.weight.step"] == 3


def test_averaged_weights_are_exported_on_request(run: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder, found = run
    export(folder, tmp_path / "model.safetensors", averaged=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["2.weight"], found.snapshot.tensors["optimizer.2.weight.ema"])
    assert torch.equal(tensors["3.weight"], found.snapshot.tensors["optimizer.0.weight.ema"])
    plain = tmp_path / "plain"
    simulate(tiny_jobs.job(), pipelines=1, stages=1, strategy="none", out=str(plain))
    with pytest.raises(UsageError, match="has no averaged weights"):
        export(plain, tmp_path / "other.safetensors", averaged=True)
