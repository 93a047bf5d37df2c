"""Graphs from all sources, and the errors for data that cannot be trained on."""

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
from tests.gnn.pyg_reference import edge_index, import_pyg
from tests.gnn.simulated_run import small_graph

from culm.errors import UsageError
from culm.gnn.graph import csr_graph, memory_check
from culm.gnn.graph.csr_graph import TEST, TRAIN, VAL, Graph, build_csr, random_split
from culm.gnn.graph.graph_generators import generate_graph
from culm.gnn.graph.graph_partition import assign_owners, balanced_bounds, build_parts
from culm.gnn.graph.graph_readers import load, to_graph

SHARED = Path(__file__).resolve().parents[3] / "../shared/graphs"
real_graphs = pytest.mark.skipif(not SHARED.is_dir(), reason="the real graphs are not available")
RING = np.array([[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]])
FEATURES = np.arange(8, dtype=np.float32).reshape(4, 2)
LABELS = np.array([0, 1, 0, 1])


def ring(**changes: Any) -> Graph:
    options: dict[str, Any] = {"features": FEATURES, "labels": LABELS, "train": [0, 1], "val": [2], "test": [3]}
    return to_graph(changes.pop("edges", RING), **{**options, **changes})


def same(one: Graph, other: Graph) -> bool:
    names = ("indptr", "indices", "features", "labels", "roles")
    return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in names)


def test_an_edge_list_a_scipy_matrix_and_a_pyg_data_are_the_same_graph() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    data = import_pyg("data").Data
    masks = {
        f"{n}_mask": torch.tensor([i in w for i in range(4)])
        for n, w in (("train", (0, 1)), ("val", (2,)), ("test", (3,)))
    }
    pyg_data = data(x=torch.tensor(FEATURES), edge_index=torch.tensor(RING), y=torch.tensor(LABELS), **masks)
    matrix = sparse.csr_matrix((np.ones(8), (RING[1], RING[0])), shape=(4, 4))
    assert same(ring(), to_graph(pyg_data))
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
def test_sorting_in_chunks_gives_the_same_edges(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, targets = np.random.default_rng(0).integers(0, 40, (2, 300))
    lists: list[set[int]] = [set() for _ in range(40)]
    for a, b in zip(sources.tolist(), targets.tolist(), strict=True):
        lists[a] |= {b} - {a}
        lists[b] |= {a} - {b}
    monkeypatch.setattr(csr_graph, "_EDGES_PER_THREAD", 300 // pieces)
    indptr, indices = build_csr(sources, targets, 40, symmetrize=True)
    assert [sorted(neighbours) for neighbours in lists] == [part.tolist() for part in np.split(indices, indptr[1:-1])]
    heads = np.repeat(np.arange(40), np.diff(indptr))
    assert np.array_equal(build_csr(indices, heads, 40, symmetrize=False)[1], indices)
    with pytest.raises(UsageError, match=f"1 of {len(indices) - 1} edges have no reverse"):
        build_csr(indices[1:], heads[1:], 40, symmetrize=False)


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
def test_untrainable_data_is_rejected_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        ring(**changes)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_reverse_edges_are_added_on_request() -> None:
    assert same(ring(), ring(edges=RING[:, :7], symmetrize=True))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("no-such.npz", "is not a file: give an npz"),
        ("gen:tree", "has the unknown generator 'tree': use rmat, sbm"),
        ("gen:rmat,depth=3", "has 'depth': the options of rmat are scale"),
        ("gen:rmat,scale=x", "write scale=NUMBER"),
        ("gen:rmat,scale=0", "scale=0: give a number from 1 to 40"),
        ("gen:sbm,vertices=5,classes=4", "5 vertices for 4 classes"),
        ("gen:rmat,scale=30", "GiB are free: use a smaller graph"),
        ("gen:rmat,scale=38", "at most 2147483647 can be numbered: use a smaller graph"),
    ],
)
def test_an_invalid_source_is_rejected(source: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(source)
    assert sentence in str(refused.value)


def test_a_damaged_npz_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK and nothing else")
    with pytest.raises(UsageError, match="cannot be read as npz"):
        load(str(tmp_path / "bad.npz"))


def test_a_graph_larger_than_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(UsageError, match=r"needs .* GiB and 0.0 GiB are free"):
        generate_graph("gen:rmat,scale=12")


@pytest.mark.parametrize("source", ["gen:rmat,scale=8,degree=6", "gen:sbm,vertices=200"])
def test_a_generated_graph_is_a_function_of_its_seed(source: str) -> None:
    assert same(load(source), load(source))
    assert not same(load(source), load(f"{source},seed=1"))


def test_generated_classes_need_the_neighbours() -> None:
    graph = load("gen:sbm,vertices=600,classes=3,degree=16")
    means = np.stack([graph.features[graph.labels == c].mean(0) for c in range(3)])
    neighbour_means = np.stack(
        [
            graph.features[graph.indices[a:b]].mean(0)
            for a, b in zip(graph.indptr, graph.indptr[1:], strict=False)
            if b > a
        ]
    )
    known = graph.degrees > 0

    def nearest_mean_accuracy(rows: Any, labels: Any) -> float:
        return float((((rows[:, None] - means) ** 2).sum(2).argmin(1) == labels).mean())

    assert (
        nearest_mean_accuracy(neighbour_means, graph.labels[known])
        > nearest_mean_accuracy(graph.features, graph.labels) + 0.1
    )


def test_a_random_split_gives_every_vertex_one_role_and_every_class_training_vertices() -> None:
    labels = np.array([0] * 100 + [1] * 7 + [-1] * 5)
    roles = random_split(labels, 3)
    assert np.array_equal(roles, random_split(labels, 3))
    assert set(np.unique(roles[labels < 0])) == {0}
    assert [int(((roles == TRAIN) & (labels == c)).sum()) for c in (0, 1)] == [20, 3]
    assert (roles[labels >= 0] > 0).all()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 12))
