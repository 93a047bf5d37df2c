"""Sums of gradients over micro-batches: one flat buffer a layer, in floating point (fast) or in integers (exact).

Fast: the parameters' `.grad` are views of the buffer, so that autograd adds in place, in micro-batch order.
Exact: each gradient is scaled by 2^48, rounded to an integer and added. Integer sums do not depend on who added what
in which order, so that any number of pipelines, and any recovery, gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from culm.errors import ExactRangeError

SCALE = 2.0**48
LIMIT = 2.0**15
"""Range of an exact sum: 2^63 / 2^48. Resolution: 2^-48 = 3.6e-15."""
_BLOCK = 1 << 16
"""Elements converted at a time, so that the scratch stays in the cache: a naive conversion takes five times as long."""
_BOUND_SCALE = 2.0**16


class Accumulator:
    """The sum for the trainable parameters of one layer, and the gradient that is made of it.

    `total` is what travels in a reduce; `bound` (exact only) is an upper limit of every |element| of the sum, in units
    of 2^-16, which rides along: a sum whose bound is below LIMIT can not have overflowed, whatever the order was.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, exact: bool, label: str = "a layer") -> None:
        self.parameters = tuple(parameters)
        self.exact = exact
        self.label = label
        size = sum(p.numel() for p in self.parameters)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        dtype = self.parameters[0].dtype if self.parameters else torch.float32
        self.gradient = torch.zeros(size, dtype=dtype, device=device)
        self.bound = 0
        self.finite = True
        if exact:
            self.total = torch.zeros(size, dtype=torch.int64, device=device)
        else:
            self.total = self.gradient
            self.attach()

    @functools.cached_property
    def _views(self) -> list[Tensor]:
        """The gradient, by parameter."""
        return [laid(piece, p) for piece, p in zip(self._split(self.gradient), self.parameters, strict=True)]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = flat.split([p.numel() for p in self.parameters])
        return pieces

    def attach(self) -> None:
        """Let `.grad` be the views: autograd adds into them (fast), the optimizer reads them (both)."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def absorb(self) -> None:
        """Exact: move what autograd left in `.grad` for one micro-batch into the integer sum. Fast: nothing to do.

        Everything is checked before anything is added: a gradient that does not fit leaves the sum as it was. One that
        is not finite only clears `finite`: whether that stops the run or skips the step is decided when all is known.
        """
        if not self.exact:
            return
        found = self._found()
        largest = [_largest(g) for _, g in found]
        if all(map(math.isfinite, largest)):
            self._add(found, max(largest, default=0.0))
        else:
            self.finite = False
        self.detach()

    def gather(self) -> None:
        """Fast, before the sum is read: a hook of the user's may have put another tensor in the place of `.grad`."""
        if self.exact:
            return
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(_dense(parameter.grad))
            parameter.grad = view

    def _found(self) -> list[tuple[Tensor, Tensor]]:
        """Pieces of the sum, and the gradients that go there. Those of a small layer go together: with few elements a
        call costs more than what it does."""
        found = [None if p.grad is None else _flat(p.grad, p) for p in self.parameters]
        there = [gradient for gradient in found if gradient is not None]
        if there and len(there) == len(found) and self.total.numel() <= _BLOCK:
            return [(self.total, torch.cat(there))]
        return [(into, g) for into, g in zip(self._split(self.total), found, strict=True) if g is not None]

    def _add(self, found: list[tuple[Tensor, Tensor]], largest: float) -> None:
        if largest >= LIMIT:
            raise ExactRangeError(
                f"a gradient of {self.label} is {largest:g}, outside the exact range of ±{LIMIT:,.0f}: "
                "scale the loss down, or run without exact"
            )
        self.bound += int(largest * _BOUND_SCALE) + 1
        for piece, gradient in found:
            _add_scaled(piece, gradient)

    def detach(self) -> None:
        """Exact: the next micro-batch starts from no gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self, divisor: float) -> None:
        """Turn the complete sum into the gradient: divided once, by the global count."""
        finish(self.gradient, self.total, self.bound, divisor, self.label)
        if self.exact:
            self.attach()

    def clear(self) -> None:
        """Empty, for the next step. An optimizer may have taken `.grad` away in its own."""
        self.total.zero_()
        self.bound = 0
        self.finite = True
        if self.exact:
            self.detach()
        else:
            self.attach()


def finish(gradient: Tensor, total: Tensor, bound: int, divisor: float, label: str) -> None:
    """gradient = total / divisor, in place where they are the same memory."""
    if total.dtype != torch.int64:
        torch.div(total, divisor, out=gradient)
        return
    if bound >= LIMIT * _BOUND_SCALE:
        raise ExactRangeError(
            f"the gradients of {label} may add up to {bound / _BOUND_SCALE:g}, outside the exact range of "
            f"±{LIMIT:,.0f}: "
            "scale the loss down, or run without exact"
        )
    for part, into in zip(_blocks(total), _blocks(gradient), strict=True):
        into.copy_(part.double().div_(divisor * SCALE))  # a power of two rounds nothing: it is divided once


def _blocks(values: Tensor) -> Sequence[Tensor]:
    """Views of so many elements that scratch for them stays in the cache."""
    return values.split(_BLOCK) if values.numel() > _BLOCK else (values,)


def laid(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of a flat gradient that lies as the parameter does, as torch's own would: fused optimizers go through the
    memory of both side by side."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), flat.storage_offset())


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()


def _flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    """In the order in which the parameter lies. Also of an embedding whose gradient is sparse."""
    dense = _dense(gradient)
    if parameter.is_contiguous():
        return dense.reshape(-1)
    flat = torch.empty(dense.numel(), dtype=dense.dtype, device=dense.device)
    laid(flat, parameter).copy_(dense)
    return flat


def _largest(values: Tensor) -> float:
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return math.nan if math.isnan(float(high)) else max(-float(low), float(high))


def _add_scaled(total: Tensor, gradient: Tensor) -> None:
    """total += round(gradient * 2^48), block by block. Scaling by a power of two is exact in any floating type."""
    wide = gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float()
    if wide.numel() <= _BLOCK:
        total.add_(torch.mul(wide, SCALE).round_().to(torch.int64))
        return
    scaled = torch.empty(_BLOCK, dtype=wide.dtype, device=wide.device)
    whole = torch.empty(_BLOCK, dtype=torch.int64, device=wide.device)
    for part, into in zip(wide.split(_BLOCK), total.split(_BLOCK), strict=True):
        n = part.numel()
        torch.mul(part, SCALE, out=scaled[:n]).round_()
        into.add_(whole[:n].copy_(scaled[:n]))
