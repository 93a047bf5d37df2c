"""Readers of graphs: npz files, generators by name, and in-memory objects of other libraries."""

from __future__ import annotations

import contextlib
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import UsageError
from culm.gnn.graph.array_conversion import to_dense_array, to_feature_rows, to_integers
from culm.gnn.graph.csr_graph import Graph, graph_from_edges, roles_from_sets
from culm.gnn.graph.graph_generators import generate_graph
from culm.gnn.graph.memory_check import check_fits_in_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_SPLIT_NAMES = ("train", "val", "test")


_ARRAY_NAMES = {
    "indptr": ("indptr", "adj_indptr"),
    "indices": ("indices", "adj_indices"),
    "edge_index": ("edge_index", "edges"),
    "edge_weight": ("edge_weight", "adj_data"),
    "labels": ("labels", "y", "label"),
    "features": ("features", "x", "feat", "attr_matrix"),
    **{f"feat_{part}": (f"feat_{part}", f"attr_{part}") for part in ("indptr", "indices", "shape", "data")},
    **{name: (f"{name}_idx", f"{name}_mask") for name in _SPLIT_NAMES},
}
"""Names of the arrays in an npz: culm's, then those of PyG and of the gnn-benchmark files (adj_*, attr_*)."""
_READ_ERRORS = (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, RuntimeError, MemoryError)
"""Errors that numpy and zipfile raise for a file that is damaged, encrypted or packed in an unknown way."""


def load(source: str, *, symmetrize: bool = False, split_seed: int = 0) -> Graph:
    """Return the graph of `--graph`: an npz file or `gen:...`. Raises UsageError if it cannot be read."""
    if source.startswith("gen:"):
        return generate_graph(source)
    path = Path(source)
    if not path.is_file():
        raise UsageError(
            f"--graph {source!r} is not a file: give an npz file, or a generator such as gen:rmat,scale=16,degree=16"
        )
    if not zipfile.is_zipfile(path):
        raise UsageError(f"--graph {source!r} cannot be read as npz: write one with numpy.savez (docs/gnn.md)")
    with open_npz(path) as stored:
        return _from_npz(stored, symmetrize, split_seed)


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[NpzArrays]:
    """Open the arrays of an npz; they can be read inside the context. Raises UsageError for a file that cannot be
    read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield NpzArrays(arrays, path.stem)
    except _READ_ERRORS as error:
        raise UsageError(f"--graph {str(path)!r} cannot be read as npz: {error}") from None


class NpzArrays:
    """Arrays of an npz under culm's names. Raises UsageError for a missing array."""

    def __init__(self, arrays: Any, name: str) -> None:
        self._arrays, self.name = arrays, name

    def stored_name(self, key: str) -> str:
        """Return the name of the array in this file."""
        return next((name for name in _ARRAY_NAMES[key] if name in self._arrays), key)

    def __contains__(self, key: str) -> bool:
        return self.stored_name(key) in self._arrays

    def __getitem__(self, key: str) -> Array:
        if key not in self:
            raise UsageError(
                f"{self.name} has no array {key!r}: an npz graph has indptr and indices or edge_index, "
                "labels, and features or feat_*"
            )
        array: Array = self._arrays[self.stored_name(key)]
        return array

    def integers(self, key: str) -> Array:
        """Return a one-dimensional array of whole numbers."""
        array = self[key]
        if array.ndim != 1:
            raise UsageError(
                f"{self.name}: {self.stored_name(key)} has the shape {array.shape}: give one row of whole numbers"
            )
        return to_integers(f"{self.name}: {self.stored_name(key)}", array)

    def get(self, key: str) -> Array | None:
        return self[key] if self.stored_name(key) in self._arrays else None


def _from_npz(stored: NpzArrays, symmetrize: bool, split_seed: int) -> Graph:
    sources, targets, vertices = _stored_edges(stored)
    _warn_about_edge_weights(stored.get("edge_weight"))
    return graph_from_edges(
        sources, targets, vertices, features=_stored_features(stored, vertices), labels=stored["labels"],
        roles=_roles_from_arrays({name: stored.get(name) for name in _SPLIT_NAMES}, vertices),
        symmetrize=symmetrize, split_seed=split_seed, name=stored.name,
    )  # fmt: skip


