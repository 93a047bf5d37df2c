"""Conversion of users' graphs: accepted formats, and the errors for invalid data."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from culm.errors import UsageError
from culm.gnn.graph.csr_graph import TEST, TRAIN, VAL, Graph
from culm.gnn.graph.graph_readers import load, to_graph

ENDS = np.array([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])
LABELS = np.array([0, 1, 0, 1])
FEATURES = np.arange(8, dtype=np.float32).reshape(4, 2)
MATRIX = sparse.csr_matrix((np.ones(8), (ENDS[1], ENDS[0])), shape=(4, 4))


def data(**fields: Any) -> Any:
    """The fields of a PyG Data that the reader uses."""
    defaults = {"x": torch.from_numpy(FEATURES), "y": torch.from_numpy(LABELS), "edge_index": torch.from_numpy(ENDS)}
    return SimpleNamespace(num_nodes=4, **{**defaults, **fields})


def stored(folder: Path, **fields: Any) -> Graph:
    defaults = {"indptr": MATRIX.indptr, "indices": MATRIX.indices, "labels": LABELS, "features": FEATURES}
    np.savez(folder / "g.npz", **{name: value for name, value in {**defaults, **fields}.items() if value is not None})
    return load(str(folder / "g.npz"))


@pytest.mark.parametrize(
    "features",
    [
        torch.from_numpy(FEATURES).double(),
        torch.from_numpy(FEATURES).to(torch.int8),
        torch.from_numpy(FEATURES).bfloat16(),
        torch.from_numpy(FEATURES).to_sparse(),
    ],
    ids=["float64", "int8", "bfloat16", "sparse"],
)
def test_features_of_any_type_are_converted(features: Any) -> None:
    converted = to_graph(data(x=features)).features
    assert converted.dtype == np.float32
    assert np.array_equal(converted, FEATURES)


def test_a_column_of_labels_and_labels_that_are_whole_floats_are_labels() -> None:
    for labels in (LABELS[:, None], LABELS.astype(np.float64)):
        assert np.array_equal(to_graph(MATRIX, features=FEATURES, labels=labels).labels, LABELS)


def test_masks_of_bytes_are_masks_and_not_vertex_numbers() -> None:
    masks = {"train_mask": [1, 1, 0, 0], "val_mask": [0, 0, 1, 0], "test_mask": [0, 0, 0, 1]}
    graph = to_graph(data(**{name: torch.tensor(mask, dtype=torch.uint8) for name, mask in masks.items()}))
    assert graph.roles.tolist() == [TRAIN, TRAIN, VAL, TEST]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"x": torch.ones(4, 2, dtype=torch.complex64)}, "features holds complex64: give numbers"),
        ({"x": torch.full((4, 2), 1e300, dtype=torch.float64)}, "features of vertex 0 are not finite"),
        ({"y": torch.eye(4)}, r"labels has the shape \(4, 4\): give one class for every vertex"),
        ({"y": torch.tensor([0, 1, float("nan"), 1])}, "labels holds nan: give whole numbers"),
        ({"y": torch.tensor([0.5, 1, 0, 1])}, "labels holds 0.5: give whole numbers"),
        ({"y": torch.tensor([0, 10**12, 0, 1])}, "labels goes up to 1000000000000 for 4 vertices: number the classes"),
        ({"train_mask": torch.ones(4, 3)}, r"the train set has the shape \(4, 3\): give one split"),
        ({"val_mask": torch.ones(4)}, "val is given and train is not: name the vertices to learn from"),
        ({"edge_index": None}, "the PyG Data has no edge_index"),
        ({"edge_index": torch.ones(3, 4, dtype=torch.long)}, r"edge_index has the shape \(3, 4\) of int64"),
    ],
)
def test_an_invalid_field_of_a_data_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        to_graph(data(**fields))


@pytest.mark.parametrize(
    ("source", "arrays", "sentence"),
    [
        (MATRIX, {"labels": np.array(["a"] * 4)}, "labels holds <U1: give whole numbers"),
        (MATRIX, {"features": np.array([["a"]] * 4)}, "features holds <U1: give numbers"),
        (MATRIX, {"train": [-1, 2]}, "the train set names vertex -1, and the graph has 4"),
        (MATRIX, {"test": [2]}, "test is given and train is not"),
        ([(0, 1), (2,)], {}, "graph has rows of different lengths"),
        (np.zeros((0, 2), int), {"features": None}, "graph has no features"),
        (data(), {}, "features is given together with a PyG Data, which has its own"),
    ],
)
def test_an_invalid_array_argument_is_named(source: Any, arrays: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        to_graph(source, **{"features": FEATURES, "labels": LABELS, **arrays})


def test_edge_weights_are_ignored_with_a_warning() -> None:
    weighed = MATRIX.copy()
    weighed.data = np.array([1.0, 2, 1, 2, 1, 2, 1, 2])
    with pytest.warns(UserWarning, match="weights from 1 to 2: each counts the same here"):
        assert to_graph(weighed, features=FEATURES, labels=LABELS).edges == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_graph(MATRIX, features=FEATURES, labels=LABELS)


SPARSE = sparse.csr_matrix(FEATURES)
CSR = {"indptr": None, "indices": None}


@pytest.mark.parametrize(
    "fields",
    [
        {**CSR, "edge_index": ENDS, "labels": None, "y": LABELS, "features": None, "x": FEATURES},
        {**CSR, "edges": ENDS.T},
        {**CSR, "adj_indptr": MATRIX.indptr, "adj_indices": MATRIX.indices, "adj_data": np.ones(8),
         "features": None, "attr_indptr": SPARSE.indptr, "attr_indices": SPARSE.indices,
         "attr_data": SPARSE.data, "attr_shape": np.array(FEATURES.shape)},
    ],
    ids=["as in PyG", "an edge list", "as in gnn-benchmark"],
)  # fmt: skip
def test_an_npz_may_use_the_names_of_other_libraries(tmp_path: Path, fields: dict[str, Any]) -> None:
    graph, ours = stored(tmp_path, **fields), stored(tmp_path)
    for part in ("indptr", "indices", "features", "labels", "roles"):
        assert np.array_equal(getattr(graph, part), getattr(ours, part))


def test_an_npz_may_have_masks_of_bytes(tmp_path: Path) -> None:
    masks = {"train_mask": np.array([1, 1, 0, 0], np.uint8), "test_mask": np.array([False, False, False, True])}
    assert stored(tmp_path, **masks).roles.tolist() == [TRAIN, TRAIN, 0, TEST]


def test_an_npz_with_a_test_set_but_no_train_set_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="test is given and train is not"):
        stored(tmp_path, test_idx=np.array([3]))


def test_features_that_are_stored_twice_add_up(tmp_path: Path) -> None:
    twice = {"feat_indptr": np.array([0, 2, 2, 2, 2]), "feat_indices": np.array([1, 1]), "feat_shape": np.array([4, 2])}
    assert stored(tmp_path, features=None, **twice, feat_data=np.array([2, 3])).features[0].tolist() == [0, 5]


def test_a_damaged_npz_never_raises_anything_but_a_usage_error(tmp_path: Path) -> None:
    arrays = {"indptr": MATRIX.indptr, "indices": MATRIX.indices, "labels": LABELS, "features": FEATURES}
    np.savez_compressed(tmp_path / "g.npz", **arrays)
    whole = (tmp_path / "g.npz").read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        (tmp_path / "g.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(UsageError):
            load(str(tmp_path / "g.npz"))
            continue
        refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"labels": None}, "g has no array 'labels'"),
        ({**CSR, "edge_index": ENDS[0]}, r"edge_index has the shape \(8,\): give two rows"),
        ({**CSR, "edge_index": ENDS + 0.5}, "edge_index holds 0.5: give whole numbers"),
        ({"labels": np.int64(1)}, r"labels has the shape \(\)"),
        ({"indices": MATRIX.indices + 0.5}, "indices holds 1.5: give whole numbers"),
        ({"indptr": MATRIX.indptr[None]}, r"indptr has the shape \(1, 5\)"),
        ({"indptr": MATRIX.indptr + np.array([1, 0, 0, 0, 0])}, "indptr does not describe 8 indices"),
        ({"features": None, "feat_indptr": MATRIX.indptr}, "g has no array 'feat_shape'"),
    ],
)
def test_an_invalid_array_of_an_npz_is_named(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        stored(tmp_path, **fields)


SPARSE_FEATURES = {
    "feat_indptr": MATRIX.indptr,
    "feat_indices": MATRIX.indices,
    "feat_shape": np.array([4, 4]),
    "features": None,
}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"feat_shape": np.array([4])}, r"feat_shape is \[4\]: give rows and columns"),
        ({"feat_shape": np.array([3, 4])}, "feat_.* describe 3 x 4 features for 4 vertices"),
        ({"feat_shape": np.array([4, 3])}, "feat_indices goes up to 3 for 3 features"),
        ({"feat_data": np.ones(7)}, "feat_data has 7 values for 8 feat_indices"),
    ],
)
def test_an_invalid_array_of_sparse_features_is_named(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    assert np.array_equal(stored(tmp_path, **SPARSE_FEATURES).features, MATRIX.toarray())
    with pytest.raises(UsageError, match=sentence):
        stored(tmp_path, **{**SPARSE_FEATURES, **fields})


def test_an_npz_may_name_the_train_set_alone(tmp_path: Path) -> None:
    assert stored(tmp_path, train_idx=np.array([0, 1])).roles.tolist() == [TRAIN, TRAIN, 0, 0]


def test_a_file_that_is_not_an_npz_is_rejected_without_mentioning_pickles(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 0\n")
    np.save(tmp_path / "matrix.npy", MATRIX.toarray())
    for name in ("edges.txt", "matrix.npy"):
        with pytest.raises(UsageError, match=r"cannot be read as npz: write one with numpy.savez"):
            load(str(tmp_path / name))


def test_an_infinite_generator_option_is_rejected() -> None:
    with pytest.raises(UsageError, match="has degree=inf: give a number of at least 1"):
        load("gen:rmat,scale=5,degree=inf")
