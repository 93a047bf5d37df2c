"""Gradients of large embeddings and output layers, added to the sums without a tensor of their size.

For one micro-batch torch makes a whole gradient of such a weight, which is added to the sum: hundreds of megabytes,
most of them zeros for an embedding. Here autograd is handed a gradient that is computed when it is added, part by part.
The bits are the same: the parts are computed by torch's own kernels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

LARGE_BYTES = 1 << 24
"""Smaller gradients are left to torch."""
_PART_BYTES = 1 << 23


class LargeGradients(TorchFunctionMode):
    """While it is active, embeddings and linear functions of these weights get deferred gradients."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._weights = {id(weight) for weight in weights}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.linear and len(args) > 1 and id(args[1]) in self._weights:
            if torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
                inputs, weight = args[:2]
                output = func(inputs, weight.detach(), *args[2:], **named)
                return _AttachWeight.apply(output, inputs.detach(), weight)  # type: ignore[no-untyped-call]
        elif func is functional.embedding and len(args) > 1 and id(args[1]) in self._weights:
            settings = dict(zip(_EMBEDDING_SETTINGS, args[2:], strict=False)) | named
            plain = not any(settings.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
            if torch.is_grad_enabled() and plain:
                return _Embed.apply(args[0], args[1], settings.get("padding_idx"))  # type: ignore[no-untyped-call]
        return func(*args, **named)


_EMBEDDING_SETTINGS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def large_gradients(parameters: Iterable[nn.Parameter]) -> LargeGradients | None:
    """The mode for the large ones of a layer's trainable parameters; None: it has none that is an ordinary matrix of
    float32 on a CPU, on which this was compared with torch."""
    found = [
        p
        for p in parameters
        if p.ndim == 2
        and p.nbytes >= LARGE_BYTES
        and p.dtype is torch.float32
        and p.device.type == "cpu"
        and p.is_contiguous()
    ]
    return LargeGradients(found) if found else None


class _Parts(NamedTuple):
    """How a deferred gradient is computed."""

    add_to: Callable[[Tensor], object]
    whole: Callable[[], Tensor]


class _DeferredGradient(Tensor):
    """A gradient that is computed when autograd adds it to a sum. Any other operation gets the whole tensor."""

    _parts: _Parts
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor, parts: _Parts) -> _DeferredGradient:
        made: _DeferredGradient = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made._parts = parts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten.add_.Tensor and not named:
            total, deferred = args
            if isinstance(deferred, cls) and not isinstance(total, cls) and total.is_contiguous():
                deferred._parts.add_to(total)
                return total
        args, named = tree_map_only(cls, lambda deferred: deferred._parts.whole(), (args, named))
        return func(*args, **named)


class _AttachWeight(torch.autograd.Function):
    """The output of a linear function unchanged, with the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.shape = tuple(weight.shape)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (inputs,) = ctx.saved_tensors
        rows, width = ctx.shape
        above, below = gradient.reshape(-1, rows).t(), inputs.reshape(-1, width)
        step = max(1, _PART_BYTES // (width * gradient.itemsize))

        def add_to(total: Tensor) -> None:
            for first in range(0, rows, step):
                total[first : first + step].add_(above[first : first + step].mm(below))

        parts = _Parts(add_to, lambda: above.mm(below))
        return gradient, None, _DeferredGradient(ctx.shape, gradient, parts)


class _Embed(torch.autograd.Function):
    """An embedding whose gradient has only the rows of the tokens that occur."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = tuple(weight.shape)
        ctx.padding = -1 if padding is None else padding % weight.shape[0]
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,), (rows, width), padding = ctx.saved_tensors, ctx.shape, ctx.padding
        dense_backward = torch.ops.aten.embedding_dense_backward.default

        def add_to(total: Tensor) -> None:
            counted = ids.reshape(-1) != padding
            found, numbers = ids.reshape(-1)[counted].unique(return_inverse=True)
            above = gradient.reshape(-1, width)[counted]
            total.index_add_(0, found, dense_backward(above, numbers, len(found), -1, False))

        parts = _Parts(add_to, lambda: dense_backward(gradient, ids, rows, padding, False))
        return None, _DeferredGradient(ctx.shape, gradient, parts), None


GRADIENT_FUNCTIONS = (_AttachWeight, _Embed)
"""Autograd functions that give a gradient to every input that needs one."""
