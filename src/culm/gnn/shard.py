"""A server's share of the graph and what is computed on it. No sockets, no clocks: the board says what, this does it.

Tables, by name (l is a layer, rows are own vertices or edges; T and D have the ghosts behind them):

    X      features, or A.X where that is cached      T l    rows that were sent forward
    G l    gathered rows                              D l    gradients of gathered rows, sent back
    U l    gradients of what was sent, gathered       S l    raw attention scores of edges
    A l    attention and gradients of scores, of own edges and of those that peers sent
    B l    gradients of attention                     numbers    of edges, where chance drops attention

All but T and D lie in an arena that local workers map: a task names slices of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from culm.gnn.arena import Arena
from culm.gnn.graph import once
from culm.gnn.program import FEATURES, Step, first_gather, gathered_width, sent_width
from culm.gnn.sparse import Adjacency

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from culm.gnn.feeds import Feed
    from culm.gnn.model import Model
    from culm.gnn.partition import Part


class Slice(NamedTuple):
    """Rows of a table."""

    table: str
    start: int
    stop: int


class Shard:
    """The tables of one server, and the steps that it runs on them."""

    def __init__(self, part: Part, model: Model, source: Tensor, labels: Tensor, roles: Tensor) -> None:
        self.part, self._model = part, model
        self._first = first_gather(model)
        self.arena = Arena(_shapes(part, model, source.shape[1]))
        self.tables = dict(self.arena.tables)
        for name, given in ((FEATURES, source), ("labels", labels), ("roles", roles), ("vertices", part.vertices)):
            self.tables[name].copy_(torch.as_tensor(given))
        self.tables["indptr"].copy_(torch.as_tensor(part.indptr))
        if model.attention_dropout:
            self.tables["numbers"].copy_(torch.as_tensor(part.numbers))
        self._seen = part.size + part.ghosts
        for layer in range(self._first, model.layers):
            self.tables[f"T{layer}"] = torch.zeros(self._seen, sent_width(model, layer))
            self.tables[f"D{layer}"] = torch.zeros(self._seen, gathered_width(model, layer))
        pointers, indices, weights = map(torch.as_tensor, (part.indptr, part.indices, part.weights))
        self._adjacency = [
            Adjacency(pointers, indices, weights, int(a), int(b), self._seen)
            for a, b in zip(part.bounds, part.bounds[1:], strict=False)
        ]
        self._reverse = torch.as_tensor(part.reverse)
        self._rows = {q: torch.as_tensor(e.rows) for q, e in part.sends.items()}
        self._edges = {q: torch.as_tensor(e.edges) for q, e in part.sends.items()}

    @property
    def intervals(self) -> int:
        return self.part.intervals

    def span(self, interval: int) -> slice:
        """Own vertices of an interval."""
        return slice(int(self.part.bounds[interval]), int(self.part.bounds[interval + 1]))

    def feeds(self) -> list[list[Feed]]:
        """For each interval: those of any server that it gathers from."""
        ends = [(self.part.server, i, int(b)) for i, b in enumerate(self.part.bounds[1:])]
        for peer, bounds in sorted(self.part.ghost_bounds.items(), key=lambda item: int(item[1][0])):
            ends += [(peer, i, int(b)) for i, b in enumerate(bounds[1:])]
        stops = np.array([stop for *_, stop in ends])
        found = []
        for adjacency in self._adjacency:
            used = np.unique(np.searchsorted(stops, once(adjacency.columns.numpy().copy()), side="right"))
            found.append([(ends[i][0], ends[i][1]) for i in used])
        return found

    # Tasks for workers.

    def inputs(self, step: Step, interval: int, *, kept: bool) -> list[Slice]:
        """What a worker reads for a task; with `kept` it still has what its forward left, and needs less."""
        rows = self.span(interval)
        edges = self._adjacency[interval].edges

        def own(table: str, piece: slice = rows) -> Slice:
            return Slice(table, piece.start, piece.stop)

        if step.kind == "AE":
            offsets = Slice("indptr", rows.start, rows.stop + 1)
            back = [own(f"A{step.layer}", edges), own(f"B{step.layer}", edges)] if step.back else []
            chance = [own("numbers", edges)] if self._model.attention_dropout else []
            return [offsets, own(f"S{step.layer}", edges), *back, *chance]
        source = own(FEATURES if step.layer == self._first else f"G{step.layer - 1}")
        if step.back:
            return [own("vertices"), own(f"U{step.layer}")] + ([] if kept else [source])
        last = [own("labels"), own("roles")] if step.layer == self._model.layers else []
        return [own("vertices"), source, *last]

    def prepare(self, step: Step, interval: int) -> None:
        """What has to be looked up along the edges before a worker can apply them."""
        if step.kind != "AE":
            return
        adjacency, layer = self._adjacency[interval], step.layer
        rows, heads, wide = self.span(interval), self._model.heads, gathered_width(self._model, layer)
        table = self.tables[f"T{layer}"]
        if step.back:
            self.tables[f"B{layer}"][adjacency.edges] = adjacency.dot(
                self.tables[f"D{layer}"][rows], table[:, :wide], heads
            )
            return
        sizes = adjacency.offsets.diff()
        scores = table[:, wide : wide + heads][adjacency.columns.long()]
        scores += table[rows, wide + heads :].repeat_interleave(sizes, 0)
        self.tables[f"S{layer}"][adjacency.edges] = scores

    def take(self, step: Step, interval: int, rows: Tensor | None) -> None:
        """Put the rows that a worker made where they belong."""
        if rows is None:
            return
        if step.kind == "AE":
            heads, edges = self._model.heads, self._adjacency[interval].edges
            columns = slice(heads, 2 * heads) if step.back else slice(0, heads)
            self.tables[f"A{step.layer}"][edges, columns] = rows
            return
        ends = step.back or step.layer == self._model.layers
        table = f"D{step.layer - 1}" if ends else f"T{step.layer}"
        if table in self.tables:
            self.tables[table][self.span(interval)] = rows

    # Steps of the server itself.

    def outgoing(self, step: Step, interval: int) -> dict[int, list[Tensor]]:
        """SC: what each peer gets."""
        table = self.tables[f"{'D' if step.back else 'T'}{step.layer}"]
        found = {}
        for peer, exchange in self.part.sends.items():
            piece = slice(int(exchange.row_bounds[interval]), int(exchange.row_bounds[interval + 1]))
            found[peer] = [table[self._rows[peer][piece]]]
            if step.back and self._model.kind == "gat":
                edges = slice(int(exchange.edge_bounds[interval]), int(exchange.edge_bounds[interval + 1]))
                found[peer].append(self.tables[f"A{step.layer}"][self._edges[peer][edges]])
        return found

    def incoming(self, peer: int, layer: int, back: bool, interval: int, tensors: Sequence[Tensor]) -> None:
        """The other side of a scatter."""
        bounds = self.part.ghost_bounds[peer]
        self.tables[f"{'D' if back else 'T'}{layer}"][int(bounds[interval]) : int(bounds[interval + 1])] = tensors[0]
        if len(tensors) > 1:
            edges = self.part.edge_bounds[peer]
            self.tables[f"A{layer}"][int(edges[interval]) : int(edges[interval + 1])] = tensors[1]

    def gather(self, step: Step, interval: int) -> None:
        """GA and ∇GA."""
        adjacency, rows, layer = self._adjacency[interval], self.span(interval), step.layer
        source, target = ("D", "U") if step.back else ("T", "G")
        table, out = self.tables[f"{source}{layer}"], self.tables[f"{target}{layer}"][rows]
        if self._model.kind == "gcn":
            adjacency.gather(table, out)
            return
        heads, wide = self._model.heads, gathered_width(self._model, layer)
        attention = self.tables[f"A{layer}"]
        if not step.back:
            adjacency.gather_weighed(attention[adjacency.edges, :heads], table[:, :wide], out)
            return
        opposite = attention[self._reverse[adjacency.edges]]
        adjacency.gather_weighed(opposite[:, :heads], table, out[:, :wide])
        out[:, wide : wide + heads] = adjacency.sum_edges(opposite[:, heads:].contiguous())
        out[:, wide + heads :] = adjacency.sum_edges(attention[adjacency.edges, heads:].contiguous())

    def rows(self, pieces: Sequence[Slice]) -> list[Tensor]:
        """The rows that slices name."""
        return [self.tables[table][start:stop] for table, start, stop in pieces]


def _shapes(part: Part, model: Model, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Tables of the arena."""
    size, edges, heads = part.size, len(part.indices), model.heads
    received = sum(int(bounds[-1] - bounds[0]) for bounds in part.edge_bounds.values())
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        FEATURES: ("float32", (size, width)),
        "labels": ("int64", (size,)),
        "roles": ("uint8", (size,)),
        "vertices": ("int64", (size,)),
        "indptr": ("int32", (size + 1,)),
    }
    if model.attention_dropout:
        found["numbers"] = ("int64", (edges,))
    for layer in range(first_gather(model), model.layers):
        found[f"G{layer}"] = ("float32", (size, gathered_width(model, layer)))
        found[f"U{layer}"] = ("float32", (size, sent_width(model, layer)))
        if model.kind == "gat":
            found[f"S{layer}"] = ("float32", (edges, heads))
            found[f"A{layer}"] = ("float32", (edges + received, 2 * heads))
            found[f"B{layer}"] = ("float32", (edges, heads))
    return found
