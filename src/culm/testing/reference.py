"""The reference: one process, one loop, no stages. What every run of culm must equal.

It runs layer by layer with detached ends, the finest cut there is, so that equality with it says that no cut matters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from culm.runtime import statistics
from culm.runtime.call import call_layer, handed_on, loss_of
from culm.runtime.data import Values, evaluation_batch, evaluation_batches, evaluation_share, micro_batch
from culm.runtime.keys import key
from culm.runtime.state import HeldLayer, Snapshot, State, total_digest
from culm.runtime.statistics import Statistics
from culm.runtime.update import (
    apply_statistics,
    check_finite,
    check_loss,
    clip_factor,
    finish_layers,
    layer_norms,
    lr_factor,
    scale,
)

if TYPE_CHECKING:
    from culm.job import Job


NOTHING: Mapping[int, Collection[int]] = {}


@dataclass
class Trained:
    """What a run comes to: the losses by step, and the state at the end."""

    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=Snapshot)
    weights_sha256: str = ""
    state_sha256: str = ""


def reference(job: Job, *, dropped: Mapping[int, Collection[int]] = NOTHING) -> Trained:
    """Train the job in this process, on the CPU, with its number of threads. Raises what a run would.

    `dropped` are micro-batches, by step, that are left out as the baseline `drop` does.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        state = State(job, range(len(job.layers)))
        trained = Trained()
        for step in range(job.steps):
            trained.losses.append(_step(job, state, step, dropped.get(step, ())))
            evaluates = job.evaluate_every and (step + 1) % job.evaluate_every == 0
            if evaluates and (found := _evaluate(job, state)) is not None:
                trained.evaluations[step] = found
    finally:
        torch.set_num_threads(before)
    digests = state.digests(state.layers)
    trained.snapshot = state.snapshot().copy()
    trained.weights_sha256 = total_digest(weights for weights, _ in digests.values())
    trained.state_sha256 = total_digest(whole for _, whole in digests.values())
    return trained


def _step(job: Job, state: State, step: int, dropped: Collection[int]) -> float:
    layers = list(state.layers.values())
    loss_sum, weight_sum, recorded = 0.0, 0.0, []
    for micro in (micro for micro in range(job.micro_batches) if micro not in dropped):
        inputs, target = micro_batch(job, step, micro, state.device)
        loss, weight, moved = _micro_batch(job, layers, step, micro, inputs, target)
        loss_sum += loss
        weight_sum += weight
        recorded.append(moved)
    for layer in layers:
        layer.accumulator.gather()
    check_loss(job, step, loss_sum, weight_sum)
    _finish(state, weight_sum)
    norm, factor = clip_factor(job, [layer_norms(layer, state.tied) for layer in layers])
    if job.clip_norm is not None:
        scale(state, layers, state.tied.values(), factor)
    if job.nonfinite == "stop" or math.isfinite(loss_sum + norm):
        check_finite(step, layers, state.tied.values())
        for _, unit in state.units():
            unit.step(lr_factor(job, step))
        for layer in layers:
            apply_statistics(layer, [moved[layer.index] for moved in recorded] if layer.moving else [])
    for layer in layers:
        layer.accumulator.clear()
    return loss_sum / (weight_sum or 1.0)


def _finish(state: State, divisor: float) -> None:
    """From sums to gradients; those that layers share first, since the sums of the layers are divided in place."""
    for group in (group for group in state.tied.values() if group.trains):
        held = [state.layers[index] for index in group.layers()]
        sums = [layer.sums()[name] for layer, name in zip(held, group.names, strict=True)]
        group.finish(sums, [layer.accumulator.bound for layer in held], divisor)
    finish_layers(state.layers.values(), divisor)


def _micro_batch(
    job: Job, layers: list[HeldLayer], step: int, micro: int, inputs: Values, target: Any
) -> tuple[float, float, dict[int, Statistics]]:
    """Forward and backward of all layers; gradients go into the sums, (loss, weight, statistics) come back."""
    graph: list[tuple[Values, Values]] = []
    moved = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
        values = inputs
        for layer in layers:
            leaves = tuple(handed_on(v) for v in values)
            layer.guard.watch()
            with statistics.recording() as recorded:
                values = call_layer(layer, leaves, key(job.seed, step, micro, layer.index))
            layer.guard.check()
            if layer.moving:
                moved[layer.index] = statistics.collect(layer.moving, recorded)
            graph.append((leaves, values))
        ends = tuple(handed_on(v) for v in values)
        loss, weight = loss_of(job, ends, target, key(job.seed, step, micro, len(job.layers)))
    if loss.requires_grad:
        loss.backward()
    for leaves, values in reversed(graph):
        pairs = [(v, e.grad) for v, e in zip(values, ends, strict=True) if v.requires_grad and e.grad is not None]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
        ends = leaves
    for layer in layers:
        layer.accumulator.absorb()
    return loss.item(), 1.0 if weight is None else float(weight), moved


def _evaluate(job: Job, state: State) -> float | None:
    """The mean loss over the evaluation set, with every layer in evaluation mode; None where nothing in it counts."""
    loss_sum, weight_sum = 0.0, 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
        for micro in range(evaluation_batches(job)):
            values, target = evaluation_batch(job, micro, state.device)
            for layer in state.layers.values():
                layer.module.eval()
                values = call_layer(layer, values, key(job.seed, -1, micro, layer.index))
                layer.module.train()
            loss, weight = loss_of(job, values, target, key(job.seed, -1, micro, len(job.layers)))
            share, counts = evaluation_share(job, micro, loss, weight)
            loss_sum += share
            weight_sum += counts
    return loss_sum / weight_sum if weight_sum else None
