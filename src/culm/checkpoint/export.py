"""One model.safetensors out of a checkpoint: parameters and buffers, as torch.nn.Sequential(*layers) names them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.checkpoint import shard
from culm.checkpoint.catalog import Catalog, Found
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from culm.checkpoint.manifest import Manifest

OPTIMIZER = "optimizer."
"""What the names of optimizer state begin with; those of parameters and buffers begin with the number of a layer."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, from which step, and which newer checkpoints were passed over for what reason."""

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
) -> ExportReport:
    """Write the weights of the newest good checkpoint (or of that step) to one file, atomically.

    `source` is a run folder or its checkpoints folder. Tied parameters stand in the file under each of their names.
    An existing target is refused unless `overwrite`. The whole model passes through memory.
    """
    path = os.fspath(target)
    place, name = _target(path, overwrite=overwrite)
    catalog = locate(source)
    found = _find(catalog, step)
    tensors = weights(catalog, found.manifest)
    data = shard.encode(tensors, {"format": "pt", "culm_step": str(found.manifest.step)})
    place.write(name, data)
    return ExportReport(path, found.manifest.step, len(tensors), len(data), found.rejected)


def locate(source: str | os.PathLike[str]) -> Catalog:
    """The checkpoints in a run folder, or in the checkpoints folder itself; a UsageError if none is committed."""
    root = os.fspath(source)
    for place in (root, f"{root.rstrip('/')}/checkpoints"):
        catalog = Catalog(Storage(place))
        if catalog.steps():
            return catalog
    raise UsageError(f"{root} holds no committed checkpoint: name a run folder, or the checkpoints folder in one")


def weights(catalog: Catalog, manifest: Manifest) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint under all their names: tied ones share their memory."""
    with catalog.open(manifest) as reader:
        tensors = {name: reader.tensor(name) for name in reader.names() if not name.startswith(OPTIMIZER)}
    for group in manifest.facts.get("tied") or ():
        stored = next((name for name in group if name in tensors), None)
        if stored is None:
            raise CheckpointError(f"the checkpoint of step {manifest.step} holds none of the tied {', '.join(group)}")
        tensors.update(dict.fromkeys(group, tensors[stored]))
    return tensors


def _target(path: str, *, overwrite: bool) -> tuple[Storage, str]:
    """The folder, and the name in it that may be written."""
    folder, slash, name = path.rpartition("/")
    if not name:
        raise UsageError(f"{path!r} names no file: add one, such as model.safetensors")
    place = Storage(folder or slash or ".")
    if place.exists(name) and not overwrite:
        raise UsageError(f"{path} exists: name another file, or allow it to be replaced with --overwrite")
    return place, name


def _find(catalog: Catalog, step: int | None) -> Found:
    if step is None:
        return catalog.newest()
    if step not in catalog.steps():
        known = ", ".join(map(str, catalog.steps()))
        raise UsageError(f"step {step} has no checkpoint in {catalog.storage.root}: choose one of {known}")
    return Found(catalog.check(step), ())
