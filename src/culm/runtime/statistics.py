"""Buffers that move with the data: batch norm's running statistics, and those of modules that say how.

F returns a micro-batch's statistics without moving anything; every holder applies them once, at commit, in
micro-batch order. So it does not matter who ran the micro-batch, nor how often.

A module of the user takes part by calling `record(self, *tensors)` in its forward and having a method
`apply_statistics(*tensors)` that moves its buffers. Any other buffer that moves is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from culm.errors import JobError

_recorded: dict[int, tuple[Tensor, ...]] | None = None


def record(module: nn.Module, *statistics: Tensor) -> None:
    """Called in a module's forward: what this micro-batch will add to its buffers. Outside of training: nothing."""
    if _recorded is not None:
        _recorded[id(module)] = tuple(value.detach() for value in statistics)


@contextmanager
def recording() -> Iterator[dict[int, tuple[Tensor, ...]]]:
    """Collects what modules record, by id of the module."""
    global _recorded  # noqa: PLW0603 - forward can not be passed an argument, it is the user's
    before, _recorded = _recorded, {}
    try:
        yield _recorded
    finally:
        _recorded = before


def prepare(layer: int, module: nn.Module) -> list[nn.Module]:
    """The modules of a layer whose buffers move, in order; batch norms are taught to record instead of moving."""
    moving: list[nn.Module] = []
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise JobError(f"Job.layers[{layer}].{name} is a SyncBatchNorm: use BatchNorm, per micro-batch")
        if isinstance(part, _BatchNorm):
            if part.track_running_stats:
                cast(Any, part).forward = _BatchNormForward(part)
                moving.append(part)
        elif hasattr(part, "apply_statistics"):
            moving.append(part)
    return moving


class _BatchNormForward:
    """Batch norm that normalises with the statistics of the micro-batch and records them."""

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module
        self._plain = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        if not module.training:
            return self._plain(x)
        assert module.running_mean is not None
        assert module.running_var is not None
        module._check_input_dim(x)
        # With momentum 1 the kernel leaves this micro-batch's own statistics in the two scratch buffers.
        mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
        out = functional.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
        record(module, mean, variance)
        return out


def apply(module: nn.Module, statistics: Sequence[Tensor]) -> None:
    """Move the buffers of one module by the statistics of one micro-batch."""
    if not isinstance(module, _BatchNorm):
        cast(Any, module).apply_statistics(*statistics)
        return
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked += 1
    momentum = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    for running, value in zip((module.running_mean, module.running_var), statistics, strict=True):
        running.mul_(1.0 - momentum).add_(value, alpha=momentum)


class Guard:
    """Notices buffers that moved although nobody said how."""

    def __init__(self, layer: int, module: nn.Module, moving: Sequence[nn.Module]) -> None:
        known = {id(buffer) for part in moving for buffer in part.buffers()}
        self._layer = layer
        self._owners = [
            (name, part, own)
            for prefix, part in module.named_modules()
            for own, buffer in part.named_buffers(recurse=False)
            if id(buffer) not in known
            for name in [f"{prefix}.{own}" if prefix else own]
        ]
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int]]:
        return [(id(b), b._version) for _, part, own in self._owners for b in [part._buffers[own]] if b is not None]

    def forgive(self) -> None:
        """The buffers were set on purpose (a checkpoint was loaded)."""
        self._seen = self._look()

    def check(self) -> None:
        """Raises JobError with the name of the first buffer that moved since the module was built."""
        if not self._owners:
            return
        now = self._look()
        if now == self._seen:
            return
        name = next((n for (n, _, _), a, b in zip(self._owners, self._seen, now, strict=False) if a != b), "a buffer")
        raise JobError(
            f"Job.layers[{self._layer}] moves its buffer {name!r} in forward: call culm.runtime.statistics.record() "
            "there and give the module a method apply_statistics(), so that every micro-batch counts once"
        )
