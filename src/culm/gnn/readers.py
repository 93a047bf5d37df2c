"""Graphs from outside: our npz, generators by name, and what other libraries hold in memory."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import UsageError
from culm.gnn.generate import generate
from culm.gnn.graph import Graph, from_edges, roles_of
from culm.gnn.memory import refuse_what_does_not_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def load(source: str, *, symmetrize: bool = False, split_seed: int = 0) -> Graph:
    """The graph behind `--graph`: a file in our npz format, or `gen:...`. Raises UsageError where there is none."""
    if source.startswith("gen:"):
        return generate(source)
    path = Path(source)
    if not path.is_file():
        raise UsageError(
            f"--graph {source!r} is no file: give an npz, or a generator as in gen:rmat,scale=16,degree=16"
        )
    try:
        with np.load(path, allow_pickle=False) as stored:
            return _from_npz(stored, path.stem, symmetrize, split_seed)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise UsageError(f"--graph {source!r} can not be read as npz: {error}") from None


def _from_npz(stored: Any, name: str, symmetrize: bool, split_seed: int) -> Graph:
    missing = [key for key in ("indptr", "indices", "labels") if key not in stored]
    if missing:
        raise UsageError(f"{name} has no array {missing[0]!r}: an npz graph has indptr, indices, labels and feat_*")
    indptr, indices = stored["indptr"].astype(np.int64), stored["indices"]
    vertices = len(indptr) - 1
    if vertices < 1 or (np.diff(indptr) < 0).any() or indptr[-1] != len(indices):
        raise UsageError(
            f"{name}: indptr does not describe {len(indices)} indices: it has to grow from 0 to their number"
        )
    targets = np.repeat(np.arange(vertices), np.diff(indptr))
    roles = None
    if "train_idx" in stored:
        roles = roles_of(vertices, stored["train_idx"], stored["val_idx"], stored["test_idx"])
    return from_edges(
        indices, targets, vertices, features=_features(stored, vertices), labels=stored["labels"], roles=roles,
        symmetrize=symmetrize, split_seed=split_seed, name=name,
    )  # fmt: skip


def _features(stored: Any, vertices: int) -> Array | None:
    """The feature matrix, dense: from CSR arrays, or as `features`."""
    if "features" in stored:
        return np.asarray(stored["features"], np.float32)
    if "feat_indptr" not in stored:
        return None
    rows, width = (int(n) for n in stored["feat_shape"])
    refuse_what_does_not_fit(rows * width * 4, f"a feature matrix of {rows} x {width}")
    indptr, columns = stored["feat_indptr"].astype(np.int64), stored["feat_indices"].astype(np.int64)
    if (
        rows != vertices
        or len(indptr) != rows + 1
        or (len(columns) and not 0 <= columns.min() <= columns.max() < width)
    ):
        raise UsageError(f"feat_* describe {rows} x {width} features for {vertices} vertices: give one row for each")
    dense = np.zeros((rows, width), np.float32)
    dense[np.repeat(np.arange(rows), np.diff(indptr)), columns] = stored.get("feat_data", 1.0)
    return dense


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
    if isinstance(source, Graph):
        return source
    if isinstance(source, (str, Path)):
        return load(str(source), symmetrize=symmetrize, split_seed=split_seed)
    if hasattr(source, "edge_index"):
        return _from_pyg(source, symmetrize, split_seed)
    features, labels = _array(features), _array(labels)
    if hasattr(source, "tocoo"):
        coo = source.tocoo()
        sources, targets, vertices = coo.col, coo.row, _square(coo.shape)
    else:
        sources, targets = _pairs(source)
        vertices = len(features) if features is not None else int(max(sources.max(), targets.max())) + 1
    roles = None
    if train is not None:
        roles = roles_of(vertices, *(_indices(a) for a in (train, val, test)))
    return from_edges(
        sources, targets, vertices, features=features, labels=labels, roles=roles,
        symmetrize=symmetrize, split_seed=split_seed,
    )  # fmt: skip


def _from_pyg(data: Any, symmetrize: bool, split_seed: int) -> Graph:
    edges = data.edge_index.cpu().numpy()
    vertices = int(data.num_nodes)
    roles = None
    if getattr(data, "train_mask", None) is not None:
        masks = [getattr(data, f"{name}_mask", None) for name in ("train", "val", "test")]
        roles = roles_of(vertices, *(np.zeros(0, int) if m is None else m.cpu().numpy() for m in masks))
    return from_edges(
        edges[0], edges[1], vertices, features=_array(data.x), labels=_array(data.y), roles=roles,
        symmetrize=symmetrize, split_seed=split_seed, name="the PyG Data",
    )  # fmt: skip


def _array(given: Any) -> Array | None:
    """A dense array out of NumPy, torch, SciPy or nested lists."""
    if given is None:
        return None
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    elif hasattr(given, "toarray"):
        given = given.toarray()
    return np.asarray(given)


def _indices(given: Any) -> Array:
    found = _array(given)
    return np.zeros(0, np.int64) if found is None else found


def _square(shape: tuple[int, int]) -> int:
    if shape[0] != shape[1]:
        raise UsageError(f"the adjacency matrix is {shape[0]} x {shape[1]}: give a square one")
    return int(shape[0])


def _pairs(source: Any) -> tuple[Array, Array]:
    pairs = _array(source)
    if pairs is None or pairs.ndim != 2 or 2 not in pairs.shape or not np.issubdtype(pairs.dtype, np.integer):
        raise UsageError(
            f"graph is a {type(source).__name__}: give a path, gen:..., a PyG Data, a SciPy sparse matrix, "
            "or pairs of vertex numbers"
        )
    return (pairs[0], pairs[1]) if pairs.shape[0] == 2 and pairs.shape[1] != 2 else (pairs[:, 0], pairs[:, 1])
