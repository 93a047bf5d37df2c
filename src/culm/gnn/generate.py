"""Graphs out of a seed, for tests, benches and first steps.

    gen:rmat,scale=16,degree=16     2^scale vertices, a skewed degree distribution, few communities
    gen:sbm,vertices=2000,classes=4,degree=10,inside=0.8     communities, which are the classes

Labels are what a graph network can learn and a network without edges can not: under R-MAT the class of a vertex is the
largest of its hidden scores *after* they were averaged over its neighbourhood, and its features are its own scores seen
through noise; under stochastic blocks neighbours mostly share the class and features are too noisy to tell it alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import UsageError
from culm.gnn.graph import TEST, TRAIN, VAL, Graph, csr
from culm.gnn.memory import refuse_what_does_not_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_DEFAULTS: dict[str, dict[str, float]] = {
    "rmat": {"scale": 12, "degree": 16, "features": 32, "classes": 8, "noise": 0.3, "seed": 0},
    "sbm": {"vertices": 2000, "degree": 10, "features": 32, "classes": 4, "inside": 0.8, "noise": 5.0, "seed": 0},
}
_QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Of the Graph500 benchmark."""
_AT_ONCE = 1 << 22
_ROWS = 1 << 14
"""Of features with a generator of their own: however many threads make them, they are the same."""
_BYTES_PER_EDGE, _BYTES_PER_FEATURE = 60.0, 9.0
"""Peak of making and training one, as measured."""


def generate(source: str) -> Graph:
    """The graph that `gen:...` names. Raises UsageError for a name or value that is none."""
    kind, options = parse(source)
    vertices = 2 ** int(options["scale"]) if kind == "rmat" else int(options["vertices"])
    edges = vertices * options["degree"]
    needed = edges * _BYTES_PER_EDGE + vertices * options["features"] * _BYTES_PER_FEATURE
    refuse_what_does_not_fit(needed, f"{source} ({vertices:.3g} vertices, {edges:.3g} edges)")
    return (_rmat if kind == "rmat" else _blocks)(options, source)


def parse(source: str) -> tuple[str, dict[str, float]]:
    """Kind and options of `gen:kind,name=value,...`, defaults filled in."""
    kind, *pairs = source.removeprefix("gen:").split(",")
    if kind not in _DEFAULTS:
        raise UsageError(f"--graph {source!r} names the generator {kind!r}: there are {', '.join(_DEFAULTS)}")
    options = dict(_DEFAULTS[kind])
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in options:
            raise UsageError(f"--graph {source!r} has {name!r}: {kind} knows {', '.join(options)}")
        try:
            options[name] = float(value)
        except ValueError:
            raise UsageError(f"--graph {source!r} has {pair!r}: write {name}=NUMBER") from None
    _check(source, options)
    return kind, options


def _check(source: str, options: Mapping[str, float]) -> None:
    for name, value in options.items():
        low = {"seed": 0, "noise": 0, "inside": 0, "classes": 2}.get(name, 1)
        high = {"scale": 40, "inside": 1}.get(name, sys.float_info.max)
        if not low <= value <= high or (name not in ("noise", "inside") and value != int(value)):
            known = f"from {low} to {high:g}" if high < sys.float_info.max else f"of at least {low}"
            raise UsageError(f"--graph {source!r} has {name}={value:g}: give a number {known}")
    vertices = options.get("vertices", 2 ** options.get("scale", 0))
    if vertices < 3 * options["classes"]:
        raise UsageError(f"--graph {source!r} has {vertices:g} vertices for {options['classes']:g} classes: give more")


def _rmat(options: Mapping[str, float], name: str) -> Graph:
    rng = np.random.default_rng(int(options["seed"]))
    scale = int(options["scale"])
    vertices, edges, classes = 2**scale, int(2**scale * options["degree"] / 2), int(options["classes"])
    ends = _rmat_edges(rng, scale, edges)
    _renumber(ends, rng.permutation(vertices))  # else the number of a vertex tells its degree
    scores = rng.standard_normal((vertices, classes), np.float32)
    features = _seen(rng, scores, int(options["features"]), options["noise"])
    indptr, indices = csr(ends[0], ends[1], vertices, symmetrize=True)
    labels = _neighbourhood_mean(indptr, indices, scores).argmax(1)
    return Graph(indptr, indices, features, labels, _roles(rng, labels), name)


