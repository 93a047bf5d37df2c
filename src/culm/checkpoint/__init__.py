"""Checkpoints: safetensors shards and a manifest, at a path or URL.

    storage              files by name, written atomically: a local folder or any fsspec URL
    safetensors_codec    tensors to bytes and back
    manifest             what one checkpoint consists of
    checkpoint_reader    the tensors of one checkpoint, read on demand
    checkpoint_catalog   all checkpoints of a run: write, commit, find the newest intact one, prune
    export               write one model.safetensors from a checkpoint
    dcp_reader           read by torch.distributed.checkpoint, and written as one of its folders

Everything here is synchronous. The runtime calls it from a thread, with a snapshot of the state. Tensors are named
"LAYER.NAME" ("0.weight") and "optimizer.LAYER.NAME.KEY" ("optimizer.0.weight.exp_avg"). Tied parameters are stored
under their first layer only. Optimizer values that are not tensors are scalars in the manifest. Nothing is ever
unpickled.
"""

from culm.checkpoint.checkpoint_catalog import CheckpointCatalog, NewestCheckpoint, ShardReceipt, VerifyLevel
from culm.checkpoint.checkpoint_reader import CheckpointReader
from culm.checkpoint.export import ExportReport, export, find_catalog
from culm.checkpoint.manifest import FileEntry, Manifest, Scalar
from culm.checkpoint.storage import Storage

__all__ = [
    "CheckpointCatalog",
    "CheckpointReader",
    "ExportReport",
    "FileEntry",
    "Manifest",
    "NewestCheckpoint",
    "Scalar",
    "ShardReceipt",
    "Storage",
    "VerifyLevel",
    "export",
    "find_catalog",
]
