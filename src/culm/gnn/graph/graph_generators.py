"""Synthetic graphs from a seed, for tests, benchmarks and first steps.

    gen:rmat,scale=16,degree=16     2^scale vertices, a skewed degree distribution, few communities
    gen:sbm,vertices=2000,classes=4,degree=10,inside=0.8     communities, which are the classes

Labels can be learned by a graph network but not by a network that ignores the edges. Under R-MAT, the class of a vertex
is the argmax of its hidden scores after they were averaged over its neighbourhood; its features are its own scores plus
noise. Under stochastic blocks, neighbours mostly share a class, and features are too noisy to predict it alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import UsageError
from culm.gnn.graph.csr_graph import TEST, TRAIN, VAL, Graph, build_csr
from culm.gnn.graph.index_limits import check_vertex_count
from culm.gnn.graph.memory_check import check_fits_in_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_DEFAULTS: dict[str, dict[str, float]] = {
    "rmat": {"scale": 12, "degree": 16, "features": 32, "classes": 8, "noise": 0.3, "seed": 0},
    "sbm": {"vertices": 2000, "degree": 10, "features": 32, "classes": 4, "inside": 0.8, "noise": 5.0, "seed": 0},
}
_QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Probabilities of the four quadrants, as in the Graph500 benchmark."""
_EDGES_PER_CHUNK = 1 << 22
_ROWS_PER_CHUNK = 1 << 14
"""Feature rows per random generator: the result does not depend on the number of threads."""
_BYTES_PER_EDGE, _BYTES_PER_FEATURE = 60.0, 9.0
"""Measured peak memory of generating and training."""


def generate_graph(source: str) -> Graph:
    """Return the graph that `gen:...` describes. Raises UsageError for an unknown generator, option or value."""
    kind, options = parse_generator(source)
    vertices = 2 ** int(options["scale"]) if kind == "rmat" else int(options["vertices"])
    check_vertex_count(vertices, source)
    edges = vertices * options["degree"]
    needed = edges * _BYTES_PER_EDGE + vertices * options["features"] * _BYTES_PER_FEATURE
    check_fits_in_memory(needed, f"{source} ({vertices:.3g} vertices, {edges:.3g} edges)")
    return (_rmat if kind == "rmat" else _stochastic_blocks)(options, source)


def parse_generator(source: str) -> tuple[str, dict[str, float]]:
    """Return kind and options of `gen:kind,name=value,...`, with defaults filled in."""
    kind, *pairs = source.removeprefix("gen:").split(",")
    if kind not in _DEFAULTS:
        raise UsageError(f"--graph {source!r} has the unknown generator {kind!r}: use {', '.join(_DEFAULTS)}")
    options = dict(_DEFAULTS[kind])
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in options:
            raise UsageError(f"--graph {source!r} has {name!r}: the options of {kind} are {', '.join(options)}")
        try:
            options[name] = float(value)
        except ValueError:
            raise UsageError(f"--graph {source!r} has {pair!r}: write {name}=NUMBER") from None
    _check_options(source, options)
    return kind, options


def _check_options(source: str, options: Mapping[str, float]) -> None:
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
    _renumber(ends, rng.permutation(vertices))  # otherwise the number of a vertex would reveal its degree
    scores = rng.standard_normal((vertices, classes), np.float32)
    features = _noisy_features(rng, scores, int(options["features"]), options["noise"])
    indptr, indices = build_csr(ends[0], ends[1], vertices, symmetrize=True)
    labels = _neighbourhood_mean(indptr, indices, scores).argmax(1)
    return Graph(indptr, indices, features, labels, _random_roles(rng, labels), name)


def _rmat_edges(rng: np.random.Generator, scale: int, count: int) -> Array:
    """Return sources and targets. Each chunk has its own generator, so the result does not depend on the number of
    threads."""
    ends = np.zeros((2, count), np.int64)
    pieces = [ends[:, first : first + _EDGES_PER_CHUNK] for first in range(0, count, _EDGES_PER_CHUNK)]
    generators = [rng, *rng.spawn(len(pieces) - 1)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(_draw_edges, generators, pieces, [scale] * len(pieces)))
    return ends


