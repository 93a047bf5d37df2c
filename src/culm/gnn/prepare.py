"""Before anything is started: the graph is cut, its parts and the first weights are written where servers find them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from culm.checkpoint.shard import encode
from culm.checkpoint.storage import Storage
from culm.gnn.files import write_part
from culm.gnn.memory import refuse_what_does_not_fit
from culm.gnn.parameters import INITIAL
from culm.gnn.partition import cut
from culm.gnn.program import first_gather, gathered_width, orders, sent_width
from culm.gnn.sparse import Adjacency

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.board import Mode
    from culm.gnn.graph import Graph
    from culm.gnn.model import Model, Weights
    from culm.gnn.partition import Array
    from culm.gnn.program import Place

_ALONE = 1 << 17
"""Edges of a graph below which one thread is enough for a server."""
_FEW_BYTES = 1 << 20
_COPIES = 5
"""Of the weights, at least: two versions of a parameter server, what Adam knows of them, and those of a worker."""
_LARGEST = 1 << 16
"""Vertices of an interval at most: a task then takes tens of milliseconds."""


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def default_intervals(vertices: int, servers: int, workers: int, mode: Mode) -> int:
    """Enough for every worker to have one, two where steps overlap, and none too large."""
    each = -(-workers // servers) * (1 if mode == "sync" else 2)
    return max(1, each, -(-vertices // (servers * _LARGEST)))


def default_threads(edges: int, servers: int) -> int:
    """Of a graph server: its share of the cores or, where there is so little to do that threads would take longer to
    meet than to work, one."""
    return 1 if edges < _ALONE else max(1, cores() // servers)


def edge_place(graph: Graph, model: Model, pieces: int) -> Place:
    """Who applies the edges of an attention: where an interval has few, the way to a worker costs more than that."""
    return "server" if (graph.edges + graph.vertices) / pieces * model.heads * 4 < _FEW_BYTES else "worker"


def check_memory(graph: Graph, model: Model) -> None:
    """Refuse a graph whose tables would not fit beside it. Raises UsageError."""
    width = graph.width + sum(
        2 * (sent_width(model, l) + gathered_width(model, l)) for l in range(first_gather(model), model.layers)
    )
    edges = (graph.edges + graph.vertices) * (
        12 + (model.heads * (24 * model.layers + 16) if model.kind == "gat" else 0)
    )
    weights = sum(math.prod(shape) for layer in range(model.layers) for shape in model.shapes(layer).values())
    refuse_what_does_not_fit(
        graph.vertices * width * 4 + edges + weights * 4 * _COPIES,
        f"training {model.kind} on {graph.name} ({graph.vertices} vertices, {graph.edges} edges)",
    )


def write_parts(graph: Graph, model: Model, owner: Array, intervals: int, folder: Path) -> int:
    """Cut the graph and write a part for each server; returns how many intervals each has."""
    parts = cut(graph, owner, intervals, attention=model.kind == "gat")
    source = source_rows(graph, model)
    labels, roles = torch.from_numpy(graph.labels), torch.from_numpy(graph.roles)
    for part in parts:
        own = slice(None) if len(parts) == 1 else torch.from_numpy(part.vertices)
        write_part(folder, part, source[own], labels[own], roles[own])
    return parts[0].intervals


def source_rows(graph: Graph, model: Model) -> Tensor:
    """What the first dense task reads: the features, or A.X where that is cached."""
    features = torch.from_numpy(graph.features)
    if orders(model)[0] != "cached":
        return features
    root = torch.from_numpy(1.0 / np.sqrt(graph.degrees + 1.0)).float().unsqueeze(1)
    scaled = features * root
    gathered = torch.empty_like(features)
    pointers, indices = torch.from_numpy(graph.indptr.astype(np.int32)), torch.from_numpy(graph.indices)
    Adjacency(pointers, indices, torch.ones(graph.edges), 0, graph.vertices, graph.vertices).gather(scaled, gathered)
    return gathered.add_(scaled).mul_(root)


def write_initial(weights: dict[int, Weights], checkpoints: str) -> None:
    """Version 0, which a run can always go back to."""
    tensors = {f"{layer}.{name}": t for layer, own in weights.items() for name, t in own.items()}
    Storage(checkpoints).write(INITIAL, encode(tensors))
