"""Graphs from anywhere, and one clear sentence for those that can not be trained on."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.gnn.house import small_graph
from tests.gnn.peer import edge_index, pyg

from culm.errors import UsageError
from culm.gnn import graph as graphs
from culm.gnn import memory
from culm.gnn.generate import generate
from culm.gnn.graph import TEST, TRAIN, VAL, Graph, csr, split
from culm.gnn.partition import balanced, cut, owners
from culm.gnn.readers import as_graph, load

SHARED = Path(__file__).resolve().parents[2] / "../shared/graphs"
real_graphs = pytest.mark.skipif(not SHARED.is_dir(), reason="the real graphs do not lie beside this checkout")
RING = np.array([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]])
FEATURES = np.arange(8, dtype=np.float32).reshape(4, 2)
LABELS = np.array([0, 1, 0, 1])


def ring(**changes: Any) -> Graph:
    options: dict[str, Any] = {"features": FEATURES, "labels": LABELS, "train": [0, 1], "val": [2], "test": [3]}
    return as_graph(changes.pop("edges", RING), **{**options, **changes})


def same(one: Graph, other: Graph) -> bool:
    names = ("indptr", "indices", "features", "labels", "roles")
    return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in names)


def test_an_edge_list_a_scipy_matrix_and_a_pyg_data_are_the_same_graph() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    data = pyg("data").Data
    masks = {
        f"{n}_mask": torch.tensor([i in w for i in range(4)])
        for n, w in (("train", (0, 1)), ("val", (2,)), ("test", (3,)))
    }
    made = data(x=torch.tensor(FEATURES), edge_index=torch.tensor(RING), y=torch.tensor(LABELS), **masks)
    matrix = sparse.csr_matrix((np.ones(8), (RING[1], RING[0])), shape=(4, 4))
    assert same(ring(), as_graph(made))
    assert same(ring(), ring(edges=matrix))
    assert same(ring(), ring(edges=[tuple(map(int, pair)) for pair in RING.T]))


def test_an_npz_without_pickles_is_read(tmp_path: Path) -> None:
    graph = ring()
    np.savez(tmp_path / "ring.npz", indptr=graph.indptr, indices=graph.indices, labels=LABELS, features=FEATURES,
             train_idx=[0, 1], val_idx=[2], test_idx=[3])  # fmt: skip
    assert same(graph, load(str(tmp_path / "ring.npz")))


@real_graphs
def test_the_real_graphs_have_the_sizes_that_are_published() -> None:
    cora = load(str(SHARED / "cora.npz"))
    assert (cora.vertices, cora.edges // 2, cora.width, cora.classes) == (2708, 5278, 1433, 7)
    assert [int((cora.roles == role).sum()) for role in (TRAIN, VAL, TEST)] == [140, 500, 1000]
    citeseer = load(str(SHARED / "citeseer.npz"))
    assert (citeseer.labels < 0).sum() == 15


@real_graphs
def test_a_graph_without_features_is_refused() -> None:
    with pytest.raises(UsageError, match="pubmed-structure has no features: give"):
        load(str(SHARED / "pubmed-structure.npz"))


def test_self_loops_and_duplicates_are_dropped() -> None:
    edges = np.concatenate([RING, RING[:, :2], [[2], [2]]], 1)
    assert same(ring(), ring(edges=edges))


@pytest.mark.parametrize("pieces", [1, 3, 10])
def test_edges_sorted_in_pieces_are_the_same_edges(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, targets = np.random.default_rng(0).integers(0, 40, (2, 300))
    lists: list[set[int]] = [set() for _ in range(40)]
    for a, b in zip(sources.tolist(), targets.tolist(), strict=True):
        lists[a] |= {b} - {a}
        lists[b] |= {a} - {b}
    monkeypatch.setattr(graphs, "_AT_ONCE", 300 // pieces)
    indptr, indices = csr(sources, targets, 40, symmetrize=True)
    assert [sorted(own) for own in lists] == [part.tolist() for part in np.split(indices, indptr[1:-1])]
    heads = np.repeat(np.arange(40), np.diff(indptr))
    assert np.array_equal(csr(indices, heads, 40, symmetrize=False)[1], indices)
    with pytest.raises(UsageError, match=f"1 of {len(indices) - 1} edges have no reverse"):
        csr(indices[1:], heads[1:], 40, symmetrize=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"edges": RING[:, :7]}, "1 of 7 edges have no reverse, the first from 3 to 0: add the reverse edges, or ask"),
        ({"edges": np.array([[0, 4], [4, 0]])}, "source 4, and the graph has 4 vertices: number them from 0"),
        ({"edges": np.array([[0, -1], [-1, 0]])}, "source -1, and the graph has 4 vertices"),
        ({"features": None}, "has no features: give"),
        ({"labels": None}, "has no labels: give"),
        ({"labels": LABELS[:3]}, "labels has 3 rows for 4 vertices: give one row for each"),
        ({"features": FEATURES[:, :0]}, "features has the shape"),
        ({"features": np.where(FEATURES == 5, np.nan, FEATURES)}, "features of vertex 2 are not finite"),
        ({"train": [0]}, "class 1 has no vertex in the train set"),
        ({"val": [1, 2]}, "vertex 1 is in the val set and in another one"),
        ({"train": []}, "no vertex is in the train set"),
        ({"labels": np.array([0, 1, 0, -1])}, "vertex 3 is in a split and has no label"),
        ({"edges": 7}, "graph is a int: give a path"),
    ],
)
def test_what_can_not_be_trained_on_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        ring(**changes)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_reverse_edges_are_added_on_request() -> None:
    assert same(ring(), ring(edges=RING[:, :7], symmetrize=True))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("no-such.npz", "is no file: give an npz"),
        ("gen:tree", "names the generator 'tree': there are rmat, sbm"),
        ("gen:rmat,depth=3", "has 'depth': rmat knows scale"),
        ("gen:rmat,scale=x", "write scale=NUMBER"),
        ("gen:rmat,scale=0", "scale=0: give a number from 1 to 40"),
        ("gen:sbm,vertices=5,classes=4", "5 vertices for 4 classes"),
        ("gen:rmat,scale=38", "GiB are free: take a smaller graph"),
    ],
)
def test_a_source_that_makes_no_graph_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(source)
    assert sentence in str(refused.value)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK and nothing else")
    with pytest.raises(UsageError, match="can not be read as npz"):
        load(str(tmp_path / "bad.npz"))


def test_a_graph_larger_than_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    with pytest.raises(UsageError, match=r"needs .* GiB and 0.0 GiB are free"):
        generate("gen:rmat,scale=12")


@pytest.mark.parametrize("source", ["gen:rmat,scale=8,degree=6", "gen:sbm,vertices=200"])
def test_a_generated_graph_is_a_function_of_its_seed(source: str) -> None:
    assert same(load(source), load(source))
    assert not same(load(source), load(f"{source},seed=1"))


def test_neighbours_tell_the_class_that_features_alone_do_not() -> None:
    graph = load("gen:sbm,vertices=600,classes=3,degree=16")
    means = np.stack([graph.features[graph.labels == c].mean(0) for c in range(3)])
    around = np.stack(
        [
            graph.features[graph.indices[a:b]].mean(0)
            for a, b in zip(graph.indptr, graph.indptr[1:], strict=False)
            if b > a
        ]
    )
    known = graph.degrees > 0

    def right(rows: Any, labels: Any) -> float:
        return float((((rows[:, None] - means) ** 2).sum(2).argmin(1) == labels).mean())

    assert right(around, graph.labels[known]) > right(graph.features, graph.labels) + 0.1


def test_a_drawn_split_gives_every_vertex_one_role_and_every_class_something_to_learn_from() -> None:
    labels = np.array([0] * 100 + [1] * 7 + [-1] * 5)
    roles = split(labels, 3)
    assert np.array_equal(roles, split(labels, 3))
    assert set(np.unique(roles[labels < 0])) == {0}
    assert [int(((roles == TRAIN) & (labels == c)).sum()) for c in (0, 1)] == [20, 3]
    assert (roles[labels >= 0] > 0).all()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 12))
def test_intervals_are_balanced_by_edges_and_none_is_empty(weights: list[int], count: int) -> None:
    bounds = balanced(np.array(weights), count)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == min(count, len(weights)) + 1
    assert (np.diff(bounds) > 0).all()
    loads = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(loads) <= sum(weights) / len(loads) + 2 * max(weights) + len(loads)


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_parts_cover_the_graph_and_ghosts_are_where_their_owner_sends_them(servers: int) -> None:
    graph = small_graph()
    parts = cut(graph, owners(graph, servers), 3)
    assert sorted(np.concatenate([p.vertices for p in parts]).tolist()) == list(range(graph.vertices))
    names = [np.full(p.size + p.ghosts, -1) for p in parts]
    for part in parts:
        names[part.server][: part.size] = part.vertices
        for peer, exchange in part.sends.items():
            for i in range(part.intervals):
                sent = part.vertices[exchange.rows[exchange.row_bounds[i] : exchange.row_bounds[i + 1]]]
                at = parts[peer].ghost_bounds[part.server]
                names[peer][at[i] : at[i + 1]] = sent
    edges = {(int(s), int(t)) for s, t in edge_index(graph).T.tolist()} | {(v, v) for v in range(graph.vertices)}
    found = set()
    for part in parts:
        targets = np.repeat(part.vertices, np.diff(part.indptr))
        found |= set(zip(names[part.server][part.indices].tolist(), targets.tolist(), strict=True))
    assert found == edges


def test_metis_cuts_fewer_edges_than_chance() -> None:
    graph = load("gen:sbm,vertices=400,classes=4,degree=12,inside=0.95")
    targets = np.repeat(np.arange(graph.vertices), graph.degrees)

    def cut_edges(owner: Any) -> int:
        return int((owner[targets] != owner[graph.indices]).sum())

    assert cut_edges(owners(graph, 4)) < cut_edges(np.arange(graph.vertices) % 4) / 2


def test_more_servers_than_vertices_are_refused() -> None:
    with pytest.raises(UsageError, match="--servers 5 for 4 vertices: a server needs at least one"):
        owners(ring(), 5)


def test_several_servers_without_metis_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "pymetis", None)
    with pytest.raises(UsageError, match=r"pip install 'culm\[gnn\]'"):
        owners(ring(), 2)
