"""Checkpoints: safetensors shards and a manifest, to a path or URL.

    storage    files by name, written atomically: a local folder or any fsspec URL
    shard      tensors to bytes and back
    manifest   what one checkpoint consists of
    reader     the tensors of one checkpoint, read when asked for
    catalog    all checkpoints of a run: write, commit, find the newest good one, prune
    export     one model.safetensors out of a checkpoint

Everything here is synchronous; the runtime calls it from a thread, with a snapshot of the state.
Tensors are named "LAYER.NAME" ("0.weight") and "optimizer.LAYER.NAME.KEY" ("optimizer.0.weight.exp_avg"); tied
parameters stand under their first layer only. Optimizer values that are no tensors are scalars in the manifest.
Nothing is ever unpickled.
"""

from culm.checkpoint.catalog import Catalog, Found, ShardReceipt, Verify
from culm.checkpoint.export import ExportReport, export, locate
from culm.checkpoint.manifest import FileEntry, Manifest, Scalar
from culm.checkpoint.reader import Reader
from culm.checkpoint.storage import Storage

__all__ = [
    "Catalog",
    "ExportReport",
    "FileEntry",
    "Found",
    "Manifest",
    "Reader",
    "Scalar",
    "ShardReceipt",
    "Storage",
    "Verify",
    "export",
    "locate",
]
