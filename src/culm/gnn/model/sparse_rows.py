"""Rows with mostly zeros, such as bag-of-words features: products touch only the nonzero entries.

The time of a product, of a weight gradient and of dropout grows with the number of entries. Whether rows are treated as
sparse depends only on the rows, so every process adds the same numbers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from culm.gnn.graph.adjacency import csr_matrix
from culm.gnn.model.dropout import dropout_entries

if TYPE_CHECKING:
    from torch import Tensor

_MIN_SPARSITY = 16
"""Rows are sparse if at most one in this many values is nonzero: dense products are many times as fast per value."""
_MAX_ENTRIES = 1 << 31
"""Limit of 32-bit indices."""


@dataclass(frozen=True, eq=False)
class SparseRows:
    """The nonzero entries of a matrix, in order of rows; `column_order` sorts them by column for weight gradients."""

    shape: tuple[int, int]
    rows: Tensor
    columns: Tensor
    values: Tensor
    offsets: Tensor
    column_order: Tensor
    """Positions of the entries in order of columns."""
    column_offsets: Tensor

    def multiply(self, weight: Tensor) -> Tensor:
        """Same as functional.linear on the dense rows."""
        return csr_matrix(self.offsets, self.columns, self.values, self.shape) @ weight.t().contiguous()

    def weight_gradient(self, output_gradient: Tensor) -> Tensor:
        """Return the gradient of the weight from that of the product."""
        order = self.column_order
        transposed = csr_matrix(self.column_offsets, self.rows[order], self.values[order], self.shape[::-1])
        return (transposed @ output_gradient).t().contiguous()

    def dropout(self, p: float, seed: int, epoch: int, layer: int, ids: Tensor) -> SparseRows:
        """Same as dropout_rows on the dense rows, bit for bit."""
        kept = dropout_entries(
            self.values, p, seed, epoch, layer, ids, rows=self.rows, columns=self.columns, width=self.shape[1]
        )
        return replace(self, values=kept)


def to_sparse_rows(rows: Tensor) -> SparseRows | None:
    """Return the rows as SparseRows if they are sparse enough, otherwise None."""
    count = int(torch.count_nonzero(rows))
    if count * _MIN_SPARSITY > rows.numel() or count >= _MAX_ENTRIES:
        return None
    row_numbers, columns = rows.nonzero(as_tuple=True)
    return SparseRows(
        shape=(rows.shape[0], rows.shape[1]),
        rows=row_numbers.int(),
        columns=columns.int(),
        values=rows[row_numbers, columns],
        offsets=_offsets(row_numbers, rows.shape[0]),
        column_order=columns.argsort(stable=True).int(),
        column_offsets=_offsets(columns, rows.shape[1]),
    )


def _offsets(numbers: Tensor, count: int) -> Tensor:
    """Return the bounds of each number's entries, once these are sorted."""
    offsets = torch.zeros(count + 1, dtype=torch.int32)
    torch.cumsum(torch.bincount(numbers, minlength=count), 0, out=offsets[1:])
    return offsets
