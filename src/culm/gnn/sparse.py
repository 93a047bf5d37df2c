"""What touches the graph: the gathers of an interval, forward and backward, on the tables of a server.

Sums over neighbours are products with a sparse matrix whose rows are the vertices of one interval (MKL underneath, on
indices of 32 bits). Gradients gather over the same edges, since these are symmetric.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
_SPREAD = 1 << 21
"""Entries up to which an interval's edges are laid out for all heads at once: beyond, memory is dearer than calls."""


def matrix(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse one, in CSR; nothing is checked, since that would take longer than to multiply by it."""
    return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False)


class Adjacency:
    """Edges of the vertices of one interval: rows are these vertices, columns the server's own vertices and ghosts."""

    def __init__(self, indptr: Tensor, indices: Tensor, weights: Tensor, first: int, last: int, columns: int) -> None:
        low, high = int(indptr[first]), int(indptr[last])
        self.edges = slice(low, high)
        self.offsets = (indptr[first : last + 1] - low).contiguous()
        self.columns = indices[low:high]
        self._shape = (last - first, columns)
        self._matrix = self._with(weights[low:high])
        self._heads: _Spread | None = None

    def gather(self, table: Tensor, out: Tensor) -> None:
        """GA of a GCN, and ∇GA: its normalised adjacency is symmetric."""
        torch.addmm(out, self._matrix, table, beta=0, out=out)

    def gather_weighed(self, values: Tensor, table: Tensor, out: Tensor) -> None:
        """GA under attention: column block k of the table weighed by column k of `values`, a row for each edge."""
        heads = values.shape[1]
        width = out.shape[1] // heads
        if self._fits(heads):
            found = self._spread(heads).matrix(values) @ table.reshape(-1, width)
            out.copy_(found.view(out.shape))
            return
        for head in range(heads):
            block = slice(head * width, (head + 1) * width)
            out[:, block] = self._with(values[:, head].contiguous()) @ table[:, block].contiguous()

    def dot(self, rows: Tensor, table: Tensor, heads: int) -> Tensor:
        """For each edge and head: the product of its target's row and its source's row in the table."""
        one, other = (_wide(given.reshape(len(given), heads, -1)) for given in (rows, table))
        if self._fits(heads):
            spread = self._spread(heads)
            return spread.values(_sampled(spread.matrix(None), one.flatten(0, 1), other.flatten(0, 1)))
        found = torch.empty(len(self.columns), heads)
        none = self._with(torch.zeros(len(self.columns)))
        for head in range(heads):
            found[:, head] = _sampled(none, one[:, head].contiguous(), other[:, head].contiguous())
        return found

    def sum_edges(self, values: Tensor) -> Tensor:
        """For each vertex the sum over its edges."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets.long(), axis=0)

    def _with(self, values: Tensor) -> Tensor:
        return matrix(self.offsets, self.columns, values, self._shape)

    def _fits(self, heads: int) -> bool:
        """Whether there is room for the edges of all heads at once, and numbers for their columns."""
        return len(self.columns) * heads <= _SPREAD and self._shape[1] * heads < 1 << 31

    def _spread(self, heads: int) -> _Spread:
        if self._heads is None or self._heads.heads != heads:
            self._heads = _Spread(self.offsets, self.columns, heads, self._shape)
        return self._heads


class _Spread:
    """The edges once for every head, in one matrix: head k of vertex v is row, and column, v * heads + k, as its values
    lie in a table. What is fixed about a product is then paid once, and not for each head."""

    def __init__(self, offsets: Tensor, columns: Tensor, heads: int, shape: tuple[int, int]) -> None:
        self.heads, self._shape = heads, (shape[0] * heads, shape[1] * heads)
        sizes = offsets.diff().repeat_interleave(heads)
        self._offsets = torch.zeros(len(sizes) + 1, dtype=offsets.dtype)
        torch.cumsum(sizes, 0, out=self._offsets[1:])
        ahead = self._offsets[:-1] - offsets[:-1].repeat_interleave(heads)
        head = torch.arange(heads).repeat(shape[0]).repeat_interleave(sizes)
        edge = torch.arange(len(head)) - ahead.repeat_interleave(sizes)
        self._columns = (columns[edge].long() * heads + head).to(columns.dtype)
        self._places = (edge * heads + head).int()
        """Of each entry: where its value lies in a row of heads for each edge."""
        self._back = self._places.argsort()

    def matrix(self, values: Tensor | None) -> Tensor:
        """With these values, a row of heads for each edge; None: zeros."""
        places = self._places
        entries = torch.zeros(len(places)) if values is None else values.reshape(-1).index_select(0, places)
        return matrix(self._offsets, self._columns, entries, self._shape)

    def values(self, entries: Tensor) -> Tensor:
        """The entries of such a matrix as a row of heads for each edge."""
        return entries.index_select(0, self._back).view(-1, self.heads)


def _wide(blocks: Tensor) -> Tensor:
    """Blocks of at least eight columns, zeros added: narrower ones take torch ten times as long to multiply."""
    return functional.pad(blocks, (0, max(0, 8 - blocks.shape[-1])))


def _sampled(pattern: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Of the product of two tables of rows only what is in the pattern."""
    found: Tensor = torch.sparse.sampled_addmm(pattern, one, other.t(), beta=0.0).values()
    return found