def _renumber(ends: Array, numbers: Array) -> None:
    """Renumber the vertices in place."""

    def piece(first: int) -> None:
        ends[:, first : first + _EDGES_PER_CHUNK] = numbers[ends[:, first : first + _EDGES_PER_CHUNK]]

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(piece, range(0, ends.shape[1], _EDGES_PER_CHUNK)))


def _draw_edges(rng: np.random.Generator, ends: Array, scale: int) -> None:
    """Train a model on a whole graph, with graph servers, parameter servers and elastic workers as processes."""
    a, b, c, _ = _QUADRANTS
    for _ in range(scale):
        draw = rng.random(ends.shape[1], np.float32)
        ends <<= 1
        ends[0] |= draw >= a + b
        ends[1] |= ((draw >= a) & (draw < a + b)) | (draw >= a + b + c)


def _neighbourhood_mean(indptr: Array, indices: Array, scores: Array) -> Array:
    """Return the normalised mean of the scores of each vertex and its neighbours; a neighbour with a high degree
    counts less."""
    import torch

    from culm.gnn.graph.adjacency import gather_whole_graph

    root = np.sqrt(np.diff(indptr) + 1).astype(np.float32)[:, None]
    scaled = torch.from_numpy(scores / root)
    mean: Array = gather_whole_graph(indptr, indices, scaled).add_(scaled).numpy() / root
    return mean


def _stochastic_blocks(options: Mapping[str, float], name: str) -> Graph:
    rng = np.random.default_rng(int(options["seed"]))
    vertices, classes = int(options["vertices"]), int(options["classes"])
    edges = int(vertices * options["degree"] / 2)
    labels = rng.permutation(np.arange(vertices) % classes)
    members = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[members], np.arange(classes + 1))
    sources = rng.integers(0, vertices, edges)
    sizes = np.diff(starts)[labels[sources]]
    same_class = members[starts[labels[sources]] + (rng.random(edges) * sizes).astype(np.int64)]
    targets = np.where(rng.random(edges) < options["inside"], same_class, rng.integers(0, vertices, edges))
    scores = np.eye(classes, dtype=np.float32)[labels]
    features = _noisy_features(rng, scores, int(options["features"]), options["noise"])
    indptr, indices = build_csr(sources, targets, vertices, symmetrize=True)
    return Graph(indptr, indices, features, labels, _random_roles(rng, labels), name)


def _noisy_features(rng: np.random.Generator, scores: Array, width: int, noise: float) -> Array:
    """Return features: the scores times a random matrix, plus noise."""
    basis = rng.standard_normal((scores.shape[1], width), np.float32)
    features = np.empty((len(scores), width), np.float32)
    rows = range(0, len(features), _ROWS_PER_CHUNK)

    def fill_chunk(row: int, chunk_rng: np.random.Generator) -> None:
        block = features[row : row + _ROWS_PER_CHUNK]
        chunk_rng.standard_normal(out=block, dtype=np.float32)
        block *= np.float32(noise)
        block += scores[row : row + _ROWS_PER_CHUNK] @ basis

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # the largest part of generating a large graph
        list(threads.map(fill_chunk, rows, rng.spawn(len(rows))))
    return features


def _random_roles(rng: np.random.Generator, labels: Array) -> Array:
    """Return random roles, 60 % train, 20 % val, 20 % test; at least one vertex of each class is a training vertex."""
    vertices = len(labels)
    order = rng.permutation(vertices)
    roles = np.full(vertices, TEST, np.uint8)
    roles[order[: vertices * 6 // 10]] = TRAIN
    roles[order[vertices * 6 // 10 : vertices * 8 // 10]] = VAL
    _, first = np.unique(labels, return_index=True)
    roles[first] = TRAIN
    return roles
