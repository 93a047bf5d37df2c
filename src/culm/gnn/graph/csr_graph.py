"""The Graph that is trained on: symmetric edges in CSR, features, labels, and the role of each vertex.

Edges have no self loops and no duplicates; models add the self loops they need. Every reader returns a `Graph`, whose
constructor raises UsageError for data that training could not use.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from culm.errors import UsageError
from culm.gnn.graph.array_conversion import to_feature_rows, to_labels, to_mask
from culm.gnn.graph.index_limits import check_vertex_count

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

TRAIN, VAL, TEST = 1, 2, 4
"""Role of a vertex. A vertex has at most one, so accuracy is never measured on a vertex that was trained on."""
_TRAIN_PER_CLASS, _VAL_PER_CLASS = 20, 30
_EDGES_PER_THREAD = 1 << 22
"""Edges per sorting thread. Each thread scans all edges to find its own, so many small chunks would cost more."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph. `indptr` and `indices` list the sorted neighbours of every vertex. A label below 0 is unknown."""

    indptr: Array
    indices: Array
    features: Array
    labels: Array
    roles: Array
    name: str = "graph"

    def __post_init__(self) -> None:
        check_vertex_count(self.vertices, self.name)
        _check_structure(self.indptr, self.indices)
        _check_rows("features", self.features, self.vertices)
        _check_rows("labels", self.labels, self.vertices)
        _check_rows("roles", self.roles, self.vertices)
        _check_features(self.features)
        _check_roles(self.roles, self.labels)

    @property
    def vertices(self) -> int:
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """Number of directed edges: twice the undirected ones."""
        return len(self.indices)

    @property
    def width(self) -> int:
        """Number of features per vertex."""
        return int(self.features.shape[1])

    @cached_property
    def classes(self) -> int:
        return int(self.labels.max(initial=-1)) + 1

    @cached_property
    def train_vertices(self) -> int:
        return int(np.count_nonzero(self.roles == TRAIN))

    @property
    def degrees(self) -> Array:
        return np.diff(self.indptr)

    def with_normalized_features(self) -> Graph:
        """Return the graph with feature rows that sum to one. Rows of zeros, and graphs with negative features, are
        unchanged."""
        if (self.features < 0).any():
            return self
        sums = self.features.sum(1, keepdims=True)
        return replace(self, features=self.features / np.where(sums > 0, sums, 1).astype(np.float32))


def graph_from_edges(
    sources: Array,
    targets: Array,
    vertices: int,
    *,
    features: Array | None,
    labels: Array | None,
    roles: Array | None = None,
    symmetrize: bool = False,
    split_seed: int = 0,
    name: str = "graph",
) -> Graph:
    """Build a graph from directed edges. Self loops and duplicates are removed; without roles, a split is drawn from
    `split_seed`.

    Raises UsageError for edges out of range, for an edge without its reverse (unless `symmetrize` adds it), and for
    features or labels that are missing or have the wrong shape.
    """
    check_vertex_count(vertices, name)
    _check_range(sources, targets, vertices)
    if features is None:
        raise UsageError(
            f"{name} has no features: give a row of numbers for every vertex (x of a PyG Data, feat_* of an npz)"
        )
    if labels is None:
        raise UsageError(f"{name} has no labels: give a class for every vertex, -1 where it is unknown")
    features, labels = to_feature_rows(features), to_labels(labels)
    ends = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    indptr, indices = build_csr(*ends, vertices, symmetrize=symmetrize)
    if roles is None:
        roles = random_split(labels, split_seed)
    return Graph(indptr, indices, features, labels, np.asarray(roles, np.uint8), name)


