"""Write one model.safetensors from a checkpoint: parameters and buffers, named as by torch.nn.Sequential(*layers)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.checkpoint.checkpoint_catalog import CheckpointCatalog, NewestCheckpoint
from culm.checkpoint.safetensors_codec import TensorFile
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from culm.checkpoint.manifest import Manifest

OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of optimizer state. Names of parameters and buffers begin with the number of a layer."""
_AVERAGE_SUFFIX = ".ema"
"""Ends the names of averaged weights."""
_RELEASE_BYTES = 1 << 24
"""Bytes that are read from a mapped file before it is opened again, which frees its pages."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, from which step, and which newer checkpoints were skipped, with the reasons."""

    path: str
    step: int
    tensors: int
    bytes: int
    rejected: tuple[tuple[int, str], ...]


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    overwrite: bool = False,
    averaged: bool = False,
) -> ExportReport:
    """Write the weights of the newest intact checkpoint (or of that step) to one file, atomically.

    `source` is a run folder or its checkpoints folder. Tied parameters are in the file under each of their names.
    `averaged`: write the averages of Job.ema instead of the weights. Raises UsageError if the target exists, unless
    `overwrite`, or if there are no averages. Tensors are read and written one by one.
    """
    path = os.fspath(target)
    place, name = _resolve_target(path, overwrite=overwrite)
    catalog = find_catalog(source)
    found = choose_checkpoint(catalog, step)
    weights = StoredWeights(catalog, found.manifest, averaged=averaged)
    described = weights.describe()
    with place.open_new(name) as file:
        written = TensorFile(file, described, {"format": "pt", "culm_step": str(found.manifest.step)})
        for tensor in described:
            written.write(tensor, weights.read(tensor))
    return ExportReport(path, found.manifest.step, len(described), written.size, found.rejected)


def find_catalog(source: str | os.PathLike[str]) -> CheckpointCatalog:
    """The checkpoints in a run folder, or in the checkpoints folder itself. Raises UsageError if none is committed."""
    root = os.fspath(source)
    for place in (root, f"{root.rstrip('/')}/checkpoints"):
        catalog = CheckpointCatalog(Storage(place))
        if catalog.steps():
            return catalog
    raise UsageError(f"{root} holds no committed checkpoint: name a run folder, or the checkpoints folder in one")


class StoredWeights:
    """Parameters and buffers of a checkpoint under all their names, read when they are needed."""

    def __init__(self, catalog: CheckpointCatalog, manifest: Manifest, *, averaged: bool = False) -> None:
        """`averaged`: trained parameters are their averages (Job.ema). Raises UsageError if the checkpoint has none."""
        self._reader, self._read_bytes = catalog.open(manifest), 0
        names = [name for name in sorted(manifest.weight_map) if not name.startswith(OPTIMIZER_PREFIX)]
        averages = {name for name in names if _average_name(name) in manifest.weight_map}
        if averaged and not averages:
            raise UsageError(
                f"the checkpoint of step {manifest.step} has no averaged weights: train with Job.ema, or leave --ema "
                "away"
            )
        self.stored = {name: _average_name(name) if averaged and name in averages else name for name in names}
        """By name: the name in the checkpoint. Tied parameters are stored once."""
        for group in manifest.facts.get("tied") or ():
            first = next((name for name in group if name in self.stored), None)
            if first is not None:
                self.stored.update(dict.fromkeys(group, self.stored[first]))
            elif manifest.facts.get("save_frozen", True):  # otherwise it is frozen, and left out on purpose
                raise CheckpointError(
                    f"the checkpoint of step {manifest.step} holds none of the tied {', '.join(group)}"
                )

    def describe(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of every tensor."""
        return {name: self._reader.describe(stored) for name, stored in self.stored.items()}

    def read(self, name: str) -> Tensor:
        """A tensor, in its own memory. Of a mapped file no more than some megabytes stay in memory."""
        value = self._reader.tensor(self.stored[name])
        self._read_bytes += value.nbytes
        if self._read_bytes > _RELEASE_BYTES and self._reader.is_local:
            self._reader.close()
            self._read_bytes = 0
        return value


def _resolve_target(path: str, *, overwrite: bool) -> tuple[Storage, str]:
    """The folder of the target, and the file name in it."""
    folder, slash, name = path.rpartition("/")
    if not name:
        raise UsageError(f"{path!r} names no file: add one, such as model.safetensors")
    place = Storage(folder or slash or ".")
    if place.exists(name) and not overwrite:
        raise UsageError(f"{path} exists: name another file, or allow it to be replaced with --overwrite")
    return place, name


def _average_name(name: str) -> str:
    """The name of the average of a parameter in a checkpoint."""
    return f"{OPTIMIZER_PREFIX}{name}{_AVERAGE_SUFFIX}"


def choose_checkpoint(catalog: CheckpointCatalog, step: int | None) -> NewestCheckpoint:
    """The intact checkpoint of a step; None: the newest one. Raises UsageError if there is none of that step."""
    if step is None:
        return catalog.newest()
    if step not in catalog.steps():
        known = ", ".join(map(str, catalog.steps()))
        raise UsageError(f"step {step} has no checkpoint in {catalog.storage.root}: choose one of {known}")
    return NewestCheckpoint(catalog.check(step), ())
