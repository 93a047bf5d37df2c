"""Cross entropy over a large vocabulary, computed in chunks of rows.

`torch.nn.functional.cross_entropy` of bf16 logits needs them three more times in 32 bits: as its input, as the
logarithms that the backward reads, and as a gradient. That is the peak of the last stage. In chunks only the gradient
in the type of the logits is as large as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from culm.errors import JobError

_CHUNK_ELEMENTS = 1 << 24
"""Logits of one chunk by default: 64 MB in 32 bits."""


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int | None = None,
) -> Tensor:
    """The cross entropy of logits (..., classes) with targets (...), in 32 bits. Equal to torch's up to rounding.

    `ignore_index`: targets with this value do not count. `chunk`: rows that are computed at a time. The result does not
    depend on the partition of a model, but its last bits depend on `chunk`: keep it the same in a run. It has a first
    derivative only.
    """
    if logits.shape[:-1] != target.shape:
        raise JobError(
            f"the target of chunked_cross_entropy has shape {tuple(target.shape)}, and the logits have "
            f"{tuple(logits.shape)}: give one target for each row of logits"
        )
    rows = chunk or max(1, _CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    flat_target = target.reshape(-1)
    total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]), flat_target, ignore_index, rows
    )
    return total if reduction == "sum" else total / (flat_target != ignore_index).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all rows that count. The backward computes the probabilities again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, rows: int) -> Tensor:
        counts = target != ignore_index
        safe_target = torch.where(counts, target, 0)
        total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        norms = torch.empty(len(target), dtype=total.dtype, device=logits.device)
        for first in range(0, len(target), rows):
            part = slice(first, first + rows)
            wide = logits[part].to(total.dtype)
            norms[part] = torch.logsumexp(wide, dim=-1)
            chosen = wide.gather(-1, safe_target[part].unsqueeze(-1)).squeeze(-1)
            total = total + torch.where(counts[part], norms[part] - chosen, 0.0).sum()
        ctx.save_for_backward(logits, safe_target, counts, norms)
        ctx.rows = rows
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, counts, norms = ctx.saved_tensors
        result = torch.empty_like(logits)
        for first in range(0, len(target), ctx.rows):
            part = slice(first, first + ctx.rows)
            wide = (logits[part].to(norms.dtype) - norms[part].unsqueeze(-1)).exp_()
            wide.scatter_add_(-1, target[part].unsqueeze(-1), wide.new_full((len(wide), 1), -1.0))
            result[part] = wide.mul_(torch.where(counts[part], gradient, 0.0).unsqueeze(-1))
        return result, None, None, None
