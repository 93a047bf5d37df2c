"""Graphs from outside: our npz, generators by name, and what other libraries hold in memory."""

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
from culm.gnn.arrays import array, features_of, whole
from culm.gnn.generate import generate
from culm.gnn.graph import Graph, from_edges, roles_of
from culm.gnn.memory import refuse_what_does_not_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_SETS = ("train", "val", "test")


_NAMES = {
    "indptr": ("indptr", "adj_indptr"),
    "indices": ("indices", "adj_indices"),
    "edge_index": ("edge_index", "edges"),
    "edge_weight": ("edge_weight", "adj_data"),
    "labels": ("labels", "y", "label"),
    "features": ("features", "x", "feat", "attr_matrix"),
    **{f"feat_{part}": (f"feat_{part}", f"attr_{part}") for part in ("indptr", "indices", "shape", "data")},
    **{name: (f"{name}_idx", f"{name}_mask") for name in _SETS},
}
"""Arrays of an npz: our names, and those of PyG and of the gnn-benchmark files (adj_*, attr_*)."""
_UNREADABLE = (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, RuntimeError, MemoryError)
"""What numpy and zipfile raise of a file that is damaged, encrypted, or packed in a way that is not known."""


def load(source: str, *, symmetrize: bool = False, split_seed: int = 0) -> Graph:
    """The graph behind `--graph`: an npz, or `gen:...`. Raises UsageError where there is none."""
    if source.startswith("gen:"):
        return generate(source)
    path = Path(source)
    if not path.is_file():
        raise UsageError(
            f"--graph {source!r} is no file: give an npz, or a generator as in gen:rmat,scale=16,degree=16"
        )
    if not zipfile.is_zipfile(path):
        raise UsageError(f"--graph {source!r} can not be read as npz: write one with numpy.savez (docs/gnn.md)")
    with opened(path) as stored:
        return _from_npz(stored, symmetrize, split_seed)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Stored]:
    """The arrays of an npz, to be read inside. Raises UsageError for what can not be."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield Stored(arrays, path.stem)
    except _UNREADABLE as error:
        raise UsageError(f"--graph {str(path)!r} can not be read as npz: {error}") from None


class Stored:
    """Arrays of an npz by our names; one that is missing is named in a sentence."""

    def __init__(self, arrays: Any, name: str) -> None:
        self._arrays, self.name = arrays, name

    def called(self, key: str) -> str:
        """What an array is called here."""
        return next((name for name in _NAMES[key] if name in self._arrays), key)

    def __contains__(self, key: str) -> bool:
        return self.called(key) in self._arrays

    def __getitem__(self, key: str) -> Array:
        if key not in self:
            raise UsageError(
                f"{self.name} has no array {key!r}: an npz graph has indptr and indices or edge_index, "
                "labels, and features or feat_*"
            )
        found: Array = self._arrays[self.called(key)]
        return found

    def numbers(self, key: str) -> Array:
        """A row of whole numbers."""
        found = self[key]
        if found.ndim != 1:
            raise UsageError(
                f"{self.name}: {self.called(key)} has the shape {found.shape}: give one row of whole numbers"
            )
        return whole(f"{self.name}: {self.called(key)}", found)

    def get(self, key: str) -> Array | None:
        return self[key] if self.called(key) in self._arrays else None


def _from_npz(stored: Stored, symmetrize: bool, split_seed: int) -> Graph:
    sources, targets, vertices = _stored_edges(stored)
    _say_what_weighs(stored.get("edge_weight"))
    return from_edges(
        sources, targets, vertices, features=_features(stored, vertices), labels=stored["labels"],
        roles=_roles({name: stored.get(name) for name in _SETS}, vertices),
        symmetrize=symmetrize, split_seed=split_seed, name=stored.name,
    )  # fmt: skip


def _stored_edges(stored: Stored) -> tuple[Array, Array, int]:
    """Sources, targets, and the number of vertices."""
    if "edge_index" in stored and "indptr" not in stored:
        ends = stored["edge_index"]
        if ends.ndim != 2 or 2 not in ends.shape:
            called = stored.called("edge_index")
            raise UsageError(f"{stored.name}: {called} has the shape {ends.shape}: give two rows of vertex numbers")
        ends = whole(f"{stored.name}: {stored.called('edge_index')}", ends)
        return (*(ends if len(ends) == 2 else ends.T), stored["labels"].size)
    indptr, indices = stored.numbers("indptr"), stored.numbers("indices")
    vertices = len(indptr) - 1
    _check_pointers(f"{stored.name}: {stored.called('indptr')}", indptr, len(indices))
    return indices, np.repeat(np.arange(vertices), np.diff(indptr)), vertices


def _check_pointers(name: str, pointers: Array, count: int) -> None:
    if len(pointers) < 2 or pointers[0] != 0 or pointers[-1] != count or (np.diff(pointers) < 0).any():
        raise UsageError(f"{name} does not describe {count} indices: it has to grow from 0 to their number")


def _features(stored: Stored, vertices: int) -> Array | None:
    """The feature matrix, dense: from CSR arrays, or as `features`."""
    if "features" in stored:
        return stored["features"]
    if "feat_indptr" not in stored:
        return None
    shape = stored.numbers("feat_shape")
    indptr, columns = stored.numbers("feat_indptr"), stored.numbers("feat_indices")
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
    refuse_what_does_not_fit(rows * width * 4, f"a feature matrix of {rows} x {width}")
    dense = np.zeros(rows * width, np.float32)
    np.add.at(dense, np.repeat(np.arange(rows), np.diff(indptr)) * width + columns, features_of(values))
    return dense.reshape(rows, width)


def as_graph(
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
    """A Graph out of what a user has: a Graph, a path or `gen:...`, a PyG Data, a SciPy sparse matrix, or an edge list
    (pairs, or an array of shape (E, 2) or (2, E)). The last two take features, labels and sets of vertices beside it.

    Raises UsageError for anything else, and for what `from_edges` refuses.
    """
    beside = {"features": features, "labels": labels, "train": train, "val": val, "test": test}
    if isinstance(source, Graph):
        _nothing_beside("a Graph", beside)
        return source
    if isinstance(source, (str, Path)):
        _nothing_beside(str(source), beside)
        return load(str(source), symmetrize=symmetrize, split_seed=split_seed)
    if hasattr(source, "edge_index"):
        _nothing_beside("a PyG Data", beside)
        return _from_pyg(source, symmetrize, split_seed)
    given = {name: array(name, value) for name, value in beside.items()}
    sources, targets, vertices = _edges(source, given["features"])
    return from_edges(
        sources, targets, vertices, features=given["features"], labels=given["labels"], roles=_roles(given, vertices),
        symmetrize=symmetrize, split_seed=split_seed,
    )  # fmt: skip


def _nothing_beside(what: str, beside: dict[str, Any]) -> None:
    for name, value in beside.items():
        if value is not None:
            raise UsageError(f"{name} is given beside {what}, which has its own: give it beside a matrix or edge list")


def _roles(given: dict[str, Array | None], vertices: int) -> Array | None:
    """Roles out of the sets that were given; None: none was."""
    sets = [given[name] for name in _SETS]
    if sets[0] is None:
        named = next((name for name in _SETS if given[name] is not None), None)
        if named is not None:
            raise UsageError(f"{named} is given and train is not: name the vertices to learn from, or no set at all")
        return None
    return roles_of(vertices, *(np.zeros(0, np.int64) if one is None else one for one in sets))


def _from_pyg(data: Any, symmetrize: bool, split_seed: int) -> Graph:
    edges = array("edge_index", data.edge_index)
    if edges is None:
        raise UsageError("the PyG Data has no edge_index: give the ends of its edges, two rows of vertex numbers")
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise UsageError(f"edge_index has the shape {edges.shape} of {edges.dtype}: give two rows of vertex numbers")
    _say_what_weighs(array("edge_weight", getattr(data, "edge_weight", None)))
    masks = {name: array(name, getattr(data, f"{name}_mask", None)) for name in _SETS}
    masks = {name: None if mask is None else mask.astype(bool) for name, mask in masks.items()}
    vertices = int(data.num_nodes)
    return from_edges(
        edges[0], edges[1], vertices, features=array("x", data.x), labels=array("y", data.y),
        roles=_roles(masks, vertices), symmetrize=symmetrize, split_seed=split_seed, name="the PyG Data",
    )  # fmt: skip


def _edges(source: Any, features: Array | None) -> tuple[Array, Array, int]:
    """Sources, targets, and the number of vertices."""
    if hasattr(source, "tocoo"):
        coo = source.tocoo()
        _say_what_weighs(coo.data)
        return coo.col, coo.row, _square(coo.shape)
    sources, targets = _pairs(source)
    last = max(int(ends.max(initial=-1)) for ends in (sources, targets))
    return sources, targets, len(features) if features is not None else last + 1


def _say_what_weighs(weights: Array | None) -> None:
    """Here edges are there or not; nobody should have to find that out from his results."""
    if weights is not None and weights.size and weights.min() != weights.max():
        warnings.warn(
            f"edges have weights from {weights.min():g} to {weights.max():g}: each counts the same here", stacklevel=2
        )


def _square(shape: tuple[int, int]) -> int:
    if shape[0] != shape[1]:
        raise UsageError(f"the adjacency matrix is {shape[0]} x {shape[1]}: give a square one")
    return int(shape[0])


def _pairs(source: Any) -> tuple[Array, Array]:
    pairs = None
    with contextlib.suppress(NotImplementedError):  # what PyG says of a HeteroData
        pairs = array("graph", source)
    if pairs is None or pairs.ndim != 2 or 2 not in pairs.shape or not np.issubdtype(pairs.dtype, np.integer):
        raise UsageError(
            f"graph is a {type(source).__name__}: give a path, gen:..., a PyG Data, a SciPy sparse matrix, "
            "or pairs of vertex numbers"
        )
    return (pairs[0], pairs[1]) if pairs.shape[0] == 2 and pairs.shape[1] != 2 else (pairs[:, 0], pairs[:, 1])
