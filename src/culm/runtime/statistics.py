"""Buffers that move with the data: batch norm's running statistics, and those of modules that say how.

F returns a micro-batch's statistics without moving anything; every holder applies them once, at commit, in
micro-batch order. So it does not matter who ran the micro-batch, nor how often.

A module of the user takes part by calling `record(self, *tensors)` once in every forward of training and having a
method `apply_statistics(*tensors)` that moves its buffers. Any other buffer that moves is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from culm.errors import JobError

Statistics: TypeAlias = tuple[tuple[Tensor, ...], ...]
"""What the moving modules of a layer recorded for one micro-batch, in their order."""
Records: TypeAlias = dict[int, tuple[Tensor, ...]]
"""By id of the module."""

_recorded: Records | None = None


def record(module: nn.Module, *statistics: Tensor) -> None:
    """Called in a module's forward: what this micro-batch will add to its buffers. Outside of training: nothing."""
    if _recorded is None:
        return
    if id(module) in _recorded:
        raise JobError(f"a {type(module).__name__} records statistics twice for one micro-batch: call record() once")
    _recorded[id(module)] = tuple(value.detach() for value in statistics)


@contextmanager
def recording() -> Iterator[Records]:
    """Collects what modules record."""
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
        where = f"Job.layers[{layer}]" + (f".{name}" if name else "")
        if isinstance(part, nn.SyncBatchNorm):
            raise JobError(f"{where} is a SyncBatchNorm: use BatchNorm, whose statistics are those of a micro-batch")
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise JobError(f"{where} keeps extra state, which can not move with its layer: keep it in buffers")
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
        _record_pass(module, mean, variance)
        return out


def _record_pass(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """A batch norm may be passed any number of times in a forward: what is recorded is (passes, mean, variance) of all.

    Moving by each in turn is moving once: r(1-m)^2 + m(a(1-m) + b). Without a momentum a sum is enough.
    """
    if _recorded is None:
        return
    passes = torch.tensor(1)
    if (known := _recorded.pop(id(module), None)) is not None:
        kept = 1.0 if module.momentum is None else 1.0 - module.momentum
        passes, mean, variance = known[0] + 1, known[1] * kept + mean, known[2] * kept + variance
    record(module, passes, mean, variance)


def _none(module: nn.Module) -> tuple[Tensor, ...]:
    """What a batch norm records that was not passed."""
    if not isinstance(module, _BatchNorm):
        raise JobError(
            f"a {type(module).__name__} has apply_statistics() but recorded nothing for a micro-batch: "
            "call culm.runtime.statistics.record() in every forward of training"
        )
    assert module.running_mean is not None
    assert module.running_var is not None
    return torch.tensor(0), torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)


def collect(moving: Sequence[nn.Module], recorded: Records) -> Statistics:
    """What the moving modules of a layer recorded, complete: the same shapes for every micro-batch."""
    return tuple(recorded.get(id(module)) or _none(module) for module in moving)


def apply(module: nn.Module, statistics: Sequence[Tensor]) -> None:
    """Move the buffers of one module by the statistics of one micro-batch."""
    if not isinstance(module, _BatchNorm):
        cast(Any, module).apply_statistics(*statistics)
        return
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    passes = int(statistics[0])
    module.num_batches_tracked += passes
    kept, added = _momenta(module, passes)
    for running, value in zip((module.running_mean, module.running_var), statistics[1:], strict=True):
        running.mul_(kept).add_(value, alpha=added)


def _momenta(module: _BatchNorm, passes: int) -> tuple[float, float]:
    """The factors of the running statistics and of what was recorded."""
    if module.momentum is not None:
        return (1.0 - module.momentum) ** passes, module.momentum
    seen = max(1.0, float(cast(Tensor, module.num_batches_tracked)))
    return 1.0 - passes / seen, 1.0 / seen


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
