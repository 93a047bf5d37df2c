"""Preparation of a run: defaults that depend on the graph, the memory check, and the files that servers read at
their start (graph parts and initial weights)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from culm.checkpoint.safetensors_codec import encode
from culm.checkpoint.storage import Storage
from culm.gnn.graph import index_limits
from culm.gnn.graph.adjacency import gather_whole_graph
from culm.gnn.graph.graph_partition import build_parts
from culm.gnn.graph.memory_check import check_fits_in_memory
from culm.gnn.graph.partition_files import write_part
from culm.gnn.model.pass_steps import first_gathered_layer, gathered_width, multiply_orders, sent_width
from culm.gnn.server.parameter_server import INITIAL_WEIGHTS_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.graph.csr_graph import Graph
    from culm.gnn.graph.graph_partition import Array
    from culm.gnn.model.gnn_model import GnnModel, LayerWeights
    from culm.gnn.model.pass_steps import Place
    from culm.gnn.scheduler.interval_scheduler import Mode

_SINGLE_THREAD_EDGES = 1 << 17
"""A server uses one thread for graphs with fewer edges than this."""
_SMALL_EDGE_BYTES = 1 << 20
_WEIGHT_COPIES = 5
"""Copies of the weights in memory, at least: two versions on the parameter server, Adam's two moments, one copy on a
worker."""
_MAX_INTERVAL_VERTICES = 1 << 16
"""Maximum vertices of an interval. A task of this size takes tens of milliseconds."""


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def default_intervals(graph: Graph, servers: int, workers: int, mode: Mode) -> int:
    """Return the intervals per server: one per worker, two where steps overlap, and more if an interval would be too
    large."""
    per_server = -(-workers // servers) * (1 if mode == "sync" else 2)
    by_vertices = -(-graph.vertices // (servers * _MAX_INTERVAL_VERTICES))
    # Half of the limit: servers and intervals have about equal numbers of edges, not exactly.
    by_edges = -(-2 * (graph.edges + graph.vertices) // (servers * index_limits.MAX_INDEX))
    return max(1, per_server, by_vertices, by_edges)


def default_threads(edges: int, servers: int) -> int:
    """Return the threads of a graph server: its share of the cores. A small graph gets one thread, since
    synchronizing several would take longer than the work."""
    return 1 if edges < _SINGLE_THREAD_EDGES else max(1, available_cores() // servers)


def choose_edge_place(graph: Graph, model: GnnModel, intervals: int) -> Place:
    """Return where apply edge runs. With few edges per interval, sending them to a worker costs more than computing
    them."""
    return "server" if (graph.edges + graph.vertices) / intervals * model.heads * 4 < _SMALL_EDGE_BYTES else "worker"


def check_memory(graph: Graph, model: GnnModel) -> None:
    """Raise UsageError if the graph and its tables do not fit into memory."""
    width = graph.width + sum(
        2 * (sent_width(model, l) + gathered_width(model, l)) for l in range(first_gathered_layer(model), model.layers)
    )
    edges = (graph.edges + graph.vertices) * (
        12 + (model.heads * (24 * model.layers + 16) if model.kind == "gat" else 0)
    )
    weights = sum(math.prod(shape) for layer in range(model.layers) for shape in model.parameter_shapes(layer).values())
    check_fits_in_memory(
        graph.vertices * width * 4 + edges + weights * 4 * _WEIGHT_COPIES,
        f"training {model.kind} on {graph.name} ({graph.vertices} vertices, {graph.edges} edges)",
    )


def write_parts(graph: Graph, model: GnnModel, owner: Array, intervals: int, folder: Path) -> int:
    """Build the parts of the graph, write one file per server, and return the number of intervals per server.

    Raises UsageError if an interval is too large for a product.
    """
    parts = build_parts(graph, owner, intervals, attention=model.kind == "gat")
    index_limits.check_interval_sizes(parts, _widest_row(model))
    source = first_layer_inputs(graph, model)
    labels, roles = torch.from_numpy(graph.labels), torch.from_numpy(graph.roles)
    for part in parts:
        rows = slice(None) if len(parts) == 1 else torch.from_numpy(part.vertices)
        write_part(folder, part, source[rows], labels[rows], roles[rows])
    return parts[0].intervals


def first_layer_inputs(graph: Graph, model: GnnModel) -> Tensor:
    """Return the rows that the first dense task reads: the features, or A.X where that product is cached."""
    features = torch.from_numpy(graph.features)
    if multiply_orders(model)[0] != "cached":
        return features
    root = torch.from_numpy(1.0 / np.sqrt(graph.degrees + 1.0)).float().unsqueeze(1)
    scaled = features * root
    return gather_whole_graph(graph.indptr, graph.indices, scaled).add_(scaled).mul_(root)


def _widest_row(model: GnnModel) -> int:
    """Return the columns of the widest table that a task reads or writes."""
    return max(*model.widths, *(sent_width(model, layer) for layer in range(model.layers)))


def write_initial_weights(weights: dict[int, LayerWeights], checkpoints: str) -> None:
    """Write the initial weights as version 0, the version that a run can always restart from."""
    tensors = {f"{layer}.{name}": t for layer, layer_weights in weights.items() for name, t in layer_weights.items()}
    Storage(checkpoints).write(INITIAL_WEIGHTS_FILE, encode(tensors))