def _rmat_edges(rng: np.random.Generator, scale: int, count: int) -> Array:
    """Sources and targets, in pieces with a generator each: however many threads draw them, they are the same."""
    ends = np.zeros((2, count), np.int64)
    pieces = [ends[:, first : first + _AT_ONCE] for first in range(0, count, _AT_ONCE)]
    draws = [rng, *rng.spawn(len(pieces) - 1)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(_draw_edges, draws, pieces, [scale] * len(pieces)))
    return ends


def _renumber(ends: Array, numbers: Array) -> None:
    """In place."""

    def piece(first: int) -> None:
        ends[:, first : first + _AT_ONCE] = numbers[ends[:, first : first + _AT_ONCE]]

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(piece, range(0, ends.shape[1], _AT_ONCE)))


def _draw_edges(rng: np.random.Generator, ends: Array, scale: int) -> None:
    """Each bit of a source and of its target falls into one of four quadrants."""
    a, b, c, _ = _QUADRANTS
    for _ in range(scale):
        draw = rng.random(ends.shape[1], np.float32)
        ends <<= 1
        ends[0] |= draw >= a + b
        ends[1] |= ((draw >= a) & (draw < a + b)) | (draw >= a + b + c)


def _neighbourhood_mean(indptr: Array, indices: Array, scores: Array) -> Array:
    """Scores of a vertex and its neighbours, neighbours weighed down where they have many of their own."""
    import torch

    from culm.gnn.sparse import Adjacency

    root = np.sqrt(np.diff(indptr) + 1).astype(np.float32)[:, None]
    scaled = torch.from_numpy(scores / root)
    pointers, columns = torch.from_numpy(indptr.astype(np.int32)), torch.from_numpy(indices)
    total = torch.empty_like(scaled)
    Adjacency(pointers, columns, torch.ones(len(indices)), 0, len(scores), len(scores)).gather(scaled, total)
    mean: Array = total.add_(scaled).numpy() / root
    return mean


def _blocks(options: Mapping[str, float], name: str) -> Graph:
    rng = np.random.default_rng(int(options["seed"]))
    vertices, classes = int(options["vertices"]), int(options["classes"])
    edges = int(vertices * options["degree"] / 2)
    labels = rng.permutation(np.arange(vertices) % classes)
    members = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[members], np.arange(classes + 1))
    one = rng.integers(0, vertices, edges)
    sizes = np.diff(starts)[labels[one]]
    mate = members[starts[labels[one]] + (rng.random(edges) * sizes).astype(np.int64)]
    other = np.where(rng.random(edges) < options["inside"], mate, rng.integers(0, vertices, edges))
    scores = np.eye(classes, dtype=np.float32)[labels]
    features = _seen(rng, scores, int(options["features"]), options["noise"])
    indptr, indices = csr(one, other, vertices, symmetrize=True)
    return Graph(indptr, indices, features, labels, _roles(rng, labels), name)


def _seen(rng: np.random.Generator, scores: Array, width: int, noise: float) -> Array:
    """Scores through a random matrix, and noise: what features show of them."""
    basis = rng.standard_normal((scores.shape[1], width), np.float32)
    seen = np.empty((len(scores), width), np.float32)
    rows = range(0, len(seen), _ROWS)

    def look(row: int, own: np.random.Generator) -> None:
        block = seen[row : row + _ROWS]
        own.standard_normal(out=block, dtype=np.float32)
        block *= np.float32(noise)
        block += scores[row : row + _ROWS] @ basis

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # most of what making a large graph takes
        list(threads.map(look, rows, rng.spawn(len(rows))))
    return seen


def _roles(rng: np.random.Generator, labels: Array) -> Array:
    """60, 20 and 20 % of the vertices to learn from, to validate and to test on, and no class left out."""
    vertices = len(labels)
    order = rng.permutation(vertices)
    roles = np.full(vertices, TEST, np.uint8)
    roles[order[: vertices * 6 // 10]] = TRAIN
    roles[order[vertices * 6 // 10 : vertices * 8 // 10]] = VAL
    _, first = np.unique(labels, return_index=True)
    roles[first] = TRAIN
    return roles
