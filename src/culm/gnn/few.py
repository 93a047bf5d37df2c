"""Rows that are mostly zeros, as features that count words are: what multiplies them touches only the others.

A product with such rows, and the gradient of the weights, take as long as there are entries; so does dropout, which
leaves zeros what they are. Whether rows are taken so depends on nothing but the rows: whoever runs a task adds up the
same numbers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from culm.gnn.dropout import drop_entries
from culm.gnn.sparse import matrix

if TYPE_CHECKING:
    from torch import Tensor

_ONE_IN = 16
"""Entries among so many numbers at most: a processor multiplies dense rows many times as fast."""
_MOST = 1 << 31
"""Entries that indices of 32 bits can count."""


@dataclass(frozen=True, eq=False)
class Few:
    """Rows by what is in them that is not zero, in order of rows and, for gradients, of columns."""

    shape: tuple[int, int]
    rows: Tensor
    columns: Tensor
    values: Tensor
    offsets: Tensor
    by_column: Tensor
    """Numbers of the entries in order of columns."""
    column_offsets: Tensor

    def multiplied(self, weight: Tensor) -> Tensor:
        """As functional.linear."""
        return matrix(self.offsets, self.columns, self.values, self.shape) @ weight.t().contiguous()

    def gradient(self, above: Tensor) -> Tensor:
        """Of a weight that these rows were multiplied by, from that of the product."""
        order = self.by_column
        turned = matrix(self.column_offsets, self.rows[order], self.values[order], self.shape[::-1])
        return (turned @ above).t().contiguous()

    def dropped(self, p: float, seed: int, epoch: int, layer: int, numbers: Tensor) -> Few:
        """As dropout.drop, bit for bit."""
        kept = drop_entries(
            self.values, p, seed, epoch, layer, numbers, rows=self.rows, columns=self.columns, width=self.shape[1]
        )
        return replace(self, values=kept)


def few(rows: Tensor) -> Few | None:
    """The same rows, where they are few enough; None: take them as they are."""
    count = int(torch.count_nonzero(rows))
    if count * _ONE_IN > rows.numel() or count >= _MOST:
        return None
    at, columns = rows.nonzero(as_tuple=True)
    return Few(
        shape=(rows.shape[0], rows.shape[1]),
        rows=at.int(),
        columns=columns.int(),
        values=rows[at, columns],
        offsets=_offsets(at, rows.shape[0]),
        by_column=columns.argsort(stable=True).int(),
        column_offsets=_offsets(columns, rows.shape[1]),
    )


def _offsets(numbers: Tensor, count: int) -> Tensor:
    """Where the entries of each number begin and end, once they are in order."""
    found = torch.zeros(count + 1, dtype=torch.int32)
    torch.cumsum(torch.bincount(numbers, minlength=count), 0, out=found[1:])
    return found
