"""The work of a training epoch on the full graph, in counts without seconds.

GA at width w touches one element per edge and column; AV multiplies a row by a matrix. Their order decides the width of
the gather:

    gather-first   A.X, then times W: every gather has the layer's input width (Dorylus)
    cheapest       the narrower of both widths; A.X of the first layer is computed once and cached (culm)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from culm.errors import UsageError

GatherOrder = Literal["gather-first", "cheapest"]
ModelKind = Literal["gcn", "gat"]

ATTENTION_OPS_PER_EDGE = 3
"""Per edge and column: the score, the gradient of the score, the gradient of the vertices."""


@dataclass(frozen=True, kw_only=True)
class GraphWorkload:
    """The properties of a graph and a model that time and cost depend on."""

    name: str
    vertices: int
    edges: int
    """Directed edges: twice the undirected ones."""
    features: int
    classes: int
    hidden: int = 128
    layers: int = 2
    model: ModelKind = "gcn"
    heads: int = 1
    train_share: float = 0.6
    """Share of training vertices: those that a sampling system visits in an epoch."""

    def __post_init__(self) -> None:
        for field in ("vertices", "edges", "features", "classes", "hidden", "layers", "heads"):
            if (number := getattr(self, field)) < 1:
                raise UsageError(f"{field} is {number}: a graph to plan for has at least 1")
        if self.model not in ("gcn", "gat"):
            raise UsageError(f"model is {self.model!r}: use gcn or gat")
        if not 0 < self.train_share <= 1:
            raise UsageError(f"train_share is {self.train_share}: give the share of training vertices, above 0 up to 1")

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each layer's input, and of the last layer's output. The heads share the columns of hidden
        layers."""
        return (self.features, *[self.hidden] * (self.layers - 1), self.classes)

    @property
    def degree(self) -> float:
        return self.edges / self.vertices


@dataclass(frozen=True, kw_only=True)
class EpochWork:
    """The work of a training epoch, forward and backward."""

    gather: float
    """Gathered elements: edges x columns."""
    macs: float
    """Multiply-adds of AV, AE and their gradients."""
    rows: float
    """Floats sent between graph servers and workers."""
    ghosts: float
    """Floats sent to each copy of a vertex on another server."""
    held: float
    """Bytes that the graph servers hold, without ghosts."""
    calls: int
    """Tasks of an interval that run on workers."""

    @property
    def ratio(self) -> float:
        """Ratio of dense work to graph work. Workers pay off if it is high."""
        return self.macs / max(self.gather, 1.0)


def count_epoch_work(shape: GraphWorkload, order: GatherOrder) -> EpochWork:
    """Count the work of a training epoch."""
    layers = [
        _gat_layer_work(shape, at) if shape.model == "gat" else _gcn_layer_work(shape, at, order)
        for at in range(shape.layers)
    ]
    return EpochWork(
        gather=sum(layer.gather for layer in layers),
        macs=sum(layer.macs for layer in layers),
        rows=sum(layer.rows for layer in layers),
        ghosts=sum(layer.ghosts for layer in layers),
        held=_held_bytes(shape, order),
        calls=2 * shape.layers,
    )


@dataclass(frozen=True)
class _LayerWork:
    gather: float
    macs: float
    rows: float
    ghosts: float


def _gcn_layer_work(shape: GraphWorkload, at: int, order: GatherOrder) -> _LayerWork:
    """Count a GCN layer. The first layer needs no gradient of its input, so it has no backward gather and no third
    product."""
    into, out = shape.widths[at : at + 2]
    width = into if order == "gather-first" else min(into, out)
    passes = (0 if order == "cheapest" else 1) if at == 0 else 2
    return _LayerWork(
        gather=float(passes * shape.edges * width),
        macs=float((2 if at == 0 else 3) * shape.vertices * into * out),
        rows=float(shape.vertices * _transferred_columns(into, out, first=at == 0)),
        ghosts=0.0 if at == 0 else 2.0 * width,
    )


def _gat_layer_work(shape: GraphWorkload, at: int) -> _LayerWork:
    """Count a GAT layer. Attention depends on the weights, so nothing is cached and the product comes first. The
    heads of the last layer are averaged; each is as wide as there are classes."""
    into, out = shape.widths[at : at + 2]
    out *= shape.heads if at == shape.layers - 1 else 1
    return _LayerWork(
        gather=2.0 * shape.edges * out,
        macs=float((2 if at == 0 else 3) * shape.vertices * into * out + ATTENTION_OPS_PER_EDGE * shape.edges * out),
        rows=float(shape.vertices * _transferred_columns(into, out, first=at == 0) + 4 * shape.edges * shape.heads),
        ghosts=2.0 * out,
    )


def _transferred_columns(into: int, out: int, *, first: bool) -> int:
    """Return the columns sent to a worker and back: forward, then backward with the input again, since a worker
    keeps no state."""
    return 2 * into + 2 * out + (0 if first else into)


def _held_bytes(shape: GraphWorkload, order: GatherOrder) -> float:
    features = shape.features * (2 if order == "cheapest" and shape.model == "gcn" else 1)
    activations = 3 * sum(shape.widths[1:])
    scores = 3 * shape.heads if shape.model == "gat" else 1
    return 4.0 * (shape.vertices * (features + activations) + shape.edges * (2 + scores))