def test_intervals_are_balanced_by_edges_and_none_is_empty(weights: list[int], count: int) -> None:
    bounds = balanced_bounds(np.array(weights), count)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == min(count, len(weights)) + 1
    assert (np.diff(bounds) > 0).all()
    loads = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(loads) <= sum(weights) / len(loads) + 2 * max(weights) + len(loads)


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_parts_cover_the_graph_and_ghosts_match_what_their_owner_scatters(servers: int) -> None:
    graph = small_graph()
    parts = build_parts(graph, assign_owners(graph, servers), 3)
    assert sorted(np.concatenate([p.vertices for p in parts]).tolist()) == list(range(graph.vertices))
    names = [np.full(p.vertex_count + p.ghosts, -1) for p in parts]
    for part in parts:
        names[part.server][: part.vertex_count] = part.vertices
        for peer, exchange in part.ghost_exchanges.items():
            for i in range(part.intervals):
                sent = part.vertices[exchange.rows[exchange.row_bounds[i] : exchange.row_bounds[i + 1]]]
                bounds = parts[peer].ghost_bounds[part.server]
                names[peer][bounds[i] : bounds[i + 1]] = sent
    edges = {(int(s), int(t)) for s, t in edge_index(graph).T.tolist()} | {(v, v) for v in range(graph.vertices)}
    part_edges = set()
    for part in parts:
        targets = np.repeat(part.vertices, np.diff(part.indptr))
        part_edges |= set(zip(names[part.server][part.indices].tolist(), targets.tolist(), strict=True))
    assert part_edges == edges


def test_metis_cuts_fewer_edges_than_a_random_partition() -> None:
    graph = load("gen:sbm,vertices=400,classes=4,degree=12,inside=0.95")
    targets = np.repeat(np.arange(graph.vertices), graph.degrees)

    def cut_edges(owner: Any) -> int:
        return int((owner[targets] != owner[graph.indices]).sum())

    assert cut_edges(assign_owners(graph, 4)) < cut_edges(np.arange(graph.vertices) % 4) / 2


def test_more_servers_than_vertices_are_refused() -> None:
    with pytest.raises(UsageError, match="--servers 5 for 4 vertices: a server needs at least one"):
        assign_owners(ring(), 5)


def test_several_servers_without_metis_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "pymetis", None)
    with pytest.raises(UsageError, match=r"pip install 'culm\[gnn\]'"):
        assign_owners(ring(), 2)
