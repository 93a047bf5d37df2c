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
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from culm.errors import JobError

Statistics: TypeAlias = tuple[tuple[Tensor, ...], ...]
"""What the moving modules of a layer recorded for one micro-batch, in their order."""
Records: TypeAlias = dict[int, tuple[Tensor, ...]]
"""By id of the module."""

LOSS = "Job.loss"
_RUNNING = "running_mean", "running_var", "num_batches_tracked"
"""The buffers of a norm that move."""

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
    """The modules of a layer whose buffers move, in order; norms are taught to record instead of moving."""
    moving: list[nn.Module] = []
    for name, part in module.named_modules():
        where = f"Job.layers[{layer}]" + (f".{name}" if name else "")
        if isinstance(part, nn.SyncBatchNorm):
            raise JobError(f"{where} is a SyncBatchNorm: use BatchNorm, whose statistics are those of a micro-batch")
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise JobError(f"{where} keeps extra state, which can not move with its layer: keep it in buffers")
        if isinstance(part, _NormBase):
            if part.track_running_stats and part.running_mean is not None:
                cast(Any, part).forward = _NormForward(part)
                moving.append(part)
        elif hasattr(part, "apply_statistics"):
            moving.append(part)
    return moving


class _NormForward:
    """A norm that records the statistics of the micro-batch where it would have moved its buffers.

    Its forward, also one that the user has made of it, runs with others in their place: with momentum 1 these are left
    with the statistics of this micro-batch alone.
    """

    def __init__(self, module: _NormBase) -> None:
        self._module = module
        self._plain = module.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module = self._module
        if not module.training:
            return self._plain(*inputs, **named)
        own = {name: module._buffers[name] for name in _RUNNING}
        scratch = {name: None if value is None else torch.zeros_like(value) for name, value in own.items()}
        momentum = module.momentum
        module._buffers.update(scratch)
        module.momentum = 1.0
        try:
            out = self._plain(*inputs, **named)
            mean, variance, count = (module._buffers[name] for name in _RUNNING)
        finally:
            module._buffers.update(own)
            module.momentum = momentum
        assert mean is not None
        assert variance is not None
        counted = count is not None and (count is not scratch["num_batches_tracked"] or count._version > 0)
        if counted or isinstance(module, _InstanceNorm) or bool(variance.any()):
            _record_pass(module, mean, variance)
        return out


def _record_pass(module: _NormBase, mean: Tensor, variance: Tensor) -> None:
    """A norm may be passed any number of times in a forward: what is recorded is (passes, mean, variance) of all.

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
    """What a norm records that was not passed."""
    if not isinstance(module, _NormBase):
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
    if not isinstance(module, _NormBase):
        cast(Any, module).apply_statistics(*statistics)
        return
    assert module.running_mean is not None
    assert module.running_var is not None
    passes = int(statistics[0])
    if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None:
        module.num_batches_tracked += passes
    kept, added = _momenta(module, passes)
    for running, value in zip((module.running_mean, module.running_var), statistics[1:], strict=True):
        running.mul_(kept).add_(value, alpha=added)


def _momenta(module: _NormBase, passes: int) -> tuple[float, float]:
    """The factors of the running statistics and of what was recorded."""
    if module.momentum is not None:
        return (1.0 - module.momentum) ** passes, module.momentum
    if isinstance(module, _InstanceNorm):  # without a momentum its statistics stand still
        return 1.0, 0.0
    seen = max(1.0, float(cast(Tensor, module.num_batches_tracked)))
    return 1.0 - passes / seen, 1.0 / seen


class Guard:
    """Notices buffers that moved although nobody said how, and weights that moved in forward.

    Of each pass it sees what torch notes of a change. Some kernels change a buffer without a note (batch norm's, called
    as a function): so in the first pass it compares the values, too.
    """

    def __init__(self, where: str, module: nn.Module, moving: Sequence[nn.Module] = ()) -> None:
        known = {id(buffer) for part in moving for buffer in part.buffers()}
        self._where = where
        self._owners = [
            (name, part, own)
            for prefix, part in module.named_modules()
            for own, buffer in part.named_buffers(recurse=False)
            if id(buffer) not in known
            for name in [f"{prefix}.{own}" if prefix else own]
        ]
        self._weights = dict(module.named_parameters())
        self._seen = self._look()
        self._before: tuple[list[Tensor | None], list[tuple[int, int]]] | None = None
        self._first = True
        self.moved: str | None = None
        """A weight that moved in forward."""

    def _look(self) -> list[tuple[int, int]]:
        return [(id(b), b._version) for _, part, own in self._owners for b in [part._buffers[own]] if b is not None]

    def _look_closely(self) -> tuple[list[Tensor | None], list[tuple[int, int]]]:
        return [part._buffers[own] for _, part, own in self._owners], [
            (0 if isinstance(p, FakeTensor) else p.data_ptr(), p._version) for p in self._weights.values()
        ]

    def forgive(self) -> None:
        """The buffers were set on purpose (a checkpoint was loaded)."""
        self._seen = self._look()

    def watch(self) -> None:
        """A pass is about to begin."""
        if self._first:
            buffers, weights = self._look_closely()
            self._before = [None if b is None else b.detach().clone() for b in buffers], weights

    def check(self) -> None:
        """After a pass. Raises JobError with the name of the first buffer that moved since the module was built."""
        if self._owners and (now := self._look()) != self._seen:
            names = (n for (n, _, _), a, b in zip(self._owners, self._seen, now, strict=False) if a != b)
            raise self._refusal(next(names, "a buffer"))
        if self._before is not None:
            self._compare(*self._before)
            self._first, self._before = False, None

    def _compare(self, buffers: Sequence[Tensor | None], weights: Sequence[tuple[int, int]]) -> None:
        now, moved = self._look_closely()
        for (name, _, _), a, b in zip(self._owners, buffers, now, strict=True):
            if a is not None and b is not None and not isinstance(b, FakeTensor) and not torch.equal(a, b):
                raise self._refusal(name)
        self.moved = next((n for n, a, b in zip(self._weights, weights, moved, strict=True) if a != b), None)

    def check_weights(self) -> None:
        """Where others hold the layer, too: raises JobError if one of its weights moved in forward, which only those
        see that run the same micro-batches."""
        if self.moved is not None:
            raise JobError(
                f"{self._where} moves its parameter {self.moved!r} in forward, which its other holders would not see: "
                "compute with a changed copy there (torch.nn.utils.parametrize), or change it in the optimizer's step"
            )

    def _refusal(self, name: str) -> JobError:
        if self._where == LOSS:
            return JobError(
                f"{self._where} moves its buffer {name!r}, which other workers would not see: make it part of a layer"
            )
        return JobError(
            f"{self._where} moves its buffer {name!r} in forward: call culm.runtime.statistics.record() "
            "there and give the module a method apply_statistics(), so that every micro-batch counts once"
        )
