"""torch.distributed.checkpoint reads culm's checkpoints, and a checkpoint is written as one of DCP.

`DcpReader` is a storage reader of DCP: `dcp.load(state_dict, storage_reader=DcpReader("runs/a"))` reads the tensors of
the state dict that the checkpoint has under the same names, each rank only what it holds, resharded as DCP does.
Optimizer state is named as in the checkpoint: "optimizer.0.weight.exp_avg".
"""

from __future__ import annotations

import io
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from culm.checkpoint.checkpoint_catalog import CheckpointCatalog
from culm.checkpoint.export import ExportReport, StoredWeights, choose_checkpoint, find_catalog
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from culm.checkpoint.manifest import Manifest


class DcpReader(StorageReader):
    """Reads one checkpoint of culm for torch.distributed.checkpoint.

    `source` is a run folder, or the checkpoints folder in one; `step` a step with a checkpoint, or None for the newest
    intact one. Tied parameters have all their names. Raises UsageError if there is no such checkpoint.
    """

    def __init__(self, source: str | os.PathLike[str], step: int | None = None) -> None:
        self._catalog = find_catalog(source)
        self._manifest = choose_checkpoint(self._catalog, step).manifest
        self._reader = self._catalog.open(self._manifest, verify=True)
        self._stored_names = _stored_names(self._manifest)

    @property
    def step(self) -> int:
        """Number of steps that were completed before the checkpoint."""
        return self._manifest.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by DCP before it reads. The checkpoint is that of the constructor."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 the signature of the parent
        """Names, shapes and types of all tensors. Scalars of the optimizer are bytes, as DCP stores plain objects."""
        found: dict[str, Any] = {}
        for name, stored in self._stored_names.items():
            size, dtype = self._reader.describe(stored)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            found[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
        found |= {name: BytesStorageMetadata() for name in self._manifest.scalars}
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: files are opened when a tensor is read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of this rank, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of a plan. Raises CheckpointError for a damaged file."""
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(self._manifest.scalars[name], stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
                continue
            part = self._reader.tensor(self._stored_names[name])
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(part.shape)} in the checkpoint and {tuple(target.shape)} in the state "
                    "dict: load it into the model that it was made with"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path has checkpoints of culm."""
        return any(
            CheckpointCatalog(Storage(place)).steps()
            for place in (os.fspath(checkpoint_id), f"{os.fspath(checkpoint_id)}/checkpoints")
        )


def _stored_names(manifest: Manifest) -> dict[str, str]:
    """By name: the name that a tensor is stored under. A tied parameter is stored once."""
    names = {name: name for name in manifest.weight_map}
    for group in manifest.facts.get("tied") or ():
        stored = next((name for name in group if name in manifest.weight_map), None)
        names |= {name: stored for name in group if stored is not None}
    return names


def export_dcp(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, step: int | None = None, averaged: bool = False
) -> ExportReport:
    """Write a checkpoint as a folder of torch.distributed.checkpoint, with optimizer state and scalars.

    Tensors have the names of the checkpoint, tied parameters all of theirs. `averaged`: the weights are the averages of
    Job.ema. Raises UsageError if the target exists and is not an empty folder. Tensors are read and written one by one.
    """
    path = os.fspath(target)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):  # noqa: PTH110, PTH112, PTH208
        raise UsageError(f"{path} exists and is not an empty folder: name another one")
    catalog = find_catalog(source)
    found = choose_checkpoint(catalog, step)
    weights = StoredWeights(catalog, found.manifest, averaged=averaged)
    weights.stored.update((name, name) for name in found.manifest.weight_map if name not in weights.stored)
    described = {
        name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in weights.describe().items()
    }
    planner = _StreamingPlanner(weights)
    writer = FileSystemWriter(path, single_file_per_rank=False)  # it keeps the tensors of a file until that is complete
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({**described, **found.manifest.scalars}, storage_writer=writer, planner=planner, no_dist=True)
    size = sum(tensor.nbytes for tensor in described.values())
    return ExportReport(path, found.manifest.step, len(described) + len(found.manifest.scalars), size, found.rejected)


class _StreamingPlanner(DefaultSavePlanner):
    """Reads a tensor when it is written. The state dict has its description, on the meta device."""

    def __init__(self, weights: StoredWeights) -> None:
        super().__init__()
        self._weights = weights

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._weights.read(index.fqn) if isinstance(found, torch.Tensor) else found
