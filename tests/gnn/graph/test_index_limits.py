"""Sizes beyond 32-bit indices: handled or refused. The limit is lowered, so that small graphs exceed it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pymetis
import pytest
import torch
from tests.gnn.simulated_run import small_graph, small_model

from culm.errors import RunError, UsageError
from culm.gnn import run_preparation, train
from culm.gnn.graph import index_limits
from culm.gnn.graph.adjacency import Adjacency, gather_whole_graph
from culm.gnn.graph.csr_graph import graph_from_edges
from culm.gnn.graph.graph_generators import generate_graph
from culm.gnn.graph.graph_partition import assign_owners, build_parts
from culm.gnn.server.graph_shard import GraphShard
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.tensor_link import frame_message
from culm.transport.frames import frame_codec

GRAPH = small_graph()
WIDTH = 6
PAST_32_BITS = 2**31 + 7


@pytest.fixture(params=[WIDTH + 1, 100, GRAPH.vertices * WIDTH - 1])
def low_limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_limits, "MAX_INDEX", request.param)


def whole_adjacency() -> Adjacency:
    pointers, columns = torch.from_numpy(GRAPH.indptr), torch.from_numpy(GRAPH.indices)
    weights = torch.linspace(0.5, 1.5, GRAPH.edges)
    return Adjacency(pointers, columns, weights, 0, GRAPH.vertices, GRAPH.vertices)


def dense(values: torch.Tensor) -> torch.Tensor:
    matrix = torch.zeros(GRAPH.vertices, GRAPH.vertices)
    matrix[np.repeat(np.arange(GRAPH.vertices), GRAPH.degrees), GRAPH.indices] = values
    return matrix


def test_edges_at_positions_past_32_bits_have_offsets_within_their_interval() -> None:
    indptr = torch.tensor([0, PAST_32_BITS, PAST_32_BITS + 2, PAST_32_BITS + 5])
    one_column, one_weight = torch.tensor([3], dtype=torch.int32), torch.ones(1)
    adjacency = Adjacency(indptr, one_column.expand(2**31 + 20), one_weight.expand(2**31 + 20), 1, 3, 4)
    assert adjacency.edges == slice(PAST_32_BITS, PAST_32_BITS + 5)
    assert adjacency.offsets.tolist() == [0, 2, 5]
    assert adjacency.offsets.dtype == torch.int32


def test_offsets_of_a_part_and_of_its_tables_have_64_bits() -> None:
    (part,) = build_parts(GRAPH, assign_owners(GRAPH, 1), 2)
    assert part.indptr.dtype == np.int64
    features, labels, roles = map(torch.from_numpy, (GRAPH.features, GRAPH.labels, GRAPH.roles))
    shard = GraphShard(part, small_model(GRAPH, "gat"), features, labels, roles)
    assert shard.tables["indptr"].dtype == torch.int64


@pytest.mark.usefixtures("low_limit")
def test_a_table_with_too_many_values_for_one_product_is_gathered_in_blocks() -> None:
    adjacency, table = whole_adjacency(), torch.randn(GRAPH.vertices, WIDTH)
    out = torch.full_like(table, torch.nan)
    adjacency.gather(table, out)
    torch.testing.assert_close(out, dense(torch.linspace(0.5, 1.5, GRAPH.edges)) @ table)


def test_a_weighted_gather_of_a_large_table_is_split_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 2
    adjacency, table = whole_adjacency(), torch.randn(GRAPH.vertices, heads * WIDTH)
    values = torch.rand(GRAPH.edges, heads)
    expected = torch.cat([dense(v) @ t for v, t in zip(values.t(), table.split(WIDTH, 1), strict=True)], 1)
    for limit in (GRAPH.vertices, 2 * GRAPH.vertices, 5 * GRAPH.vertices):
        monkeypatch.setattr(index_limits, "MAX_INDEX", limit)
        out = torch.full_like(table, torch.nan)
        adjacency.gather_weighted(values, table, out)
        torch.testing.assert_close(out, expected)


@pytest.mark.usefixtures("low_limit")
def test_a_whole_graph_with_too_many_edges_for_one_product_is_gathered_in_blocks() -> None:
    table = torch.randn(GRAPH.vertices, WIDTH)
    gathered = gather_whole_graph(GRAPH.indptr, GRAPH.indices, table)
    torch.testing.assert_close(gathered, dense(torch.ones(GRAPH.edges)) @ table)


def test_too_many_vertices_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(UsageError, match="has 2147483648 vertices and at most 2147483647 can be numbered: use a"):
        generate_graph("gen:rmat,scale=31")
    ends = np.array([0, 1])
    with pytest.raises(UsageError, match="the graph has 2147483648 vertices"):
        graph_from_edges(ends, ends[::-1], 2**31, features=None, labels=None, name="the graph")


def test_a_graph_too_large_for_the_installed_metis_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymetis, "zero_copy_dtype", lambda: np.dtype(np.int8))
    with pytest.raises(UsageError) as refused:
        train(GRAPH, "gcn", servers=2)
    assert str(refused.value) == (
        f"--servers 2 for {GRAPH.edges} edges and 90 vertices: the installed METIS counts at most 127 "
        "of both together, use --servers 1 or a pymetis with 64-bit indices"
    )


@pytest.mark.parametrize(
    ("limit", "hidden", "unit"), [(150, 1, "edges"), (GRAPH.edges + GRAPH.vertices, 40, "values in its rows")]
)
def test_an_interval_too_large_for_a_product_is_refused_with_the_intervals_to_give(
    limit: int, hidden: int, unit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(index_limits, "MAX_INDEX", limit)
    model, owner = small_model(GRAPH, hidden=hidden), assign_owners(GRAPH, 1)
    with pytest.raises(UsageError, match=rf"an interval of server 0 has \d+ {unit} and at most \d+ .*--intervals") as e:
        run_preparation.write_parts(GRAPH, model, owner, 1, tmp_path)
    advised = int(str(e.value).rpartition(" ")[2])
    assert run_preparation.write_parts(GRAPH, model, owner, advised, tmp_path) == advised


def test_the_default_intervals_keep_the_edges_of_an_interval_below_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_preparation.default_intervals(GRAPH, 1, 1, "sync") == 1
    monkeypatch.setattr(index_limits, "MAX_INDEX", 150)
    intervals = run_preparation.default_intervals(GRAPH, 1, 1, "sync")
    assert intervals > 1
    run_preparation.write_parts(GRAPH, small_model(GRAPH, hidden=2), assign_owners(GRAPH, 1), intervals, tmp_path)


def test_a_header_that_no_receiver_would_accept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_codec, "MAX_HEADER_BYTES", 100)
    with pytest.raises(RunError, match=r"the header of a ServerGradient has .* at most 100 are allowed"):
        frame_message(messages.ServerGradient(1, 2, 3, 4, tuple("abcdefghij" for _ in range(20))))
