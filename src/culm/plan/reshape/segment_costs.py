"""Costs and memory of the segments that a model is cut into, from the costs of its layers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from culm.plan.model.layer_partition import Cuts, segment_layer_ranges
from culm.plan.model.model_profile import LayerCost
from culm.plan.model.shape_search import DEFAULT_BANDWIDTH
from culm.plan.rent.link_costs import NodeLinks, stage_costs
from culm.plan.replan.two_range_schedule import TwoRanges
from culm.schedule import Costs, Plan


def segment_layers(layers: Sequence[LayerCost], cuts: Cuts) -> list[Sequence[LayerCost]]:
    """The layers of each segment."""
    return [layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(layers))]


def segment_costs(layers: Sequence[LayerCost], cuts: Cuts) -> tuple[tuple[float, float, float], ...]:
    """Seconds of F, I and W of each segment."""
    return tuple(
        (sum(c.forward_s for c in each), sum(c.input_s for c in each), sum(c.weight_s for c in each))
        for each in segment_layers(layers, cuts)
    )


def plan_costs(
    layers: Sequence[LayerCost], cuts: Cuts, pipelines: int, links: NodeLinks | None = None, stages: int | None = None
) -> Costs:
    """Costs of each segment, with the sends over its boundaries and the reduction over the pipelines, but without the
    overhead of splitting a backward. `stages`: if there are fewer of them than segments. `links`: None where they are
    not known: then all have DEFAULT_BANDWIDTH."""
    segments = segment_layers(layers, cuts)
    if links is not None:
        return replace(stage_costs([tuple(each) for each in segments], pipelines, links, stages), split=0.0)
    forward, inputs, weight = zip(*segment_costs(layers, cuts), strict=True)
    bandwidth = DEFAULT_BANDWIDTH
    ring = 2 * (pipelines - 1) / pipelines / bandwidth
    return Costs(
        forward=forward,
        input=inputs,
        weight=weight,
        reduce=tuple(ring * sum(c.parameter_bytes for c in each) for each in segments),
        step=tuple(sum(c.step_s for c in each) for each in segments),
        send=tuple(each[-1].output_bytes / bandwidth for each in segments[:-1]),
    )


def split_overheads(layers: Sequence[LayerCost], cuts: Cuts) -> tuple[float, ...]:
    """Seconds by which I and W of each segment take longer than B; 0 for layers without a measurement."""
    return tuple(sum(layer.halving_s or 0.0 for layer in each) for each in segment_layers(layers, cuts))


def activation_capacity(memory: int | None, layers: Sequence[LayerCost], cuts: Cuts, plan: Plan) -> int | None:
    """How many activations fit into the fullest stage besides what a recovery needs. None: no limit."""
    return None if memory is None else min(activation_capacities(memory, layers, cuts, len(plan.micros_of(0))))


def activation_capacities(memory: int, layers: Sequence[LayerCost], cuts: Cuts, micros: int) -> list[int]:
    """By segment: how many activations fit into the memory besides what a recovery needs: the weights of the previous
    step, the complete sums, and the tensors that cross the boundaries of a stage in two open steps of `micros`
    micro-batches. At least 1."""
    capacities = []
    for span in segment_layer_ranges(cuts, len(layers)):
        own = layers[span.start : span.stop]
        input_bytes = layers[span.start - 1].output_bytes if span.start else 0
        boundary_bytes = 2 * micros * (own[-1].output_bytes + input_bytes)
        state = sum(layer.resident_bytes + 2 * layer.parameter_bytes for layer in own)
        available = memory - state - boundary_bytes
        capacities.append(max(1, available // max(1, sum(layer.activation_bytes for layer in own))))
    return capacities


def two_range_memory(
    layers: Sequence[LayerCost],
    cuts: Cuts,
    two_range_cuts: Cuts,
    costs: Costs,
    micros: int,
    *,
    memory: int | None,
    max_activations: int | None,
) -> TwoRanges:
    """Two segments per worker with the memory that each worker may use for activations: that of `max_activations`
    micro-batches, or what `memory` leaves beside what a recovery needs, or what 1F1B needs on its fullest worker with
    one segment per worker (`cuts`). Layers whose activations were not measured count as equal."""
    segments, P = segment_layers(layers, two_range_cuts), len(cuts) + 1
    own = [(*segments[s], *segments[P + s]) for s in range(P)]
    activation = tuple(sum(layer.activation_bytes for layer in each) for each in segments)
    if not all(activation):
        activation = (1,) * len(segments)
        room = [2 * (max_activations or min(micros, P))] * P
    elif max_activations is not None:
        room = [max_activations * (activation[s] + activation[P + s]) for s in range(P)]
    elif memory is not None:
        room = [memory - _kept_for_recovery(layers, segments, (s, P + s), micros) for s in range(P)]
    else:
        fullest = _fullest_of_1f1b(layers, cuts, micros)
        room = [fullest - sum(layer.resident_bytes for layer in each) for each in own]
    return TwoRanges(costs=costs, activation=activation, room=tuple(room))


def _kept_for_recovery(
    layers: Sequence[LayerCost], segments: Sequence[Sequence[LayerCost]], held: Sequence[int], micros: int
) -> int:
    """Bytes that a worker with these segments needs beside activations, as in `activation_capacities`."""
    bytes_needed = 0
    for g in held:
        first = sum(map(len, segments[:g]))
        input_bytes = layers[first - 1].output_bytes if first else 0
        bytes_needed += 2 * micros * (segments[g][-1].output_bytes + input_bytes)
        bytes_needed += sum(layer.resident_bytes + 2 * layer.parameter_bytes for layer in segments[g])
    return bytes_needed


def _fullest_of_1f1b(layers: Sequence[LayerCost], cuts: Cuts, micros: int) -> int:
    """Bytes that 1F1B needs on its fullest worker."""
    segments = segment_layers(layers, cuts)
    return max(
        sum(layer.resident_bytes + min(micros, len(segments) - stage) * layer.activation_bytes for layer in each)
        for stage, each in enumerate(segments)
    )


def capacities_of_1f1b(layers: Sequence[LayerCost], cuts: Cuts, micros: int) -> list[int]:
    """By stage: how many activations fit into the memory that 1F1B needs on its fullest worker. All workers have the
    same memory, so a stage with smaller activations can keep more of them. At least as many as 1F1B keeps in the
    stage."""
    segments = segment_layers(layers, cuts)
    kept = [min(micros, len(segments) - stage) for stage in range(len(segments))]
    resident = [sum(layer.resident_bytes for layer in each) for each in segments]
    activation = [sum(layer.activation_bytes for layer in each) for each in segments]
    fullest = _fullest_of_1f1b(layers, cuts, micros)
    return [
        max(k, (fullest - r) // a) if a else len(segments) for r, k, a in zip(resident, kept, activation, strict=True)
    ]
