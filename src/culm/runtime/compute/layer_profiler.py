"""Measure time and memory of each layer: what `culm profile` writes and the partition into stages uses."""

from __future__ import annotations

import statistics as stats
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from culm.device.streams import COMPLETE, DeviceEvent, open_streams
from culm.errors import LayerFailed
from culm.plan.model.model_profile import LayerCost, Profile
from culm.runtime.compute import buffer_statistics, split_backward
from culm.runtime.compute.batch_loading import Activations, load_micro_batch
from culm.runtime.compute.deterministic import exact_algorithms
from culm.runtime.compute.device import select_device
from culm.runtime.compute.lr_schedule import LearningRates
from culm.runtime.compute.model_state import LayerReplica, build_layer
from culm.runtime.compute.rng import derive_seed
from culm.runtime.compute.saved_tensors import DeferredBytes, SavedTensorBytes
from culm.runtime.compute.user_code import call_layer, compute_loss

if TYPE_CHECKING:
    from culm.device.streams import DeviceStream, DeviceStreams
    from culm.job import Job

ProgressCallback: TypeAlias = Callable[[str, int, int], None]
_Span: TypeAlias = tuple[DeviceEvent, DeviceEvent]
"""The events before and after some work."""
_NOTHING: _Span = COMPLETE, COMPLETE
_ROUNDS = 5
_MAX_LAYER_S = 1.0
"""A layer is measured for about this long."""


def profile_layers(
    job: Job,
    *,
    device: str | None = None,
    reuse_equal: bool = False,
    progress: ProgressCallback = lambda *_: None,
    streams: DeviceStreams | None = None,
) -> Profile:
    """Measure each layer alone, with the job's threads, on micro-batch 0. `reuse_equal`: a layer that looks like an
    earlier one (description, shapes of parameters and inputs) is not measured again. Times are those of the device,
    between events in its compute stream (`streams`; default: those of the job's device). Raises LayerFailed if a layer
    does not run."""
    where = torch.device(device) if device is not None else select_device(job)
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    opened = streams or open_streams(where)
    try:
        with exact_algorithms(job, where):
            return _profile_layers(job, where, opened.compute, reuse_equal, progress)
    finally:
        opened.close()
        torch.set_num_threads(before)


def _profile_layers(
    job: Job, device: torch.device, stream: DeviceStream, reuse_equal: bool, progress: ProgressCallback
) -> Profile:
    values, target, _ = load_micro_batch(job, 0, 0, device)
    costs: list[LayerCost] = []
    known: dict[object, LayerCost] = {}
    count = len(job.layers)
    for index in range(count):
        progress("measuring layers", index, count)
        layer = LayerReplica(job, index, build_layer(job, index).to(device), {})
        ends = target if index == count - 1 else None
        timer, look = (
            _LayerTimer(job, layer, values, device, stream, ends),
            _describe_layer(layer, values, ends is not None),
        )
        if reuse_equal and look in known:
            values, cost = timer.outputs(), known[look]
        else:
            values, cost = timer.measure_cost()
        known[look] = cost
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


def _describe_layer(layer: LayerReplica, values: Activations, is_last: bool) -> object:
    """What layers of equal cost have in common."""
    state = [*layer.module.parameters(), *layer.module.buffers()]
    return repr(layer.module), *((t.shape, t.dtype) for t in (*state, *values)), layer.index == 0, is_last


def _seconds(span: _Span) -> float:
    began, ended = span
    return ended.seconds_since(began)


