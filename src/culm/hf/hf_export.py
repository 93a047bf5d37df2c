"""`culm export RUN DIR --hf`: a folder that `from_pretrained` loads, from a run that `culm.hf.parts` described."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from culm.checkpoint import safetensors_codec
from culm.checkpoint.export import ExportReport, StoredWeights, choose_checkpoint, find_catalog
from culm.checkpoint.model_files import read_model_files
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError, UsageError
from culm.hf.hf_adapters import ADAPTER_NAMES

_NAMES = "culm_hf.json"
"""File: names of the parameters that share memory."""
_SHARD_BYTES = 5 * 10**9
"""Size of a file of weights, unless one layer is larger."""


def export_hf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write the model (or, of a `peft` model, its adapter) of the newest intact checkpoint, or of that step.

    Raises UsageError if the folder is not empty, unless `overwrite`, or if the run was not described by
    `culm.hf.parts`. Tensors are read and written layer by layer.
    """
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise UsageError(f"{folder} exists: name another folder, or allow files to be replaced with --overwrite")
    catalog = find_catalog(source)
    files = read_model_files(catalog.storage)
    if _NAMES not in files:
        raise UsageError(
            f"{os.fspath(source)} was not trained with culm.hf.parts: export a model.safetensors, without --hf"
        )
    found = choose_checkpoint(catalog, step)
    weights = StoredWeights(catalog, found.manifest)
    folder.mkdir(parents=True, exist_ok=True)
    write = _write_adapter if ADAPTER_NAMES in files else _write_model
    written = write(folder, files, weights)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return ExportReport(str(folder), found.manifest.step, written, size, found.rejected)


def _write_adapter(folder: Path, files: dict[str, bytes], weights: StoredWeights) -> int:
    names: dict[str, str] = json.loads(files[ADAPTER_NAMES])
    layered = {name.partition(".")[2]: name for name in weights.stored}
    missing = [name for name in names.values() if name not in layered]
    if missing:
        raise CheckpointError(f"the checkpoint has no tensor {missing[0]!r} of the adapter")
    data = safetensors_codec.encode({saved: weights.read(layered[name]) for saved, name in names.items()})
    (folder / "adapter_model.safetensors").write_bytes(data)
    _write_files(folder, files, leave_out=("config.json", "generation_config.json"))
    return len(names)


@dataclass(frozen=True)
class _Chunk:
    """Tensors of one layer, which are converted together to the names of a saved model."""

    sources: dict[str, str]
    """By name in the model: the name in the checkpoint."""
    targets: dict[str, tuple[torch.Size, torch.dtype]]
    """By name in the file: shape and type."""

    @property
    def nbytes(self) -> int:
        return sum(size.numel() * dtype.itemsize for size, dtype in self.targets.values())


def _write_model(folder: Path, files: dict[str, bytes], weights: StoredWeights) -> int:
    """Write the files of `save_pretrained`, one layer after another, so that no more than one is in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    _write_files(folder, files)
    model = _empty_model(folder)
    chunks = _split_into_chunks(model, json.loads(files[_NAMES])["aliases"], weights)
    shards = _split_into_shards(chunks)
    _delete_other_shards(folder, shards)
    storage = Storage(folder)
    for file_name, shard in shards.items():
        described = {name: what for chunk in shard for name, what in chunk.targets.items()}
        with storage.open_new(file_name) as opened:
            file = safetensors_codec.TensorFile(opened, described)
            for chunk in shard:
                tensors = {name: weights.read(source) for name, source in chunk.sources.items()}
                for name, value in revert_weight_conversion(model, tensors).items():
                    file.write(name, value)
    if len(shards) > 1:
        total = sum(chunk.nbytes for chunk in chunks)
        weight_map = {name: file for file, shard in shards.items() for chunk in shard for name in chunk.targets}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        storage.write("model.safetensors.index.json", json.dumps(index, indent=2).encode())
    return sum(len(chunk.targets) for chunk in chunks)


def _empty_model(folder: Path) -> Any:
    """The model of a config, without memory for its parameters."""
    import transformers
    from transformers.initialization import no_init_weights

    from culm.hf.hf_skeleton import parameters_on_meta

    config = transformers.AutoConfig.from_pretrained(folder)
    with no_init_weights(), parameters_on_meta():
        model = getattr(transformers, config.architectures[0])(config)
        model.tie_weights()
    return model


def _split_into_chunks(model: Any, aliases: list[list[str]], weights: StoredWeights) -> list[_Chunk]:
    """The tensors of each layer. If a conversion needs tensors of several layers, all of them are one chunk."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    sources = {name.partition(".")[2]: name for name in weights.stored}
    for group in aliases:
        stored = next((sources[name] for name in group if name in sources), None)
        if stored is not None:
            sources.update(dict.fromkeys(group, stored))
    known = model.state_dict()
    missing = sorted(known.keys() - sources.keys())
    if missing:
        raise CheckpointError(f"the checkpoint has no tensor {missing[0]!r} of {type(model).__name__}")
    described = weights.describe()
    empty = {
        name: torch.empty(described[sources[name]][0], dtype=described[sources[name]][1], device="meta")
        for name in known
        if name not in (model._keys_to_ignore_on_save or ())
    }
    empty = remove_tied_weights_from_state_dict(empty, model)

    def convert(names: list[str]) -> _Chunk:
        converted = revert_weight_conversion(model, {name: empty[name] for name in names})
        targets = {name: (value.shape, value.dtype) for name, value in converted.items()}
        return _Chunk({name: sources[name] for name in names}, targets)

    layers: dict[str, list[str]] = {}
    for name in empty:
        layers.setdefault(sources[name].partition(".")[0], []).append(name)
    whole, chunks = convert(list(empty)), [convert(names) for names in layers.values()]
    return chunks if {n: what for c in chunks for n, what in c.targets.items()} == whole.targets else [whole]


def _split_into_shards(chunks: list[_Chunk]) -> dict[str, list[_Chunk]]:
    """The chunks of each file, by its name."""
    shards: list[list[_Chunk]] = [[]]
    for chunk in chunks:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + chunk.nbytes > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(chunk)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def _delete_other_shards(folder: Path, shards: dict[str, list[_Chunk]]) -> None:
    """Delete the weights of an earlier export, which from_pretrained might read instead."""
    for path in (*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
        if path.name not in shards:
            path.unlink(missing_ok=True)


def _write_files(folder: Path, files: dict[str, bytes], leave_out: tuple[str, ...] = ()) -> None:
    for name, data in files.items():
        if not name.startswith("culm_") and name not in leave_out:
            (folder / name).write_bytes(data)
