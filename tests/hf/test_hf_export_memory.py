"""Exports of a large model read and write one layer after another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.tiny_hf import tiny_model

import culm.hf
from culm.checkpoint import CheckpointCatalog, Storage
from culm.checkpoint.model_files import write_model_files

CHILD = """
import json, sys
from pathlib import Path
import torch
from culm.checkpoint import export
from culm.checkpoint.dcp_reader import export_dcp
from culm.hf import export_hf

torch.set_num_threads(1)
warm, large, out, kind = sys.argv[1:]
write = {"hf": export_hf, "dcp": export_dcp, "file": lambda run, to: export(run, f"{to}/model.safetensors")}[kind]

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

write(warm, f"{out}/warm")
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = status("VmRSS")
write(large, f"{out}/large")
print(json.dumps(status("VmHWM") - before))
"""


def save_run(folder: Path, model: Any) -> int:
    """A run folder with a checkpoint of two shards. Returns the bytes of the weights."""
    fields = culm.hf.parts(model)
    tensors = model.state_dict()
    storage = Storage(str(folder / "checkpoints"))
    catalog = CheckpointCatalog(storage)
    tied = [list(group) for group in fields["tied"]]
    again = {name for group in tied for name in group[1:]}
    shards: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for index, factory in enumerate(fields["layers"]):
        for name in factory.tensor_names():
            if f"{index}.{name}" not in again:
                shards[index % 2][f"{index}.{name}"] = tensors[name]
    receipts = [catalog.write_shard(1, catalog.shard_name(1, worker), part) for worker, part in enumerate(shards)]
    catalog.commit(1, receipts, {}, {"tied": tied}, 0.0)
    write_model_files(storage, fields["files"])
    return sum(tensor.nbytes for part in shards for tensor in part.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """A tiny run, and one with 200 MB of weights."""
    import transformers

    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "warm", tiny_model("llama"))
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=512, intermediate_size=1408, num_hidden_layers=16, num_attention_heads=8
    )
    torch.manual_seed(0)
    return folder / "warm", folder / "large", save_run(folder / "large", transformers.LlamaForCausalLM(config))


@pytest.mark.real
@pytest.mark.parametrize("kind", ["hf", "dcp", "file"])
def test_an_export_needs_less_memory_than_half_of_the_model(
    runs: tuple[Path, Path, int], kind: str, tmp_path: Path
) -> None:
    warm, large, size = runs
    assert size > 200e6
    command = [sys.executable, "-c", CHILD, str(warm), str(large), str(tmp_path), kind]
    peak = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert peak < size / 2, f"{peak / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"


def test_an_export_in_several_files_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from culm.hf import hf_export

    model = tiny_model("mixtral")  # its experts are stored one by one
    save_run(tmp_path / "run", model)
    culm.hf.export_hf(tmp_path / "run", tmp_path / "model")
    monkeypatch.setattr(hf_export, "_SHARD_BYTES", 10_000)
    culm.hf.export_hf(tmp_path / "run", tmp_path / "model", overwrite=True)
    assert not (tmp_path / "model" / "model.safetensors").exists()
    assert len(list((tmp_path / "model").glob("model-0000?-of-0000?.safetensors"))) > 2
    loaded, info = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
