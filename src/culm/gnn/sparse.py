"""What touches the graph: the gathers of an interval, forward and backward, on the tables of a server.

Sums over neighbours are products with a sparse matrix whose rows are the vertices of one interval (MKL underneath, on
indices of 32 bits). Gradients gather over the same edges, since these are symmetric.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")


class Adjacency:
    """Edges of the vertices of one interval: rows are these vertices, columns the server's own vertices and ghosts."""

    def __init__(self, indptr: Tensor, indices: Tensor, weights: Tensor, first: int, last: int, columns: int) -> None:
        low, high = int(indptr[first]), int(indptr[last])
        self.edges = slice(low, high)
        self.offsets = (indptr[first : last + 1] - low).contiguous()
        self.columns = indices[low:high]
        self._shape = (last - first, columns)
        self._matrix = self._with(weights[low:high])

    def gather(self, table: Tensor, out: Tensor) -> None:
        """GA of a GCN, and ∇GA: its normalised adjacency is symmetric."""
        torch.addmm(out, self._matrix, table, beta=0, out=out)

    def gather_weighed(self, values: Tensor, table: Tensor, out: Tensor) -> None:
        """GA under attention: column block k of the table weighed by column k of `values`, a row for each edge."""
        heads = values.shape[1]
        width = out.shape[1] // heads
        for head in range(heads):
            block = slice(head * width, (head + 1) * width)
            out[:, block] = self._with(values[:, head].contiguous()) @ table[:, block].contiguous()

    def dot(self, rows: Tensor, table: Tensor, heads: int) -> Tensor:
        """For each edge and head: the product of its target's row and its source's row in the table."""
        width = rows.shape[1] // heads
        found = torch.empty(len(self.columns), heads)
        ones = self._with(torch.zeros(len(self.columns)))
        for head in range(heads):
            block = slice(head * width, (head + 1) * width)
            one, other = rows[:, block].contiguous(), table[:, block].contiguous()
            found[:, head] = torch.sparse.sampled_addmm(ones, one, other.t(), beta=0.0).values()
        return found

    def sum_edges(self, values: Tensor) -> Tensor:
        """For each vertex the sum over its edges."""
        return torch.segment_reduce(values, "sum", offsets=self.offsets.long(), axis=0)

    def _with(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.offsets, self.columns, values, self._shape, check_invariants=False)