def _stored_edges(stored: NpzArrays) -> tuple[Array, Array, int]:
    """Return sources, targets, and the number of vertices."""
    if "edge_index" in stored and "indptr" not in stored:
        ends = stored["edge_index"]
        if ends.ndim != 2 or 2 not in ends.shape:
            name = stored.stored_name("edge_index")
            raise UsageError(f"{stored.name}: {name} has the shape {ends.shape}: give two rows of vertex numbers")
        ends = to_integers(f"{stored.name}: {stored.stored_name('edge_index')}", ends)
        return (*(ends if len(ends) == 2 else ends.T), stored["labels"].size)
    indptr, indices = stored.integers("indptr"), stored.integers("indices")
    vertices = len(indptr) - 1
    _check_pointers(f"{stored.name}: {stored.stored_name('indptr')}", indptr, len(indices))
    return indices, np.repeat(np.arange(vertices), np.diff(indptr)), vertices


def _check_pointers(name: str, pointers: Array, count: int) -> None:
    if len(pointers) < 2 or pointers[0] != 0 or pointers[-1] != count or (np.diff(pointers) < 0).any():
        raise UsageError(f"{name} does not describe {count} indices: it must grow from 0 to their number")


def _stored_features(stored: NpzArrays, vertices: int) -> Array | None:
    """Return the dense feature matrix, from `features` or from the CSR arrays `feat_*`; None without any."""
    if "features" in stored:
        return stored["features"]
    if "feat_indptr" not in stored:
        return None
    shape = stored.integers("feat_shape")
    indptr, columns = stored.integers("feat_indptr"), stored.integers("feat_indices")
    if len(shape) != 2:
        raise UsageError(f"feat_shape is {shape.tolist()}: give rows and columns of the features")
    rows, width = map(int, shape)
    if rows != vertices or len(indptr) != rows + 1:
        raise UsageError(f"feat_* describe {rows} x {width} features for {vertices} vertices: give one row for each")
    _check_pointers("feat_indptr", indptr, len(columns))
    if len(columns) and not 0 <= columns.min() <= columns.max() < width:
        raise UsageError(f"feat_indices goes up to {columns.max()} for {width} features: number them from 0")
    values = stored["feat_data"] if "feat_data" in stored else np.ones((), np.float32)
    if values.ndim and values.shape != columns.shape:
        raise UsageError(f"feat_data has {len(values)} values for {len(columns)} feat_indices: give one for each")
    check_fits_in_memory(rows * width * 4, f"a feature matrix of {rows} x {width}")
    dense = np.zeros(rows * width, np.float32)
    np.add.at(dense, np.repeat(np.arange(rows), np.diff(indptr)) * width + columns, to_feature_rows(values))
    return dense.reshape(rows, width)


def to_graph(
    source: Any,
    *,
    features: Any = None,
    labels: Any = None,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    symmetrize: bool = False,
    split_seed: int = 0,
) -> Graph:
    """Convert a Graph, a path or `gen:...`, a PyG Data, a SciPy sparse matrix or an edge list (pairs, or an array of
    shape (E, 2) or (2, E)) to a Graph. A matrix or edge list takes features, labels and vertex sets as arguments.

    Raises UsageError for anything else, and for everything that `graph_from_edges` rejects.
    """
    extra_arrays = {"features": features, "labels": labels, "train": train, "val": val, "test": test}
    if isinstance(source, Graph):
        _check_no_extra_arrays("a Graph", extra_arrays)
        return source
    if isinstance(source, (str, Path)):
        _check_no_extra_arrays(str(source), extra_arrays)
        return load(str(source), symmetrize=symmetrize, split_seed=split_seed)
    if hasattr(source, "edge_index"):
        _check_no_extra_arrays("a PyG Data", extra_arrays)
        return _from_pyg(source, symmetrize, split_seed)
    arrays = {name: to_dense_array(name, value) for name, value in extra_arrays.items()}
    sources, targets, vertices = _edges_from_source(source, arrays["features"])
    return graph_from_edges(
        sources,
        targets,
        vertices,
        features=arrays["features"],
        labels=arrays["labels"],
        roles=_roles_from_arrays(arrays, vertices),
        symmetrize=symmetrize,
        split_seed=split_seed,
    )


