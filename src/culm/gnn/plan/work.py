"""How much there is to do in an epoch of full-graph training: counts, no seconds.

GA at width w touches one element for each edge and column; AV multiplies a row by a matrix. Which comes first decides
the width of the gather:

    gather-first   A.X, then times W: every gather at the layer's input width (Dorylus)
    cheapest       the narrower of both widths; A.X of the first layer is made once and kept (culm)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from culm.errors import UsageError

Order = Literal["gather-first", "cheapest"]
Model = Literal["gcn", "gat"]

ATTENTION_PASSES = 3
"""Per edge and column: the score, the gradient of the score, the gradient of the vertices."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A graph and a model, as far as time and money are concerned."""

    name: str
    vertices: int
    edges: int
    """Directed: twice the undirected ones."""
    features: int
    classes: int
    hidden: int = 128
    layers: int = 2
    model: Model = "gcn"
    heads: int = 1
    train_share: float = 0.6
    """Of the vertices: what a sampling system visits in an epoch."""

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
        """Columns of what enters each layer, and of what leaves the last. Heads share the columns of hidden layers."""
        return (self.features, *[self.hidden] * (self.layers - 1), self.classes)

    @property
    def degree(self) -> float:
        return self.edges / self.vertices


@dataclass(frozen=True, kw_only=True)
class Work:
    """An epoch's work, forward and backward."""

    gather: float
    """Elements: edges x columns."""
    macs: float
    """Multiply-adds of AV, AE and their gradients."""
    rows: float
    """Floats between graph servers and workers."""
    ghosts: float
    """Floats that each copy of a vertex on another server is sent."""
    held: float
    """Bytes that the graph servers keep, without ghosts."""
    calls: int
    """Tasks that an interval hands to workers."""

    @property
    def ratio(self) -> float:
        """Tensor work to graph work: workers pay where it is high."""
        return self.macs / max(self.gather, 1.0)


def epoch_work(shape: Shape, order: Order) -> Work:
    """Count an epoch of `shape`."""
    layers = [_gat(shape, at) if shape.model == "gat" else _gcn(shape, at, order) for at in range(shape.layers)]
    return Work(
        gather=sum(layer.gather for layer in layers),
        macs=sum(layer.macs for layer in layers),
        rows=sum(layer.rows for layer in layers),
        ghosts=sum(layer.ghosts for layer in layers),
        held=_held(shape, order),
        calls=2 * shape.layers,
    )


@dataclass(frozen=True)
class _Layer:
    gather: float
    macs: float
    rows: float
    ghosts: float


def _gcn(shape: Shape, at: int, order: Order) -> _Layer:
    """The first layer needs no gradient of its input, hence neither a backward gather nor a third product."""
    into, out = shape.widths[at : at + 2]
    width = into if order == "gather-first" else min(into, out)
    passes = (0 if order == "cheapest" else 1) if at == 0 else 2
    return _Layer(
        gather=float(passes * shape.edges * width),
        macs=float((2 if at == 0 else 3) * shape.vertices * into * out),
        rows=float(shape.vertices * _carried(into, out, first=at == 0)),
        ghosts=0.0 if at == 0 else 2.0 * width,
    )


def _gat(shape: Shape, at: int) -> _Layer:
    """Attention follows the weights, so nothing is kept and the product always comes first. The last layer's heads are
    averaged, each of them as wide as there are classes."""
    into, out = shape.widths[at : at + 2]
    out *= shape.heads if at == shape.layers - 1 else 1
    return _Layer(
        gather=2.0 * shape.edges * out,
        macs=float((2 if at == 0 else 3) * shape.vertices * into * out + ATTENTION_PASSES * shape.edges * out),
        rows=float(shape.vertices * _carried(into, out, first=at == 0) + 4 * shape.edges * shape.heads),
        ghosts=2.0 * out,
    )


def _carried(into: int, out: int, *, first: bool) -> int:
    """Columns to a worker and back: forward, then backward with the input again (it keeps nothing)."""
    return 2 * into + 2 * out + (0 if first else into)


def _held(shape: Shape, order: Order) -> float:
    features = shape.features * (2 if order == "cheapest" and shape.model == "gcn" else 1)
    activations = 3 * sum(shape.widths[1:])
    scores = 3 * shape.heads if shape.model == "gat" else 1
    return 4.0 * (shape.vertices * (features + activations) + shape.edges * (2 + scores))