def random_split(labels: Array, seed: int) -> Array:
    """Return roles for a graph without a fixed split: 20 training and 30 validation vertices per class (a third and
    a quarter of a class with fewer than 60 vertices); all others are test vertices."""
    if seed < 0:
        raise UsageError(f"--split-seed is {seed}: give a whole number of at least 0")
    roles = np.where(labels >= 0, TEST, 0).astype(np.uint8)
    rng = np.random.default_rng((seed, 7))
    for label in range(int(labels.max(initial=-1)) + 1):
        members = rng.permutation(np.flatnonzero(labels == label))
        train = min(_TRAIN_PER_CLASS, -(-len(members) // 3))
        val = min(_VAL_PER_CLASS, len(members) // 4)
        roles[members[:train]] = TRAIN
        roles[members[train : train + val]] = VAL
    return roles


def roles_from_sets(vertices: int, train: Array, val: Array, test: Array) -> Array:
    """Return roles from three sets of vertices, each a mask or vertex numbers. Raises UsageError if two sets
    overlap."""
    masks = {
        name: to_mask(name, members, vertices) for name, members in (("train", train), ("val", val), ("test", test))
    }
    roles = np.zeros(vertices, np.uint8)
    for (name, mask), bit in zip(masks.items(), (TRAIN, VAL, TEST), strict=True):
        if (roles[mask] != 0).any():
            vertex = int(np.flatnonzero(mask & (roles != 0))[0])
            raise UsageError(
                f"vertex {vertex} is in the {name} set and in another one: "
                "give every vertex one role, or accuracy is measured on training vertices"
            )
        roles[mask] = bit
    return roles


def build_csr(sources: Array, targets: Array, vertices: int, *, symmetrize: bool) -> tuple[Array, Array]:
    """Return `indptr` and `indices` with the sorted, unique neighbours of every vertex.

    Raises UsageError for an edge without its reverse, unless `symmetrize` adds it.
    """
    chunks = min(vertices, -(-len(sources) // _EDGES_PER_THREAD)) or 1
    bounds = [vertices * number // chunks for number in range(chunks + 1)]

    def rows(first: int, end: int) -> tuple[Array, Array]:
        """Return the number of neighbours of each vertex in a range, and the neighbours."""
        forward = _edge_keys(sources, targets, first, end, vertices)
        backward = _edge_keys(targets, sources, first, end, vertices)
        if symmetrize:
            forward = sorted_unique(np.concatenate([forward, backward]))
        else:
            forward, backward = sorted_unique(forward), sorted_unique(backward)
            if not np.array_equal(forward, backward):
                raise UsageError(_missing_reverse_message(sources, targets, vertices))
        return np.bincount(forward // vertices, minlength=end - first), (forward % vertices).astype(np.int32)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # most of the time is spent in NumPy's sort
        counts, indices = zip(*threads.map(rows, bounds[:-1], bounds[1:]), strict=True)
    indptr = np.zeros(vertices + 1, np.int64)
    np.cumsum(np.concatenate(counts), out=indptr[1:])
    return indptr, np.concatenate(indices)


def _edge_keys(sources: Array, targets: Array, first: int, end: int, vertices: int) -> Array:
    """Return the edges whose target is in [first, end), without self loops, as integers that sort by target, then
    source."""
    in_range = (targets >= first) & (targets < end) & (sources != targets)
    keys: Array = (targets[in_range] - first) * vertices + sources[in_range]
    return keys


def sorted_unique(keys: Array) -> Array:
    """Sort in place and return each key once. Same result as np.unique, which hashes first and takes ten times as
    long."""
    keys.sort()
    first = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return keys[first]


def _missing_reverse_message(sources: Array, targets: Array, vertices: int) -> str:
    keys = sorted_unique(_edge_keys(sources, targets, 0, vertices, vertices))
    unpaired = np.setdiff1d(keys, keys % vertices * vertices + keys // vertices)
    target, source = divmod(int(unpaired[0]), vertices)
    return (
        f"{len(unpaired)} of {len(keys)} edges have no reverse, the first from {source} to {target}: "
        "add the reverse edges, or ask for that with --symmetrize (symmetrize=True)"
    )


def _check_range(sources: Array, targets: Array, vertices: int) -> None:
    for name, ends in (("source", sources), ("target", targets)):
        if len(ends) and (int(ends.min()) < 0 or int(ends.max()) >= vertices):
            worst = int(ends.min()) if int(ends.min()) < 0 else int(ends.max())
            raise UsageError(
                f"an edge has the {name} {worst}, and the graph has {vertices} vertices: number them from 0"
            )


def _check_structure(indptr: Array, indices: Array) -> None:
    if len(indptr) < 2:
        raise UsageError("the graph has 0 vertices: give at least one")
    if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        raise UsageError(f"indptr does not describe {len(indices)} indices: it must grow from 0 to their number")


def _check_rows(name: str, rows: Array, vertices: int) -> None:
    if rows.shape[0] != vertices:
        raise UsageError(f"{name} has {rows.shape[0]} rows for {vertices} vertices: give one row for each")


def _check_features(features: Array) -> None:
    if features.ndim != 2 or features.shape[1] == 0:
        raise UsageError(f"features has the shape {features.shape}: give a row of at least one number for every vertex")
    bad = ~np.isfinite(features).all(1)
    if bad.any():
        raise UsageError(f"features of vertex {int(bad.argmax())} are not finite: replace NaN and infinity")


def _check_roles(roles: Array, labels: Array) -> None:
    if (labels[roles != 0] < 0).any():
        vertex = int(np.flatnonzero((roles != 0) & (labels < 0))[0])
        raise UsageError(f"vertex {vertex} is in a split and has no label: label it, or remove it from the split")
    if not (roles == TRAIN).any():
        raise UsageError("no vertex is in the train set: name at least one of every class")
    seen = np.bincount(labels[roles == TRAIN], minlength=int(labels.max(initial=0)) + 1)
    known = np.bincount(labels[labels >= 0], minlength=len(seen))
    missing = np.flatnonzero((seen == 0) & (known > 0))
    if len(missing):
        raise UsageError(
            f"class {missing[0]} has no vertex in the train set ({known[missing[0]]} elsewhere): "
            "add one, or set its labels to -1"
        )
