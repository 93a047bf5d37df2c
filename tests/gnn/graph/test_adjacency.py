"""Sums and products along edges with several heads, in both matrix layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from culm.gnn.graph import adjacency
from culm.gnn.graph.adjacency import Adjacency


@st.composite
def cases(draw: st.DrawFn) -> tuple[Adjacency, Tensor, Tensor, Tensor, int]:
    """Edges of an interval (some vertices may have none), a value per edge and head, rows of targets, a table."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=2, max_size=7))
    heads, width, columns = draw(st.integers(1, 4)), draw(st.integers(1, 11)), draw(st.integers(4, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    indptr = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.cat([torch.randperm(columns, dtype=torch.int32, generator=random)[:size] for size in sizes])
    first = draw(st.integers(0, len(sizes) - 1))
    interval_edges = Adjacency(indptr, indices, torch.ones(len(indices)), first, len(sizes), columns)
    values = torch.randn(len(interval_edges.columns), heads, generator=random)
    rows = torch.randn(len(sizes) - first, heads * width, generator=random)
    table = torch.randn(columns, heads * width + 3, generator=random)[:, : heads * width]
    return interval_edges, values, rows, table, heads


@pytest.fixture(params=[0, 1 << 21], ids=["head by head", "all heads at once"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjacency, "_MAX_ALL_HEADS_ENTRIES", request.param)


@pytest.mark.usefixtures("layout")
class TestUnderSeveralHeads:
    """Both layouts are compared with plain loops over edges."""

    @given(cases())
    def test_gather_weights_each_head_by_its_own_values(
        self, case: tuple[Adjacency, Tensor, Tensor, Tensor, int]
    ) -> None:
        adjacency, values, rows, table, heads = case
        out = torch.full_like(rows, torch.nan)
        adjacency.gather_weighted(values, table, out)
        expected = torch.zeros(len(rows), heads, rows.shape[1] // heads)
        for edge, (target, source) in enumerate(_edges(adjacency)):
            expected[target] += values[edge][:, None] * table[source].view(heads, -1)
        torch.testing.assert_close(out, expected.view_as(out))

    @given(cases())
    def test_edge_dot_products_are_per_head(self, case: tuple[Adjacency, Tensor, Tensor, Tensor, int]) -> None:
        adjacency, values, rows, table, heads = case
        expected = torch.zeros_like(values)
        for edge, (target, source) in enumerate(_edges(adjacency)):
            expected[edge] = (rows[target].view(heads, -1) * table[source].view(heads, -1)).sum(1)
        torch.testing.assert_close(adjacency.edge_dot_products(rows, table, heads), expected)


def _edges(adjacency: Adjacency) -> list[tuple[int, int]]:
    targets = torch.arange(len(adjacency.offsets) - 1).repeat_interleave(adjacency.offsets.diff())
    return list(zip(targets.tolist(), adjacency.columns.tolist(), strict=True))
