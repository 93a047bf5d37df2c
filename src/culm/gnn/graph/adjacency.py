"""Sparse products over the edges of an interval: the forward and backward gathers on a server's tables.

A sum over neighbours is a product with a sparse matrix whose rows are the vertices of one interval (MKL, with 32-bit
indices). Gradients are gathered over the same edges, since the adjacency is symmetric. A table with more values than
32-bit indices can count is multiplied in blocks: MKL would crash or return wrong sums without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from culm.gnn.graph import index_limits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[Any]

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
_MAX_ALL_HEADS_ENTRIES = 1 << 21
"""Up to this many entries, the edges of an interval are laid out for all heads in one matrix. Beyond it, the memory
costs more than one product per head."""


def csr_matrix(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse CSR matrix without checking its invariants: the check would take longer than a product."""
    return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False)


class Adjacency:
    """Edges of one interval. Rows are the vertices of the interval, columns the server's own vertices and ghosts."""

    def __init__(self, indptr: Tensor, indices: Tensor, weights: Tensor, first: int, last: int, columns: int) -> None:
        low, high = int(indptr[first]), int(indptr[last])
        self.edges = slice(low, high)
        self.offsets = (indptr[first : last + 1] - low).to(indices.dtype)
        self.columns = indices[low:high]
        self._shape = (last - first, columns)
        self._weights = weights[low:high]
        self._matrix = self._matrix_with_values(self._weights)
        self._source_blocks_cache: dict[int, list[tuple[slice, Tensor]]] = {}
        self._all_heads_cache: _AllHeadsMatrix | None = None

    def gather(self, table: Tensor, out: Tensor) -> None:
        """Sum the neighbours' rows: GA and ∇GA of a GCN, whose normalised adjacency is symmetric."""
        block_rows = index_limits.MAX_INDEX // table.shape[1]
        if len(table) <= block_rows:
            torch.addmm(out, self._matrix, table, beta=0, out=out)
            return
        out.zero_()
        for sources, matrix in self._source_blocks(block_rows):
            torch.addmm(out, matrix, table[sources], out=out)

    def gather_weighted(self, values: Tensor, table: Tensor, out: Tensor) -> None:
        """Sum the neighbours' rows weighted by attention (GA of a GAT): column block k of the table is weighted by
        column k of `values`, which has one row per edge."""
        heads = values.shape[1]
        width = out.shape[1] // heads
        if self._fits_all_heads(heads, width):
            gathered = self._all_heads_matrix(heads).matrix(values) @ table.reshape(-1, width)
            out.copy_(gathered.view(out.shape))
            return
        block_width = min(width, index_limits.MAX_INDEX // len(table))
        for head in range(heads):
            matrix = self._matrix_with_values(values[:, head].contiguous())
            for first in range(head * width, (head + 1) * width, block_width):
                block = slice(first, min(first + block_width, (head + 1) * width))
                out[:, block] = matrix @ table[:, block].contiguous()

    def edge_dot_products(self, rows: Tensor, table: Tensor, heads: int) -> Tensor:
        """Return, for each edge and head, the dot product of the target's row in `rows` and the source's row in
        `table`."""
        targets, sources = (_pad_columns(block.reshape(len(block), heads, -1)) for block in (rows, table))
        if self._fits_all_heads(heads, targets.shape[-1]):
            all_heads = self._all_heads_matrix(heads)
            return all_heads.values(
                _sampled_product(all_heads.matrix(None), targets.flatten(0, 1), sources.flatten(0, 1))
            )
        products = torch.empty(len(self.columns), heads)
        pattern = self._matrix_with_values(torch.zeros(len(self.columns)))
        for head in range(heads):
            products[:, head] = _sampled_product(pattern, targets[:, head].contiguous(), sources[:, head].contiguous())
        return products

    def sum_edges(self, values: Tensor) -> Tensor:
        """Return, for each vertex, the sum over its edges."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets.long(), axis=0)

    def _matrix_with_values(self, values: Tensor) -> Tensor:
        return csr_matrix(self.offsets, self.columns, values, self._shape)

    def _fits_all_heads(self, heads: int, width: int) -> bool:
        """Whether a matrix of all heads stays below the memory limit, and 32-bit indices can count the values of its
        table."""
        table_values = self._shape[1] * heads * width
        return len(self.columns) * heads <= _MAX_ALL_HEADS_ENTRIES and table_values <= index_limits.MAX_INDEX

    def _source_blocks(self, block_rows: int) -> list[tuple[slice, Tensor]]:
        """Return blocks of the table's rows, each with the matrix of the edges from these rows. Made once per size."""
        if block_rows not in self._source_blocks_cache:
            count, total = self._shape
            targets = torch.arange(count).repeat_interleave(self.offsets.diff())
            blocks = []
            for first in range(0, total, block_rows):
                last = min(first + block_rows, total)
                edges = ((self.columns >= first) & (self.columns < last)).nonzero().squeeze(1)
                offsets = torch.zeros_like(self.offsets)
                torch.cumsum(torch.bincount(targets[edges], minlength=count), 0, out=offsets[1:])
                matrix = csr_matrix(offsets, self.columns[edges] - first, self._weights[edges], (count, last - first))
                blocks.append((slice(first, last), matrix))
            self._source_blocks_cache[block_rows] = blocks
        return self._source_blocks_cache[block_rows]

    def _all_heads_matrix(self, heads: int) -> _AllHeadsMatrix:
        if self._all_heads_cache is None or self._all_heads_cache.heads != heads:
            self._all_heads_cache = _AllHeadsMatrix(self.offsets, self.columns, heads, self._shape)
        return self._all_heads_cache


def gather_whole_graph(indptr: Array, indices: Array, table: Tensor) -> Tensor:
    """Return, for each vertex of a graph, the sum of its neighbours' rows in the table."""
    pointers, columns = torch.from_numpy(indptr), torch.from_numpy(indices.astype(np.int32, copy=False))
    weights, out = torch.ones(len(indices)), torch.empty_like(table)
    for first, last in _row_blocks(indptr, table.shape[1]):
        Adjacency(pointers, columns, weights, first, last, len(table)).gather(table, out[first:last])
    return out


def _row_blocks(indptr: Array, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows whose edges, and whose values in a table of that width, 32-bit indices can count."""
    first, count = 0, len(indptr) - 1
    while first < count:
        by_edges = int(np.searchsorted(indptr, int(indptr[first]) + index_limits.MAX_INDEX, side="right")) - 1
        last = max(first + 1, min(count, by_edges, first + index_limits.MAX_INDEX // width))
        yield first, last
        first = last


class _AllHeadsMatrix:
    """The edges of all heads in one matrix, so that the fixed cost of a product is paid once instead of once per
    head.

    Head k of vertex v is row, and column, v * heads + k: the order in which its values lie in a table.
    """

    def __init__(self, offsets: Tensor, columns: Tensor, heads: int, shape: tuple[int, int]) -> None:
        self.heads, self._shape = heads, (shape[0] * heads, shape[1] * heads)
        sizes = offsets.diff().repeat_interleave(heads)
        self._offsets = torch.zeros(len(sizes) + 1, dtype=offsets.dtype)
        torch.cumsum(sizes, 0, out=self._offsets[1:])
        ahead = self._offsets[:-1] - offsets[:-1].repeat_interleave(heads)
        head = torch.arange(heads).repeat(shape[0]).repeat_interleave(sizes)
        edge = torch.arange(len(head)) - ahead.repeat_interleave(sizes)
        self._columns = (columns[edge].long() * heads + head).to(columns.dtype)
        self._value_positions = (edge * heads + head).int()
        """For each entry, the position of its value in an (edge, head) table."""
        self._entry_order = self._value_positions.argsort()

    def matrix(self, values: Tensor | None) -> Tensor:
        """Return the matrix with these values, one row of heads per edge; zeros for None."""
        positions = self._value_positions
        entries = torch.zeros(len(positions)) if values is None else values.reshape(-1).index_select(0, positions)
        return csr_matrix(self._offsets, self._columns, entries, self._shape)

    def values(self, entries: Tensor) -> Tensor:
        """Return the entries of such a matrix as one row of heads per edge."""
        return entries.index_select(0, self._entry_order).view(-1, self.heads)


def _pad_columns(blocks: Tensor) -> Tensor:
    """Pad blocks to at least eight columns with zeros: torch multiplies narrower ones ten times as slowly."""
    return functional.pad(blocks, (0, max(0, 8 - blocks.shape[-1])))


def _sampled_product(pattern: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the entries of the product one @ other.T that are in the pattern."""
    products: Tensor = torch.sparse.sampled_addmm(pattern, one, other.t(), beta=0.0).values()
    return products
