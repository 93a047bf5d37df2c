"""Files with the parts of a graph. The process that starts the run writes them; servers read them at their start and
after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file

from culm.checkpoint.safetensors_codec import encode
from culm.gnn.graph.graph_partition import GhostExchange, GraphPart

if TYPE_CHECKING:
    from torch import Tensor

_PART_FIELDS = ("vertices", "indptr", "indices", "weights", "reverse", "numbers", "bounds")
_EXCHANGE_FIELDS = ("rows", "row_bounds", "edges", "edge_bounds")


def write_part(folder: Path, part: GraphPart, source: Tensor, labels: Tensor, roles: Tensor) -> None:
    """Write a part to one safetensors file."""
    tensors = {name: torch.as_tensor(np.ascontiguousarray(getattr(part, name))) for name in _PART_FIELDS}
    tensors |= {"source": source, "labels": labels, "roles": roles, "ghosts": torch.tensor([part.ghosts])}
    for peer, exchange in part.ghost_exchanges.items():
        tensors |= {f"{name}.{peer}": torch.as_tensor(getattr(exchange, name)) for name in _EXCHANGE_FIELDS}
        tensors[f"ghost_bounds.{peer}"] = torch.as_tensor(part.ghost_bounds[peer])
        tensors[f"received_bounds.{peer}"] = torch.as_tensor(part.edge_bounds[peer])
    _part_path(folder, part.server).write_bytes(encode(tensors))


def read_part(folder: Path, server: int) -> tuple[GraphPart, Tensor, Tensor, Tensor]:
    """Return the part, and the source rows, labels and roles of its vertices."""
    stored = load_file(_part_path(folder, server))
    peers = sorted(int(name.partition(".")[2]) for name in stored if name.startswith("ghost_bounds."))
    part = GraphPart(
        server=server,
        ghosts=int(stored["ghosts"][0]),
        ghost_exchanges={
            q: GhostExchange(**{name: stored[f"{name}.{q}"].numpy() for name in _EXCHANGE_FIELDS}) for q in peers
        },
        ghost_bounds={q: stored[f"ghost_bounds.{q}"].numpy() for q in peers},
        edge_bounds={q: stored[f"received_bounds.{q}"].numpy() for q in peers},
        **{name: stored[name].numpy() for name in _PART_FIELDS},
    )
    return part, stored["source"], stored["labels"], stored["roles"]


def _part_path(folder: Path, server: int) -> Path:
    return folder / f"part-{server}.safetensors"
