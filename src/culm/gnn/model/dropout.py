"""Dropout as a pure function of (seed, training epoch, layer, vertex or edge number, column): any process computes
the same mask.

A value is kept if 32 mixed bits of its number and column reach a threshold. Everything is 32-bit integer arithmetic in
chunks that stay in a core's cache: comparisons and byte masks would take longer than the product that uses the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from culm.runtime.compute.rng import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

_VALUES_PER_CHUNK = 1 << 17
"""Values per chunk."""
_HASH_MULTIPLIER = -1640531535
"""Knuth's multiplicative hash: the upper bits, which the comparison uses, depend on all bits of the input."""


def dropout_rows(
    rows: Tensor, p: float, seed: int, epoch: int, layer: int, ids: Tensor, *, purpose: str = "dropout"
) -> Tensor:
    """Return the rows with dropped values set to zero and kept values scaled by 1 / (1 - p). `ids` are global
    numbers of vertices or edges."""
    high, low = _row_and_column_bits(seed, purpose, epoch, layer, ids[: len(rows)], rows.shape[1])
    kept, count = (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        max(1, _VALUES_PER_CHUNK // rows.shape[1]),
    )
    for chunk, row_bits, out in zip(rows.split(count), high[:, None].split(count), kept.split(count), strict=True):
        torch.mul(chunk, 1 / (1 - p), out=out)
        out.view(torch.int32).bitwise_and_(_at_least_mask((row_bits ^ low).mul_(_HASH_MULTIPLIER), _threshold(p)))
    return kept


def dropout_entries(
    values: Tensor, p: float, seed: int, epoch: int, layer: int, ids: Tensor, *, rows: Tensor, columns: Tensor,
    width: int,
) -> Tensor:  # fmt: skip
    """Apply dropout to single entries, given by row and column. Equal bit for bit to `dropout_rows` on the dense
    rows."""
    high, low = _row_and_column_bits(seed, "dropout", epoch, layer, ids, width)
    kept = values * (1 / (1 - p))
    kept.view(torch.int32).bitwise_and_(
        _at_least_mask((high[rows] ^ low[columns]).mul_(_HASH_MULTIPLIER), _threshold(p))
    )
    return kept


def _row_and_column_bits(
    seed: int, purpose: str, epoch: int, layer: int, ids: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return the bits that rows and columns contribute to the hash of an entry."""
    base = derive_seed(seed, purpose, epoch, layer)
    return _mix_bits(ids, base), _mix_bits(torch.arange(width), base ^ 0x5DEECE66D)


def _threshold(p: float) -> int:
    return round(p * 2**32) - 2**31


def _at_least_mask(numbers: Tensor, threshold: int) -> Tensor:
    """Return all bits set where a number is at least the threshold, no bits elsewhere. Overwrites `numbers`.

    n >= t is the sign of ceil(t / 2) - 1 - h, which never overflows, with h = floor(n / 2), or ceil(n / 2) for odd t.
    """
    odd = numbers & 1 if threshold & 1 else None
    half = numbers.bitwise_right_shift_(1)
    if odd is not None:
        half.add_(odd)
    return half.bitwise_not_().add_((threshold + 1) >> 1).bitwise_right_shift_(31)


def _mix_bits(numbers: Tensor, base: int) -> Tensor:
    """Return 32 well-mixed bits of each number (the finaliser of splitmix64)."""
    x = numbers.to(torch.int64) + base
    x = x * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x >> 32).to(torch.int32)
