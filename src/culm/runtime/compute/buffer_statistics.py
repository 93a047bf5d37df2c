"""Buffers that training updates in forward: batch norm's running statistics, and those of modules that say how.

F returns the statistics of a micro-batch without changing a buffer. Every holder applies them once, at the end of the
step, in micro-batch order. So the result does not depend on which worker ran the micro-batch, nor on how often.

A user's module takes part by calling `record(self, *tensors)` once in every training forward and having a method
`apply_statistics(*tensors)` that updates its buffers. Any other buffer that changes raises JobError, which names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from culm.errors import JobError

Statistics: TypeAlias = tuple[tuple[Tensor, ...], ...]
"""What the modules of a layer with moving buffers recorded for one micro-batch, in their order."""
Records: TypeAlias = dict[int, tuple[Tensor, ...]]
"""Recorded tensors by id of the module."""

LOSS = "Job.loss"
_NORM_BUFFERS = "running_mean", "running_var", "num_batches_tracked"
"""The buffers of a norm that training updates."""

_CPU = torch.device("cpu")
_active_records: Records | None = None


def record(module: nn.Module, *statistics: Tensor) -> None:
    """Called in a module's forward: the statistics that this micro-batch adds to its buffers. Outside of training it
    does nothing."""
    if _active_records is None:
        return
    if id(module) in _active_records:
        raise JobError(f"a {type(module).__name__} records statistics twice for one micro-batch: call record() once")
    _active_records[id(module)] = tuple(value.detach() for value in statistics)


class RecordCollector:
    """Context manager: collects what modules record while it is open."""

    def __enter__(self) -> Records:
        global _active_records  # forward cannot be passed an argument, it is the user's
        self._before, _active_records = _active_records, {}
        return _active_records

    def __exit__(self, *exception: object) -> None:
        global _active_records  # noqa: PLW0603
        _active_records = self._before


def prepare_moving_modules(layer: int, module: nn.Module) -> list[nn.Module]:
    """The modules of a layer whose buffers move, in order. Norms are changed to record statistics instead of updating
    their buffers."""
    moving: list[nn.Module] = []
    for name, part in module.named_modules():
        where = f"Job.layers[{layer}]" + (f".{name}" if name else "")
        if isinstance(part, nn.SyncBatchNorm):
            raise JobError(f"{where} is a SyncBatchNorm: use BatchNorm, whose statistics are those of a micro-batch")
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise JobError(f"{where} keeps extra state, which cannot move with its layer: keep it in buffers")
        if isinstance(part, _NormBase):
            if part.track_running_stats and part.running_mean is not None:
                cast(Any, part).forward = _RecordingNormForward(part)
                moving.append(part)
        elif hasattr(part, "apply_statistics"):
            moving.append(part)
    return moving


class _RecordingNormForward:
    """The forward of a norm that records the statistics of a micro-batch instead of updating its buffers.

    The original forward, which may be the user's own, runs with temporary buffers: with momentum 1 these end up with
    the statistics of this micro-batch alone.
    """

    def __init__(self, module: _NormBase) -> None:
        self._module = module
        self._original_forward = module.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module = self._module
        if not module.training:
            return self._original_forward(*inputs, **named)
        own = {name: module._buffers[name] for name in _NORM_BUFFERS}
        scratch = {name: None if value is None else torch.zeros_like(value) for name, value in own.items()}
        momentum = module.momentum
        module._buffers.update(scratch)
        module.momentum = 1.0
        try:
            out = self._original_forward(*inputs, **named)
            mean, variance, count = (module._buffers[name] for name in _NORM_BUFFERS)
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
    """Record one call of a norm. It may be called several times in a forward: (calls, mean, variance) of all is
    recorded.

    Updating by each call in turn equals one update: r(1-m)^2 + m(a(1-m) + b). Without a momentum a sum is enough.
    """
    if _active_records is None:
        return
    passes = torch.tensor(1)
    if (known := _active_records.pop(id(module), None)) is not None:
        kept = 1.0 if module.momentum is None else 1.0 - module.momentum
        passes, mean, variance = known[0] + 1, known[1] * kept + mean, known[2] * kept + variance
    record(module, passes, mean, variance)


def _empty_record(module: nn.Module) -> tuple[Tensor, ...]:
    """What is recorded for a norm that was not called."""
    if not isinstance(module, _NormBase):
        raise JobError(
            f"a {type(module).__name__} has apply_statistics() but recorded nothing for a micro-batch: "
            "call culm.runtime.compute.buffer_statistics.record() in every forward of training"
        )
    assert module.running_mean is not None
    assert module.running_var is not None
    return torch.tensor(0), torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)


def gather_statistics(moving: Sequence[nn.Module], recorded: Records) -> Statistics:
    """What the moving modules of a layer recorded, complete: the same shapes for every micro-batch."""
    return tuple(recorded.get(id(module)) or _empty_record(module) for module in moving)


def apply_to_buffers(module: nn.Module, statistics: Sequence[Tensor], device: torch.device = _CPU) -> None:
    """Update the buffers of one module by the statistics of one micro-batch. They are moved to the device of the
    buffers."""
    if not isinstance(module, _NormBase):
        cast(Any, module).apply_statistics(*(_moved_to(device, value) for value in statistics))
        return
    assert module.running_mean is not None
    assert module.running_var is not None
    passes = int(statistics[0])  # in host memory: reading it does not wait for the device
    if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None:
        module.num_batches_tracked += passes
    kept, added = _momentum_factors(module, passes)
    for running, value in zip((module.running_mean, module.running_var), statistics[1:], strict=True):
        running.mul_(kept).add_(_moved_to(device, value), alpha=added)


def _moved_to(device: torch.device, value: Tensor) -> Tensor:
    """A value on another device. A clone is moved: the value may lie in a slab that is used again before a copy from
    page-locked memory is done. A copy from ordinary memory has read it when the call returns."""
    return value if value.device == device else value.clone().to(device, non_blocking=True)


def _momentum_factors(module: _NormBase, passes: int) -> tuple[float, float]:
    """(factor of the running statistics, factor of the recorded ones)."""
    if module.momentum is not None:
        return (1.0 - module.momentum) ** passes, module.momentum
    if isinstance(module, _InstanceNorm):  # without a momentum its statistics do not change
        return 1.0, 0.0
    seen = max(1.0, float(cast(Tensor, module.num_batches_tracked)))
    return 1.0 - passes / seen, 1.0 / seen


class MutationGuard:
    """Detects buffers that changed without being recorded, and weights that changed in forward.

    It checks torch's version counters after each forward. Some kernels change a buffer without counting (batch norm's,
    called as a function): so it compares values, too, in the first forward.
    """

    def __init__(self, where: str, module: nn.Module, moving: Sequence[nn.Module] = ()) -> None:
        known = {id(buffer) for part in moving for buffer in part.buffers()}
        self._where = where
        self._watched_buffers = [
            (name, part, own)
            for prefix, part in module.named_modules()
            for own, buffer in part.named_buffers(recurse=False)
            if id(buffer) not in known
            for name in [f"{prefix}.{own}" if prefix else own]
        ]
        self._weights = dict(module.named_parameters())
        self._expected_versions = self._buffer_versions()
        self._first_pass_values: tuple[list[Tensor | None], list[tuple[int, int]]] | None = None
        self._is_first_pass = True
        self.moved_weight: str | None = None
        """Name of a weight that changed in forward."""

    def _buffer_versions(self) -> list[tuple[int, int]]:
        return [
            (id(b), b._version) for _, part, own in self._watched_buffers for b in [part._buffers[own]] if b is not None
        ]

    def _buffers_and_weight_versions(self) -> tuple[list[Tensor | None], list[tuple[int, int]]]:
        return [part._buffers[own] for _, part, own in self._watched_buffers], [
            (0 if isinstance(p, FakeTensor) else p.data_ptr(), p._version) for p in self._weights.values()
        ]

    def accept_current_buffers(self) -> None:
        """Accept the current buffers: they were set on purpose (a checkpoint was loaded)."""
        self._expected_versions = self._buffer_versions()

    def before_forward(self) -> None:
        """Called before a forward."""
        if self._is_first_pass:
            buffers, weights = self._buffers_and_weight_versions()
            self._first_pass_values = [None if b is None else b.detach().clone() for b in buffers], weights

    def check_buffers(self) -> None:
        """Called after a forward. Raises JobError with the name of the first buffer that changed since the module was
        built."""
        if self._watched_buffers and (now := self._buffer_versions()) != self._expected_versions:
            names = (
                n
                for (n, _, _), a, b in zip(self._watched_buffers, self._expected_versions, now, strict=False)
                if a != b
            )
            raise self._moved_buffer_error(next(names, "a buffer"))
        if self._first_pass_values is not None:
            self._compare(*self._first_pass_values)
            self._is_first_pass, self._first_pass_values = False, None

    def _compare(self, buffers: Sequence[Tensor | None], weights: Sequence[tuple[int, int]]) -> None:
        now, moved = self._buffers_and_weight_versions()
        for (name, _, _), a, b in zip(self._watched_buffers, buffers, now, strict=True):
            fake = isinstance(a, FakeTensor) or isinstance(b, FakeTensor)
            if a is not None and b is not None and not fake and not torch.equal(a, b):
                raise self._moved_buffer_error(name)
        self.moved_weight = next((n for n, a, b in zip(self._weights, weights, moved, strict=True) if a != b), None)

    def check_weights(self) -> None:
        """Raises JobError if a weight of the layer changed in forward. Called where other workers hold the layer, too:
        they would not see the change, unless they ran the same micro-batches."""
        if self.moved_weight is not None:
            raise JobError(
                f"{self._where} changes its parameter {self.moved_weight!r} in forward, which its other holders would "
                "not see: "
                "compute with a changed copy there (torch.nn.utils.parametrize), or change it in the optimizer's step"
            )

    def _moved_buffer_error(self, name: str) -> JobError:
        if self._where == LOSS:
            return JobError(
                f"{self._where} moves its buffer {name!r}, which other workers would not see: make it part of a layer"
            )
        return JobError(
            f"{self._where} moves its buffer {name!r} in forward: call culm.runtime.compute.buffer_statistics.record() "
            "there and give the module a method apply_statistics(), so that every micro-batch counts once"
        )