class _LayerTimer:
    """Measure one layer (the last one together with the loss)."""

    def __init__(
        self,
        job: Job,
        layer: LayerReplica,
        values: Activations,
        device: torch.device,
        stream: DeviceStream,
        target: Any,
    ) -> None:
        self.job, self.layer, self.device, self.target = job, layer, device, target
        self._stream = stream
        self.inputs = tuple(v.detach().requires_grad_(v.is_floating_point() and layer.index > 0) for v in values)
        self.seed = derive_seed(job.seed, 0, 0, layer.index)
        self.saved_bytes = self.deferred_bytes = 0
        """Bytes that the last forward saved for its backward, and those that a split backward keeps beside them."""

    def measure_cost(self) -> tuple[Activations, LayerCost]:
        parameters = list(self.layer.trainable.values())
        wanted = [x for x in self.inputs if x.requires_grad]
        measured: list[list[float]] = [[] for _ in range(5)]
        steps, forward, inward, whole, halves = measured
        began = time.perf_counter()
        for turn in range(_ROUNDS + 1):
            # All of a turn is launched before the first time is read: a device does not wait for the host in between.
            outputs, ends, forward_span = self._forward()
            input_span = self._run_backward(ends, wanted, keep=True) if wanted else _NOTHING
            whole_span = self._run_backward(ends, wanted + parameters, keep=False)
            halves_span = self._run_split_backward() if wanted else whole_span
            step_span = self._run_optimizer_step()
            spans = (step_span, forward_span, input_span, whole_span, halves_span)
            for times, span in zip(measured, spans, strict=True):
                times.append(_seconds(span))
            if turn and time.perf_counter() - began > _MAX_LAYER_S:
                break
        f, i, b, s = (stats.median(times[1:]) for times in (forward, inward, whole, steps))
        # a small difference: the minimum of each is the least noisy
        halving = max(min(halves[1:]) - min(whole[1:]), 0.0)
        return outputs, self._layer_cost(outputs, f, i, max(b - i, 0.0), s, halving)

    def outputs(self) -> Activations:
        """The outputs of one forward."""
        return self._forward()[0]

    def _forward(self) -> tuple[Activations, list[Tensor], _Span]:
        saved, deferred = SavedTensorBytes(self.layer.module.parameters()), DeferredBytes()
        cast: AbstractContextManager[Any] = nullcontext()
        if self.job.precision == "bf16":
            cast = torch.autocast(self.device.type, torch.bfloat16)
        with (
            cast,
            buffer_statistics.RecordCollector(),
            torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t),
            deferred.counting(self.layer.module),
        ):
            began = self._mark()
            outputs = call_layer(self.layer, self.inputs, self.seed)
            ends = list(outputs)
            if self.target is not None:
                ends = [compute_loss(self.job, outputs, self.target, self.seed)[0]]
            span = began, self._mark()
        self.saved_bytes, self.deferred_bytes = saved.total, deferred.total
        return tuple(v.detach() for v in outputs), [e for e in ends if e.requires_grad], span

    def _run_backward(self, ends: list[Tensor], leaves: list[Any], *, keep: bool) -> _Span:
        if not ends or not leaves:
            return _NOTHING
        began = self._mark()
        try:
            gradients = torch.autograd.grad(ends, leaves, [torch.ones_like(e) for e in ends], keep, allow_unused=True)
        except RuntimeError as error:
            raise LayerFailed(f"the backward of {self.layer.label} raised {error}") from error
        span = began, self._mark()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if isinstance(leaf, torch.nn.Parameter) and gradient is not None:
                leaf.grad = gradient
        return span

    def _run_split_backward(self) -> _Span:
        """Run the backward of another forward as I and W. The gradients are added as in a run."""
        _, ends, _ = self._forward()
        began = self._mark()
        try:
            _, rest = split_backward.input_backward(ends, [torch.ones_like(e) for e in ends], self.inputs)
            split_backward.weight_backward(rest)
        except RuntimeError as error:
            raise LayerFailed(f"the backward of {self.layer.label} raised {error}") from error
        return began, self._mark()

    def _run_optimizer_step(self) -> _Span:
        began = self._mark()
        self.layer.unit.step(0, LearningRates(self.job))
        return began, self._mark()

    def _mark(self) -> DeviceEvent:
        return self._stream.record(timed=True)

    def _layer_cost(
        self, outputs: Activations, forward: float, inward: float, weight: float, step: float, halving: float
    ) -> LayerCost:
        unit = self.layer.unit.snapshot()
        trained = sum(p.nbytes for p in self.layer.trainable.values())
        return LayerCost(
            name=type(self.layer.module).__name__,
            forward_s=forward,
            input_s=inward,
            weight_s=weight,
            parameter_bytes=sum(p.nbytes for p in self.layer.module.parameters()),
            state_bytes=trained + sum(m.nbytes for m in unit.moments.values()),
            activation_bytes=self.saved_bytes,
            deferred_bytes=self.deferred_bytes,
            output_bytes=sum(v.nbytes for v in outputs),
            buffer_bytes=sum(b.nbytes for b in self.layer.module.buffers()),
            largest_parameter_bytes=max((p.nbytes for p in self.layer.module.parameters()), default=0),
            step_s=step,
            halving_s=halving,
        )
