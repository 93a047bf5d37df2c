"""A server's part of the graph and its tables, and the steps computed on them. No sockets, no clocks.

Tables by name (l is a layer; rows are own vertices or edges; T and D also have rows for the ghosts):

    X      features, or A.X if that is cached         T l    rows scattered forward
    G l    gathered rows                              D l    gradients of gathered rows, scattered backward
    U l    gathered gradients of the T rows           S l    raw attention scores of edges
    A l    attention and gradients of scores, of own edges and of edges received from peers
    B l    gradients of attention                     numbers    global numbers of edges, for attention dropout

All tables but T and D are in shared memory, which local workers map. The inputs of a task are slices of these tables.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from culm.gnn.graph.adjacency import Adjacency
from culm.gnn.graph.csr_graph import sorted_unique
from culm.gnn.graph.partition_files import read_part
from culm.gnn.model.pass_steps import FEATURE_TABLE, PassStep, first_gathered_layer, gathered_width, sent_width
from culm.gnn.transport.shared_tables import SharedTables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from culm.gnn.graph.graph_partition import GraphPart
    from culm.gnn.model.gnn_model import GnnModel
    from culm.gnn.scheduler.scatter_log import IntervalId
    from culm.gnn.server.store_records import GnnRunConfig

_load_lock = threading.Lock()


class TableSlice(NamedTuple):
    """A range of rows of a table."""

    table: str
    start: int
    stop: int


class GraphShard:
    """The tables of one graph server and the steps that it runs on them."""

    def __init__(self, part: GraphPart, model: GnnModel, features: Tensor, labels: Tensor, roles: Tensor) -> None:
        self.part, self._model = part, model
        self._first_gathered_layer = first_gathered_layer(model)
        self.shared_tables = SharedTables(_shared_table_shapes(part, model, features.shape[1]))
        self.tables = dict(self.shared_tables.tables)
        for name, values in (
            (FEATURE_TABLE, features),
            ("labels", labels),
            ("roles", roles),
            ("vertices", part.vertices),
        ):
            self.tables[name].copy_(torch.as_tensor(values))
        self.tables["indptr"].copy_(torch.as_tensor(part.indptr))
        if model.attention_dropout:
            self.tables["numbers"].copy_(torch.as_tensor(part.numbers))
        self._row_count = part.vertex_count + part.ghosts
        for layer in range(self._first_gathered_layer, model.layers):
            self.tables[f"T{layer}"] = torch.zeros(self._row_count, sent_width(model, layer))
            self.tables[f"D{layer}"] = torch.zeros(self._row_count, gathered_width(model, layer))
        pointers, indices, weights = map(torch.as_tensor, (part.indptr, part.indices, part.weights))
        self._adjacency = [
            Adjacency(pointers, indices, weights, int(a), int(b), self._row_count)
            for a, b in zip(part.bounds, part.bounds[1:], strict=False)
        ]
        self._reverse = torch.as_tensor(part.reverse)
        self._scattered_rows = {q: torch.as_tensor(e.rows) for q, e in part.ghost_exchanges.items()}
        self._scattered_edges = {q: torch.as_tensor(e.edges) for q, e in part.ghost_exchanges.items()}

    @property
    def intervals(self) -> int:
        return self.part.intervals

    def vertex_slice(self, interval: int) -> slice:
        """Return the range of own vertices of an interval."""
        return slice(int(self.part.bounds[interval]), int(self.part.bounds[interval + 1]))

    def gather_sources(self) -> list[list[IntervalId]]:
        """Return, for each interval, the intervals of any server that it gathers from."""
        ends = [(self.part.server, i, int(b)) for i, b in enumerate(self.part.bounds[1:])]
        for peer, bounds in sorted(self.part.ghost_bounds.items(), key=lambda item: int(item[1][0])):
            ends += [(peer, i, int(b)) for i, b in enumerate(bounds[1:])]
        stops = np.array([stop for *_, stop in ends])
        sources = []
        for adjacency in self._adjacency:
            used = np.unique(np.searchsorted(stops, sorted_unique(adjacency.columns.numpy().copy()), side="right"))
            sources.append([(ends[i][0], ends[i][1]) for i in used])
        return sources

    # Tasks of workers.

    def task_inputs(self, step: PassStep, interval: int, *, forward_kept: bool) -> list[TableSlice]:
        """Return the slices that a worker reads for a task. With `forward_kept` the worker has the forward cache and
        needs fewer."""
        rows = self.vertex_slice(interval)
        edges = self._adjacency[interval].edges

        def rows_of(table: str, piece: slice = rows) -> TableSlice:
            return TableSlice(table, piece.start, piece.stop)

        if step.kind == "AE":
            offsets = TableSlice("indptr", rows.start, rows.stop + 1)
            attention_slices = (
                [rows_of(f"A{step.layer}", edges), rows_of(f"B{step.layer}", edges)] if step.backward else []
            )
            edge_numbers = [rows_of("numbers", edges)] if self._model.attention_dropout else []
            return [offsets, rows_of(f"S{step.layer}", edges), *attention_slices, *edge_numbers]
        source = rows_of(FEATURE_TABLE if step.layer == self._first_gathered_layer else f"G{step.layer - 1}")
        if step.backward:
            return [rows_of("vertices"), rows_of(f"U{step.layer}")] + ([] if forward_kept else [source])
        last = [rows_of("labels"), rows_of("roles")] if step.layer == self._model.layers else []
        return [rows_of("vertices"), source, *last]

    def prepare_edge_inputs(self, step: PassStep, interval: int) -> None:
        """Fill the tables of edge values that AE and ∇AE read. Does nothing for other steps."""
        if step.kind != "AE":
            return
        adjacency, layer = self._adjacency[interval], step.layer
        rows, heads, wide = self.vertex_slice(interval), self._model.heads, gathered_width(self._model, layer)
        table = self.tables[f"T{layer}"]
        if step.backward:
            self.tables[f"B{layer}"][adjacency.edges] = adjacency.edge_dot_products(
                self.tables[f"D{layer}"][rows], table[:, :wide], heads
            )
            return
        sizes = adjacency.offsets.diff()
        scores = table[:, wide : wide + heads][adjacency.columns.long()]
        scores += table[rows, wide + heads :].repeat_interleave(sizes, 0)
        self.tables[f"S{layer}"][adjacency.edges] = scores

    def store_result(self, step: PassStep, interval: int, rows: Tensor | None) -> None:
        """Store the rows that a dense task returned."""
        if rows is None:
            return
        if step.kind == "AE":
            heads, edges = self._model.heads, self._adjacency[interval].edges
            columns = slice(heads, 2 * heads) if step.backward else slice(0, heads)
            self.tables[f"A{step.layer}"][edges, columns] = rows
            return
        ends = step.backward or step.layer == self._model.layers
        table = f"D{step.layer - 1}" if ends else f"T{step.layer}"
        if table in self.tables:
            self.tables[table][self.vertex_slice(interval)] = rows

    # Steps of the server.

    def rows_to_scatter(self, step: PassStep, interval: int) -> dict[int, list[Tensor]]:
        """SC: return the tensors to send to each peer."""
        table = self.tables[f"{'D' if step.backward else 'T'}{step.layer}"]
        tensors = {}
        for peer, exchange in self.part.ghost_exchanges.items():
            piece = slice(int(exchange.row_bounds[interval]), int(exchange.row_bounds[interval + 1]))
            tensors[peer] = [table[self._scattered_rows[peer][piece]]]
            if step.backward and self._model.kind == "gat":
                edges = slice(int(exchange.edge_bounds[interval]), int(exchange.edge_bounds[interval + 1]))
                tensors[peer].append(self.tables[f"A{step.layer}"][self._scattered_edges[peer][edges]])
        return tensors

    def store_scattered_rows(
        self, peer: int, layer: int, backward: bool, interval: int, tensors: Sequence[Tensor]
    ) -> None:
        """Store the rows that a peer scattered."""
        bounds = self.part.ghost_bounds[peer]
        self.tables[f"{'D' if backward else 'T'}{layer}"][int(bounds[interval]) : int(bounds[interval + 1])] = tensors[
            0
        ]
        if len(tensors) > 1:
            edges = self.part.edge_bounds[peer]
            self.tables[f"A{layer}"][int(edges[interval]) : int(edges[interval + 1])] = tensors[1]

    def gather(self, step: PassStep, interval: int) -> None:
        """GA and ∇GA."""
        adjacency, rows, layer = self._adjacency[interval], self.vertex_slice(interval), step.layer
        source, target = ("D", "U") if step.backward else ("T", "G")
        table, out = self.tables[f"{source}{layer}"], self.tables[f"{target}{layer}"][rows]
        if self._model.kind == "gcn":
            adjacency.gather(table, out)
            return
        heads, wide = self._model.heads, gathered_width(self._model, layer)
        attention = self.tables[f"A{layer}"]
        if not step.backward:
            adjacency.gather_weighted(attention[adjacency.edges, :heads], table[:, :wide], out)
            return
        opposite = attention[self._reverse[adjacency.edges]]
        adjacency.gather_weighted(opposite[:, :heads], table, out[:, :wide])
        out[:, wide : wide + heads] = adjacency.sum_edges(opposite[:, heads:].contiguous())
        out[:, wide + heads :] = adjacency.sum_edges(attention[adjacency.edges, heads:].contiguous())

    def read_slices(self, slices: Sequence[TableSlice]) -> list[Tensor]:
        """Return the rows of the slices."""
        return [self.tables[table][start:stop] for table, start, stop in slices]


def _shared_table_shapes(part: GraphPart, model: GnnModel, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of the tables in shared memory."""
    size, edges, heads = part.vertex_count, len(part.indices), model.heads
    received = sum(int(bounds[-1] - bounds[0]) for bounds in part.edge_bounds.values())
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        FEATURE_TABLE: ("float32", (size, width)),
        "labels": ("int64", (size,)),
        "roles": ("uint8", (size,)),
        "vertices": ("int64", (size,)),
        "indptr": ("int64", (size + 1,)),
    }
    if model.attention_dropout:
        shapes["numbers"] = ("int64", (edges,))
    for layer in range(first_gathered_layer(model), model.layers):
        shapes[f"G{layer}"] = ("float32", (size, gathered_width(model, layer)))
        shapes[f"U{layer}"] = ("float32", (size, sent_width(model, layer)))
        if model.kind == "gat":
            shapes[f"S{layer}"] = ("float32", (edges, heads))
            shapes[f"A{layer}"] = ("float32", (edges + received, 2 * heads))
            shapes[f"B{layer}"] = ("float32", (edges, heads))
    return shapes


def load_shard(config: GnnRunConfig, server: int) -> tuple[GraphShard, list[list[IntervalId]]]:
    """Return the shard and the gather sources of its intervals. Loads it once per process: a later generation gets
    the same tables. Thread-safe."""
    with _load_lock:
        return _load_shard_once(config, server)


@lru_cache(maxsize=1)
def _load_shard_once(config: GnnRunConfig, server: int) -> tuple[GraphShard, list[list[IntervalId]]]:
    part, source, labels, roles = read_part(Path(config.parts_folder), server)
    shard = GraphShard(part, config.model, source, labels, roles)
    return shard, shard.gather_sources()
