"""Dropout as a function of (seed, epoch, layer, number, column), whoever computes it. Pure.

A value is kept where 32 mixed bits of its number and column are at least a threshold. All of that is arithmetic on
integers of 32 bits, in pieces that stay in a core's cache: comparisons and masks of bytes would take longer than the
product that the values are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from culm.runtime.keys import key

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 17
"""Values that are looked at together."""
_ODD = -1640531535
"""Knuth's multiplicative hash: the upper bits, which the comparison looks at, depend on all bits of the input."""


def drop(
    rows: Tensor, p: float, seed: int, epoch: int, layer: int, numbers: Tensor, *, what: str = "dropout"
) -> Tensor:
    """What is kept, made larger by what is not; zero elsewhere. `numbers`: of vertices or edges, in the whole graph."""
    high, low = _sides(seed, what, epoch, layer, numbers[: len(rows)], rows.shape[1])
    kept, count = torch.empty_like(rows, memory_format=torch.contiguous_format), max(1, _PIECE // rows.shape[1])
    for piece, mine, out in zip(rows.split(count), high[:, None].split(count), kept.split(count), strict=True):
        torch.mul(piece, 1 / (1 - p), out=out)
        out.view(torch.int32).bitwise_and_(_at_least((mine ^ low).mul_(_ODD), _threshold(p)))
    return kept


def drop_entries(
    values: Tensor, p: float, seed: int, epoch: int, layer: int, numbers: Tensor, *, rows: Tensor, columns: Tensor,
    width: int,
) -> Tensor:  # fmt: skip
    """The same of some entries only, each in its row and column: bit for bit what `drop` makes of them."""
    high, low = _sides(seed, "dropout", epoch, layer, numbers, width)
    kept = values * (1 / (1 - p))
    kept.view(torch.int32).bitwise_and_(_at_least((high[rows] ^ low[columns]).mul_(_ODD), _threshold(p)))
    return kept


def _sides(seed: int, what: str, epoch: int, layer: int, numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What rows and columns bring to the draw of an entry."""
    base = key(seed, what, epoch, layer)
    return _mixed(numbers, base), _mixed(torch.arange(width), base ^ 0x5DEECE66D)


def _threshold(p: float) -> int:
    return round(p * 2**32) - 2**31


def _at_least(numbers: Tensor, threshold: int) -> Tensor:
    """All bits set where a number is not below the threshold, none elsewhere; the numbers are used up.

    n >= t is the sign of ceil(t / 2) - 1 - h, which is never too long, with h = floor(n / 2), or ceil(n / 2) for odd t.
    """
    odd = numbers & 1 if threshold & 1 else None
    half = numbers.bitwise_right_shift_(1)
    if odd is not None:
        half.add_(odd)
    return half.bitwise_not_().add_((threshold + 1) >> 1).bitwise_right_shift_(31)


def _mixed(numbers: Tensor, base: int) -> Tensor:
    """32 well-mixed bits of each number (the finaliser of splitmix64)."""
    x = numbers.to(torch.int64) + base
    x = x * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x >> 32).to(torch.int32)
