"""Time and memory of each layer, measured: what `culm profile` writes and stages are cut by."""

from __future__ import annotations

import statistics as stats
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from culm.errors import LayerFailed
from culm.plan.profile import LayerCost, Profile
from culm.runtime import split, statistics
from culm.runtime.call import call_layer, loss_of
from culm.runtime.data import Values, micro_batch
from culm.runtime.device import device_of
from culm.runtime.keys import key
from culm.runtime.state import HeldLayer, build_layer

if TYPE_CHECKING:
    from culm.job import Job

Told: TypeAlias = Callable[[str, int, int], None]
_ROUNDS = 5
_ENOUGH_S = 1.0
"""A layer that has been measured for this long is known well enough."""


def measure(job: Job, *, device: str | None = None, progress: Told = lambda *_: None) -> Profile:
    """Run each layer alone, with the job's threads, on micro-batch 0. Raises LayerFailed if one does not run."""
    where = torch.device(device) if device is not None else device_of(job)
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return _measure(job, where, progress)
    finally:
        torch.set_num_threads(before)


def _measure(job: Job, device: torch.device, progress: Told) -> Profile:
    values, target = micro_batch(job, 0, 0, device)
    costs = []
    count = len(job.layers)
    for index in range(count):
        progress("measuring layers", index, count)
        layer = HeldLayer(job, index, build_layer(job, index).to(device), {})
        ends = target if index == count - 1 else None
        values, cost = _Probe(job, layer, values, device, ends).cost()
        costs.append(cost)
    progress("measuring layers", count, count)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return Profile(
        layers=tuple(costs),
        device=f"{device.type}: {name}",
        micro_batch=job.micro_batch,
        threads=job.threads,
        source="measured",
    )


class _Probe:
    """One layer (the last one with the loss behind it) under the clock."""

    def __init__(self, job: Job, layer: HeldLayer, values: Values, device: torch.device, target: Any) -> None:
        self.job, self.layer, self.device, self.target = job, layer, device, target
        self.inputs = tuple(v.detach().requires_grad_(v.is_floating_point() and layer.index > 0) for v in values)
        self.draw = key(job.seed, 0, 0, layer.index)
        self.saved = 0

    def cost(self) -> tuple[Values, LayerCost]:
        parameters = list(self.layer.trained.values())
        wanted = [x for x in self.inputs if x.requires_grad]
        forward, inward, whole, halves, steps = [], [], [], [], []
        began = time.perf_counter()
        for turn in range(_ROUNDS + 1):
            made, ends, seconds = self._forward()
            inward.append(self._timed_grad(ends, wanted, keep=True) if wanted else 0.0)
            whole.append(self._timed_grad(ends, wanted + parameters, keep=False))
            forward.append(seconds)
            halves.append(self._timed_halves() if wanted else whole[-1])
            steps.append(self._timed_step())
            if turn and time.perf_counter() - began > _ENOUGH_S:
                break
        f, i, b, s = (stats.median(times[1:]) for times in (forward, inward, whole, steps))
        halving = max(min(halves[1:]) - min(whole[1:]), 0.0)  # a small difference, which the least of each shows best
        return made, self._priced(made, f, i, max(b - i, 0.0), s, halving)

    def _forward(self) -> tuple[Values, list[Tensor], float]:
        self.saved = 0
        cast: AbstractContextManager[Any] = nullcontext()
        if self.job.precision == "bf16":
            cast = torch.autocast(self.device.type, torch.bfloat16)
        with cast, statistics.recording(), torch.autograd.graph.saved_tensors_hooks(self._note, lambda t: t):
            began = self._now()
            made = call_layer(self.layer, self.inputs, self.draw)
            ends = [loss_of(self.job, made, self.target, self.draw)[0]] if self.target is not None else list(made)
            seconds = self._now() - began
        return tuple(v.detach() for v in made), [e for e in ends if e.requires_grad], seconds

    def _note(self, tensor: Tensor) -> Tensor:
        self.saved += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes
        return tensor

    def _timed_grad(self, ends: list[Tensor], leaves: list[Any], *, keep: bool) -> float:
        if not ends or not leaves:
            return 0.0
        began = self._now()
        try:
            found = torch.autograd.grad(ends, leaves, [torch.ones_like(e) for e in ends], keep, allow_unused=True)
        except RuntimeError as error:
            raise LayerFailed(f"the backward of {self.layer.label} raised {error}") from error
        seconds = self._now() - began
        for leaf, gradient in zip(leaves, found, strict=True):
            if isinstance(leaf, torch.nn.Parameter) and gradient is not None:
                leaf.grad = gradient
        return seconds

    def _timed_halves(self) -> float:
        """The backward of another forward as I and W, whose gradients go where those of a run would."""
        _, ends, _ = self._forward()
        began = self._now()
        try:
            _, rest = split.input_half(ends, [torch.ones_like(e) for e in ends], self.inputs)
            split.weight_half(rest)
        except RuntimeError as error:
            raise LayerFailed(f"the backward of {self.layer.label} raised {error}") from error
        return self._now() - began

    def _timed_step(self) -> float:
        began = self._now()
        self.layer.unit.step(1.0)
        return self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _priced(
        self, made: Values, forward: float, inward: float, weight: float, step: float, halving: float
    ) -> LayerCost:
        unit = self.layer.unit.snapshot()
        trained = sum(p.nbytes for p in self.layer.trained.values())
        return LayerCost(
            name=type(self.layer.module).__name__,
            forward_s=forward,
            input_s=inward,
            weight_s=weight,
            parameter_bytes=sum(p.nbytes for p in self.layer.module.parameters()),
            state_bytes=trained + sum(m.nbytes for m in unit.moments.values()),
            activation_bytes=self.saved,
            output_bytes=sum(v.nbytes for v in made),
            buffer_bytes=sum(b.nbytes for b in self.layer.module.buffers()),
            step_s=step,
            halving_s=halving,
        )
