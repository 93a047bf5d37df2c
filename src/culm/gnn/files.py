"""Parts of a graph as files: written once by whoever starts the run, read by the servers, again after a loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file

from culm.checkpoint.shard import encode
from culm.gnn.partition import Exchange, Part

if TYPE_CHECKING:
    from torch import Tensor

_ARRAYS = ("vertices", "indptr", "indices", "weights", "reverse", "numbers", "bounds")
_EXCHANGE = ("rows", "row_bounds", "edges", "edge_bounds")


def write_part(folder: Path, part: Part, source: Tensor, labels: Tensor, roles: Tensor) -> None:
    """One safetensors file."""
    tensors = {name: torch.as_tensor(np.ascontiguousarray(getattr(part, name))) for name in _ARRAYS}
    tensors |= {"source": source, "labels": labels, "roles": roles, "ghosts": torch.tensor([part.ghosts])}
    for peer, exchange in part.sends.items():
        tensors |= {f"{name}.{peer}": torch.as_tensor(getattr(exchange, name)) for name in _EXCHANGE}
        tensors[f"ghost_bounds.{peer}"] = torch.as_tensor(part.ghost_bounds[peer])
        tensors[f"received_bounds.{peer}"] = torch.as_tensor(part.edge_bounds[peer])
    _path(folder, part.server).write_bytes(encode(tensors))


def read_part(folder: Path, server: int) -> tuple[Part, Tensor, Tensor, Tensor]:
    """The part, and source rows, labels and roles of its vertices."""
    stored = load_file(_path(folder, server))
    peers = sorted(int(name.partition(".")[2]) for name in stored if name.startswith("ghost_bounds."))
    part = Part(
        server=server,
        ghosts=int(stored["ghosts"][0]),
        sends={q: Exchange(**{name: stored[f"{name}.{q}"].numpy() for name in _EXCHANGE}) for q in peers},
        ghost_bounds={q: stored[f"ghost_bounds.{q}"].numpy() for q in peers},
        edge_bounds={q: stored[f"received_bounds.{q}"].numpy() for q in peers},
        **{name: stored[name].numpy() for name in _ARRAYS},
    )
    return part, stored["source"], stored["labels"], stored["roles"]


def _path(folder: Path, server: int) -> Path:
    return folder / f"part-{server}.safetensors"