def _check_no_extra_arrays(what: str, extra_arrays: dict[str, Any]) -> None:
    for name, value in extra_arrays.items():
        if value is not None:
            raise UsageError(
                f"{name} is given together with {what}, which has its own: give it only with a matrix or edge list"
            )


def _roles_from_arrays(arrays: dict[str, Array | None], vertices: int) -> Array | None:
    """Return roles from the given sets; None if there are none. Raises UsageError for val or test without train."""
    sets = [arrays[name] for name in _SPLIT_NAMES]
    if sets[0] is None:
        named = next((name for name in _SPLIT_NAMES if arrays[name] is not None), None)
        if named is not None:
            raise UsageError(f"{named} is given and train is not: name the vertices to learn from, or no set at all")
        return None
    return roles_from_sets(vertices, *(np.zeros(0, np.int64) if members is None else members for members in sets))


def _from_pyg(data: Any, symmetrize: bool, split_seed: int) -> Graph:
    edges = to_dense_array("edge_index", data.edge_index)
    if edges is None:
        raise UsageError("the PyG Data has no edge_index: give the ends of its edges, two rows of vertex numbers")
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise UsageError(f"edge_index has the shape {edges.shape} of {edges.dtype}: give two rows of vertex numbers")
    _warn_about_edge_weights(to_dense_array("edge_weight", getattr(data, "edge_weight", None)))
    masks = {name: to_dense_array(name, getattr(data, f"{name}_mask", None)) for name in _SPLIT_NAMES}
    masks = {name: None if mask is None else mask.astype(bool) for name, mask in masks.items()}
    vertices = int(data.num_nodes)
    return graph_from_edges(
        edges[0], edges[1], vertices, features=to_dense_array("x", data.x), labels=to_dense_array("y", data.y),
        roles=_roles_from_arrays(masks, vertices), symmetrize=symmetrize, split_seed=split_seed, name="the PyG Data",
    )  # fmt: skip


def _edges_from_source(source: Any, features: Array | None) -> tuple[Array, Array, int]:
    """Return sources, targets, and the number of vertices."""
    if hasattr(source, "tocoo"):
        coo = source.tocoo()
        _warn_about_edge_weights(coo.data)
        return coo.col, coo.row, _check_square(coo.shape)
    sources, targets = _edge_pairs(source)
    last = max(int(ends.max(initial=-1)) for ends in (sources, targets))
    return sources, targets, len(features) if features is not None else last + 1


def _warn_about_edge_weights(weights: Array | None) -> None:
    """Warn that edge weights are ignored: every edge counts the same."""
    if weights is not None and weights.size and weights.min() != weights.max():
        warnings.warn(
            f"edges have weights from {weights.min():g} to {weights.max():g}: each counts the same here", stacklevel=2
        )


def _check_square(shape: tuple[int, int]) -> int:
    if shape[0] != shape[1]:
        raise UsageError(f"the adjacency matrix is {shape[0]} x {shape[1]}: give a square one")
    return int(shape[0])


def _edge_pairs(source: Any) -> tuple[Array, Array]:
    pairs = None
    with contextlib.suppress(NotImplementedError):  # raised by PyG for a HeteroData
        pairs = to_dense_array("graph", source)
    if pairs is None or pairs.ndim != 2 or 2 not in pairs.shape or not np.issubdtype(pairs.dtype, np.integer):
        raise UsageError(
            f"graph is a {type(source).__name__}: give a path, gen:..., a PyG Data, a SciPy sparse matrix, "
            "or pairs of vertex numbers"
        )
    return (pairs[0], pairs[1]) if pairs.shape[0] == 2 and pairs.shape[1] != 2 else (pairs[:, 0], pairs[:, 1])
