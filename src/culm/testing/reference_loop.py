"""Reference loop: trains a job in one process and one loop, without stages. Every run of culm must equal its result.

It runs layer by layer and detaches the activations between layers, the finest possible cut: equality with it shows that
the cut into stages does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from culm.metric import declared_metrics
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.batch_loading import (
    Activations,
    evaluation_contribution,
    evaluation_micro_batches,
    load_evaluation_batch,
    load_micro_batch,
)
from culm.runtime.compute.buffer_statistics import Statistics
from culm.runtime.compute.metric_values import MetricValues
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.rng import derive_seed
from culm.runtime.compute.segment import evaluation_mode
from culm.runtime.compute.snapshot import Snapshot, total_digest
from culm.runtime.compute.user_code import call_layer, compute_loss, detach_contiguous
from culm.runtime.compute.weight_update import (
    apply_statistics,
    check_finite,
    check_loss,
    clip_factor,
    clip_values,
    finalize_gradients,
    layer_norms,
    scale_gradients,
)
from culm.runtime.microbatch_stats import combine_values

if TYPE_CHECKING:
    from culm.job import Job


NO_DROPS: Mapping[int, Collection[int]] = {}


@dataclass
class ReferenceResult:
    """The result of training: the losses by step and the final state."""

    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=Snapshot)
    weights_sha256: str = ""
    state_sha256: str = ""
    evaluation_values: dict[int, dict[str, float]] = field(default_factory=dict)
    """The values of Job.metrics over the evaluation set, by step."""


def reference(job: Job, *, dropped: Mapping[int, Collection[int]] = NO_DROPS) -> ReferenceResult:
    """Train the job in this process, on the CPU, with the job's number of threads. Raises what a run would raise.

    A job that evaluates by time is evaluated after every step here, to compare with whichever steps a run chose.
    `dropped`: by step, the micro-batches that are left out, as the baseline `drop` does.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        state = ModelState(job, range(len(job.layers)))
        result = ReferenceResult()
        interval = job.evaluation_interval
        for step in range(job.steps):
            result.losses.append(train_step(job, state, step, dropped.get(step, ())))
            evaluates = interval.seconds or interval.is_due_by_count(step + 1)
            if evaluates and (found := _evaluate(job, state)) is not None:
                result.evaluations[step], result.evaluation_values[step] = found
    finally:
        torch.set_num_threads(before)
    digests = state.digests(state.layers)
    result.snapshot = state.snapshot().copy()
    result.weights_sha256 = total_digest(weights for weights, _ in digests.values())
    result.state_sha256 = total_digest(whole for _, whole in digests.values())
    return result


def train_step(job: Job, state: ModelState, step: int, dropped: Collection[int] = ()) -> float:
    """Train one step on the state, which holds all layers. Returns the loss. Raises what a run would raise."""
    layers = list(state.layers.values())
    loss_sum, weight_sum, recorded = 0.0, 0.0, []
    for micro in (micro for micro in range(job.micro_batches) if micro not in dropped):
        inputs, target, _ = load_micro_batch(job, step, micro, state.device)
        loss, weight, moved = _run_micro_batch(job, state, step, micro, inputs, target)
        loss_sum += loss
        weight_sum += weight
        recorded.append(moved)
    for layer in layers:
        layer.accumulator.collect_grads()
    check_loss(job, step, loss_sum, weight_sum)
    _finish_gradients(state, weight_sum)
    norm, factor = clip_factor(job, [layer_norms(layer, state.tied) for layer in layers])
    if job.clip_norm is not None:
        scale_gradients(state, layers, state.tied.values(), factor)
    if job.nonfinite == "stop" or math.isfinite(loss_sum + norm):
        check_finite(step, layers, state.tied.values())
        clip_values(job, layers, state.tied.values())
        for _, unit in state.units():
            unit.step(step, state.rates)
        for layer in layers:
            apply_statistics(layer, [moved[layer.index] for moved in recorded] if layer.moving_modules else [])
    for layer in layers:
        layer.accumulator.clear()
    return loss_sum / (weight_sum or 1.0)


def _finish_gradients(state: ModelState, divisor: float) -> None:
    """Turn gradient sums into gradients; shared parameters first, because the sums of layers are divided in place."""
    for group in (group for group in state.tied.values() if group.requires_grad):
        held = [state.layers[index] for index in group.layer_indices()]
        sums = [layer.gradient_sums()[name] for layer, name in zip(held, group.names, strict=True)]
        group.finalize_gradient(sums, [layer.accumulator.bound for layer in held], divisor)
    finalize_gradients(state.layers.values(), divisor)


def _run_micro_batch(
    job: Job, state: ModelState, step: int, micro: int, inputs: Activations, target: Any
) -> tuple[float, float, dict[int, Statistics]]:
    """Run forward and backward of all layers and add up the gradients. Returns loss, weight and buffer statistics."""
    graph: list[tuple[Activations, Activations]] = []
    moved = {}
    layers = list(state.layers.values())
    with torch.autocast(state.device.type, torch.bfloat16, enabled=job.precision == "bf16"):
        values = inputs
        for layer in layers:
            leaves = tuple(detach_contiguous(v) for v in values)
            layer.guard.before_forward()
            with buffer_statistics.RecordCollector() as recorded:
                values = call_layer(layer, leaves, derive_seed(job.seed, step, micro, layer.index))
            layer.guard.check_buffers()
            if layer.moving_modules:
                moved[layer.index] = buffer_statistics.gather_statistics(layer.moving_modules, recorded)
            graph.append((leaves, values))
        ends = tuple(detach_contiguous(v) for v in values)
        loss, weight = compute_loss(job, ends, target, derive_seed(job.seed, step, micro, len(job.layers)))
    if loss.requires_grad:
        loss.backward()
    for leaves, values in reversed(graph):
        pairs = [(v, e.grad) for v, e in zip(values, ends, strict=True) if v.requires_grad and e.grad is not None]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
        ends = leaves
    for layer in layers:
        layer.accumulator.add_micro_batch()
    return loss.item(), 1.0 if weight is None else float(weight), moved


def _evaluate(job: Job, state: ModelState) -> tuple[float, dict[str, float]] | None:
    """The mean loss and the values of Job.metrics over the evaluation set, with every layer in evaluation mode; None
    if its total weight is zero."""
    loss_sum, weight_sum, weights, rows = 0.0, 0.0, [], []
    metrics = declared_metrics(job.metrics)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
        for micro in range(evaluation_micro_batches(job)):
            values, target, _ = load_evaluation_batch(job, micro, state.device)
            for layer in state.layers.values():
                with evaluation_mode(state, layer):
                    values = call_layer(layer, values, derive_seed(job.seed, -1, micro, layer.index))
            seed = derive_seed(job.seed, -1, micro, len(job.layers))
            loss, weight, found = MetricValues(metrics).compute_loss(job, values, target, seed)
            share, counts = evaluation_contribution(job, micro, loss, weight)
            loss_sum += share
            weight_sum += counts
            weights.append(counts)
            rows.append(tuple(map(float, found)))
    if not weight_sum:
        return None
    named = {
        name: combine_values(metric, [row[column] for row in rows], weights)
        for column, (name, metric) in enumerate(metrics.items())
    }
    return loss_sum / weight_sum, named
