"""Sum gradients over micro-batches: one flat buffer per layer, in floating point (fast) or in integers (exact).

Fast: the `.grad` of the parameters are views of the buffer, so that autograd adds in place, in micro-batch order.

Exact: each gradient is scaled by 2^48, rounded to an integer and added. Integer sums do not depend on the order of the
additions, so that any number of pipelines, and any recovery, gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from culm.errors import ExactRangeError

SCALE = 2.0**48
LIMIT = 2.0**15
"""Range of an exact sum: 2^63 / 2^48. Resolution: 2^-48 = 3.6e-15."""
_BLOCK_ELEMENTS = 1 << 16
"""Elements converted at a time, so that temporary memory stays in the cache: a naive conversion takes five times as
long."""
_DEVICE_BLOCK_ELEMENTS = 1 << 24
"""The same on a device, where each call is a kernel: limits the temporary memory."""
_BOUND_SCALE = 2.0**16


def defers_checks(device: torch.device) -> bool:
    """Whether gradients of `exact` are checked on the device, and the result is read once per step. On a CPU reading
    a number costs nothing, on other devices it would wait for everything that is queued."""
    return device.type != "cpu"


class _GradientPiece(NamedTuple):
    """The gradient of one or all parameters, and the part of the sum that it is to be added to."""

    numbers: Sequence[int]
    """Which parameters."""
    total: Tensor
    gradient: Tensor


class GradientAccumulator:
    """The gradient sum of the trainable parameters of one layer, and the gradient computed from it.

    `total` is what a reduce sums. `bound` (exact only) is an upper limit of every |element| of the sum, in units of
    2^-16. It is summed with the gradients: a sum whose bound is below LIMIT cannot have overflowed, in whatever order
    it was made.
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
        self.is_finite = True
        self._autograd_additions: list[list[Tensor]] = [[] for _ in self.parameters]
        """By parameter: one entry for each time that autograd added to its `.grad`, since the last `take_additions`
        (fast) or since the last micro-batch was added to the integer sum (exact)."""
        self._exact_additions = [0] * len(self.parameters)
        """The same for the integer sum, since the last `take_additions`. Exact only."""
        for parameter, additions in zip(self.parameters, self._autograd_additions, strict=True):
            # a method of a built-in type: a hook in Python takes twice as long
            parameter.register_post_accumulate_grad_hook(additions.append)
        self._deferred_checks = (
            torch.zeros(3, dtype=torch.float64, device=device) if exact and defers_checks(device) else None
        )
        """Where checks are deferred: the bound, the number of micro-batches whose gradient was not finite, and the
        largest gradient out of range, of this worker's own sum."""
        if exact:
            self.total = torch.zeros(size, dtype=torch.int64, device=device)
        else:
            self.total = self.gradient
            self.attach_grads()

    @functools.cached_property
    def _views(self) -> list[Tensor]:
        """Views of the gradient, one per parameter."""
        return [view_like(piece, p) for piece, p in zip(self._split(self.gradient), self.parameters, strict=True)]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = flat.split([p.numel() for p in self.parameters])
        return pieces

    def attach_grads(self) -> None:
        """Set `.grad` to the views: autograd adds into them (fast), and the optimizer reads them (both)."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def silent_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that autograd has not added to since the additions were last taken. Torch may call a hook
        although no gradient arrived: in exact mode there is no `.grad` then."""
        if all(self._autograd_additions) and not (self.exact and any(p.grad is None for p in self.parameters)):
            return ()
        pairs = zip(self.parameters, self._autograd_additions, strict=True)
        return [p for p, additions in pairs if not additions or (self.exact and p.grad is None)]

    def take_additions(self) -> list[int]:
        """By parameter: how often a gradient was added to its sum since the last call. The ledger's counts come from
        here: from the additions, not from the actions that should have added."""
        if self.exact:
            taken, self._exact_additions = self._exact_additions, [0] * len(self.parameters)
        else:
            taken = list(map(len, self._autograd_additions))
        for additions in self._autograd_additions:
            additions.clear()
        return taken

    def _clear_autograd_additions(self) -> None:
        for additions in self._autograd_additions:
            additions.clear()

    def _count_exact_additions(self, numbers: Iterable[int]) -> None:
        """What autograd added to these parameters is in the integer sum."""
        for number in numbers:
            self._exact_additions[number] += len(self._autograd_additions[number])

    def add_micro_batch(self) -> None:
        """Exact: add what autograd left in `.grad` for one micro-batch to the integer sum. Fast: nothing to do.

        Everything is checked before anything is added: a gradient out of range leaves the sum unchanged. A gradient
        that is not finite only clears `is_finite`: whether that stops the run or skips the step is decided at the end
        of the step.
        """
        if not self.exact:
            return
        pieces = self._grad_pieces()
        if self._deferred_checks is not None:
            self._add_deferred(pieces, self._deferred_checks)
            return
        largest = [_max_abs(piece.gradient) for piece in pieces]
        if all(map(math.isfinite, largest)):
            self._add_exact(pieces, max(largest, default=0.0))
        else:
            self.is_finite = False
            self._count_exact_additions(range(len(self.parameters)))
        self._clear_autograd_additions()
        self.detach_grads()

    def collect_grads(self) -> None:
        """Fast, before the sum is read: a user's hook may have replaced `.grad` by another tensor. Copy it into the
        buffer."""
        if self.exact:
            return
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(_to_dense(parameter.grad))
            parameter.grad = view

    def _grad_pieces(self) -> list[_GradientPiece]:
        """What is to be added. A small layer is one piece: with few elements a call costs more than its arithmetic."""
        gradients = [None if p.grad is None else _to_flat(p.grad, p) for p in self.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if present and len(present) == len(gradients) and self.total.numel() <= _BLOCK_ELEMENTS:
            return [_GradientPiece(range(len(gradients)), self.total, torch.cat(present))]
        parts = zip(self._split(self.total), gradients, strict=True)
        return [_GradientPiece((i,), into, g) for i, (into, g) in enumerate(parts) if g is not None]

    def _add_exact(self, pieces: list[_GradientPiece], max_abs: float) -> None:
        if max_abs >= LIMIT:
            raise self._range_error(max_abs)
        self.bound += int(max_abs * _BOUND_SCALE) + 1
        for piece in pieces:
            _add_scaled(piece.total, piece.gradient)
            self._count_exact_additions(piece.numbers)

    def _add_deferred(self, pieces: list[_GradientPiece], checks: Tensor) -> None:
        """The same without reading a number: a gradient out of range or not finite adds zeros, and is recorded."""
        maxima = [_max_abs_tensor(piece.gradient) for piece in pieces if piece.gradient.numel()]
        largest = torch.stack(maxima).max() if maxima else checks.new_zeros(())
        usable, finite = largest < LIMIT, largest.isfinite()
        checks[0] += torch.where(usable, (largest * _BOUND_SCALE).floor() + 1, 0.0)
        checks[1] += ~finite
        checks[2] = torch.maximum(checks[2], torch.where(finite & ~usable, largest, 0.0))
        for piece in pieces:
            for total, part in zip(_blocks(piece.total), _blocks(piece.gradient), strict=True):
                wide = part if part.dtype in (torch.float32, torch.float64) else part.float()
                scaled = torch.mul(wide, SCALE).round_()
                total.add_(torch.where(usable, scaled, torch.zeros_like(scaled)).to(torch.int64))
            self._count_exact_additions(piece.numbers)
        self._clear_autograd_additions()
        self.detach_grads()

    @property
    def deferred_checks(self) -> Tensor | None:
        """What `load_checks` needs, on the device; None: checks are not deferred."""
        return self._deferred_checks

    def load_checks(self, checks: Tensor) -> None:
        """Set the bound of this worker's own sum, and whether its gradients were finite, from a copy of
        `deferred_checks` on the host. Raises ExactRangeError."""
        bound, broken, out_of_range = checks.tolist()
        if out_of_range:
            raise self._range_error(out_of_range)
        self.bound, self.is_finite = int(bound), not broken

    def _range_error(self, max_abs: float) -> ExactRangeError:
        return ExactRangeError(
            f"a gradient of {self.label} is {max_abs:g}, outside the exact range of ±{LIMIT:,.0f}: "
            "scale the loss down, or run without exact"
        )

    def detach_grads(self) -> None:
        """Exact: the next micro-batch starts without gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def finalize_gradient(self, divisor: float) -> None:
        """Turn the complete sum into the gradient: divide once, by the global count."""
        finalize_gradient(self.gradient, self.total, self.bound, divisor, self.label)
        if self.exact:
            self.attach_grads()

    def load_total(self, total: Tensor) -> None:
        """Replace the sum by a complete one."""
        self.total.copy_(total)

    def add_total(self, total: Tensor) -> None:
        """Add the sum of another worker."""
        self.total.add_(total.to(self.total.device))

    def copy_total_to_cpu(self) -> Tensor:
        """A copy of the sum in host memory."""
        return self.total.to("cpu", copy=True)

    def set_bound(self, bound: int, *, is_finite: bool) -> None:
        """Set the bound of the sum, and whether all of its gradients were finite."""
        self.bound, self.is_finite = bound, is_finite

    def clear(self) -> None:
        """Clear the sum for the next step. The optimizer may have removed `.grad` in its step, so it is attached
        again."""
        self.total.zero_()
        if self._deferred_checks is not None:
            self._deferred_checks.zero_()
        self.bound = 0
        self.is_finite = True
        self.take_additions()
        if self.exact:
            self.detach_grads()
        else:
            self.attach_grads()


def finalize_gradient(gradient: Tensor, total: Tensor, bound: int, divisor: float, label: str) -> None:
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
        # scaling by a power of two does not round: there is one rounding, of the division
        into.copy_(part.double().div_(divisor * SCALE))


def _blocks(values: Tensor) -> Sequence[Tensor]:
    """Views of a number of elements whose temporary memory stays in the cache."""
    elements = _DEVICE_BLOCK_ELEMENTS if defers_checks(values.device) else _BLOCK_ELEMENTS
    return values.split(elements) if values.numel() > elements else (values,)


def view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of a flat gradient with the memory layout of the parameter, as torch's own gradient would have: fused
    optimizers iterate over the memory of both."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), flat.storage_offset())


def _to_dense(gradient: Tensor) -> Tensor:
    return gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()


def _to_flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient as a flat tensor in the memory order of the parameter. Sparse gradients of embeddings become
    dense."""
    dense = _to_dense(gradient)
    if parameter.is_contiguous():
        return dense.reshape(-1)
    flat = torch.empty(dense.numel(), dtype=dense.dtype, device=dense.device)
    view_like(flat, parameter).copy_(dense)
    return flat


def _max_abs(values: Tensor) -> float:
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return math.nan if math.isnan(float(high)) else max(-float(low), float(high))


def _max_abs_tensor(values: Tensor) -> Tensor:
    """The largest absolute value as a float64 tensor on the device; NaN if there is one."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low.double(), high.double())


def _add_scaled(total: Tensor, gradient: Tensor) -> None:
    """total += round(gradient * 2^48), block by block. Scaling by a power of two is exact in any floating type."""
    wide = gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float()
    if wide.numel() <= _BLOCK_ELEMENTS:
        total.add_(torch.mul(wide, SCALE).round_().to(torch.int64))
        return
    scaled = torch.empty(_BLOCK_ELEMENTS, dtype=wide.dtype, device=wide.device)
    whole = torch.empty(_BLOCK_ELEMENTS, dtype=torch.int64, device=wide.device)
    for part, into in zip(wide.split(_BLOCK_ELEMENTS), total.split(_BLOCK_ELEMENTS), strict=True):
        n = part.numel()
        torch.mul(part, SCALE, out=scaled[:n]).round_()
        into.add_(whole[:n].copy_(scaled[:n]))
