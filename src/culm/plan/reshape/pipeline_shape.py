"""Another shape for the same model: pipelines of other depths, partitioned again. Pure.

    ShapeInputs                 the model and limits that shapes are built from
    build_shape                 pipelines of given depths, partitioned and planned; depths may differ

Pipelines of unequal depth are cut at different layers. The segments are the pieces that no pipeline cuts, and a worker
of a shorter pipeline runs several of them. In the plan it is a worker that runs several stages, so the rest of the
system needs no special case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import msgspec

from culm.errors import PlanError
from culm.plan.model.layer_partition import Cuts, find_cuts, in_flight_1f1b, partition_layers, segment_layer_ranges
from culm.plan.model.model_profile import LayerCost
from culm.plan.model.shape_prediction import near_equal_depths
from culm.plan.recover.role_assignment import plan_merged_stages
from culm.plan.rent.link_costs import NodeLinks
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.reshape.run_schedule import ScheduledStep, make_run_plan
from culm.plan.reshape.segment_costs import activation_capacity, plan_costs, segment_costs
from culm.schedule import Plan, forward_only, time_plan
from culm.text_format import count_noun

Depths: TypeAlias = tuple[int, ...]
"""Depths of the pipelines, the deepest first."""


class PipelineShape(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of the nodes: depths of the pipelines, cuts, and the plan with every slot filled."""

    depths: Depths
    segments: tuple[tuple[int, int], ...]
    """Layers [first, last + 1) of each segment."""
    plan_text: str
    """The plan. Slots for which a pipeline has no worker are marked as failed."""
    evaluation_plan_text: str | None
    segment_costs: tuple[tuple[float, float, float], ...]
    """Seconds of F, I and W by segment."""
    max_activations: int | None
    """The most activations that fit on a worker; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class ShapeInputs:
    """The model and the limits that shapes are built from."""

    layers: tuple[LayerCost, ...]
    micro_batches: int
    schedule: str = "1f1b"
    ranges: int = 1
    """Segments per worker; more than one only under the interleaved schedule."""
    may_use_two_ranges: bool = False
    """Whether `planned` may give each worker of pipelines of equal depth two segments."""
    evaluation_micro_batches: int = 0
    """Micro-batches of an evaluation; 0: no evaluation."""
    memory: int | None = None
    """Memory of a worker in bytes."""
    max_activations: int | None = None
    """The most activations that a planned schedule keeps on a worker; None: by the memory."""
    synchronous: bool = False
    """Whether all stages make their optimizer step together; the schedule `planned` depends on it."""
    splits_backward: bool = True
    """Whether a backward can be split into I and W."""
    links: NodeLinks | None = None
    """The network between the workers; None: not known."""

    @cached_property
    def min_depth(self) -> int:
        """The smallest depth that fits into the memory. Raises PlanError if there is none."""
        keep = in_flight_1f1b(self.micro_batches)
        for depth in range(1, self.max_depth + 1):
            if find_cuts(self.layers, depth, memory=self.memory, in_flight=keep, ranges=self.ranges) is not None:
                return depth
        partition_layers(self.layers, self.max_depth, memory=self.memory, ranges=self.ranges)
        raise PlanError(f"no number of stages fits into {self.memory} bytes: use a larger device")

    @property
    def max_depth(self) -> int:
        return len(self.layers) // self.ranges

    def cut_layers(self, depth: int) -> Cuts:
        keep = in_flight_1f1b(self.micro_batches)
        return partition_layers(self.layers, depth, memory=self.memory, in_flight=keep, ranges=self.ranges)


def parse_depths(text: str) -> Depths:
    """Parse "2x3" (two pipelines of three) or "3+2". Raises PlanError."""
    if match := re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text):
        return (int(match[2]),) * int(match[1])
    if re.fullmatch(r"[1-9][0-9]{0,5}(\+[1-9][0-9]{0,5})*", text):
        return tuple(sorted(map(int, text.split("+")), reverse=True))
    raise PlanError(f"{text!r} is not a layout: write 2x3 for two pipelines of three nodes, or 3+2 for unequal ones")


def format_depths(depths: Depths) -> str:
    """The text that `parse_depths` reads."""
    return f"{len(depths)}x{depths[0]}" if len(set(depths)) == 1 else "+".join(map(str, depths))


def build_shape(model: ShapeInputs, depths: Depths) -> PipelineShape:
    """Partition and plan pipelines of these depths. Raises PlanError if they do not fit."""
    if len(depths) > model.micro_batches:
        raise PlanError(
            f"{count_noun(len(depths), 'pipeline')} have {count_noun(model.micro_batches, 'micro-batch')} to share: "
            f"use at most {model.micro_batches}"
        )
    even = len(set(depths)) == 1
    if not even and model.ranges > 1:
        raise PlanError(
            f"{format_depths(depths)} is uneven, which the interleaved schedule does not support: use 1f1b or zb"
        )
    if even:
        plan, cuts = _plan_even(model, depths)
    else:
        cuts = _union_of_cuts(model, depths)
        plan = _plan_uneven(model, depths, cuts)
    costs = segment_costs(model.layers, cuts)
    evaluation = _evaluation_plan(model, plan).to_text() if model.evaluation_micro_batches else None
    return PipelineShape(
        depths=depths,
        segments=tuple((span.start, span.stop) for span in segment_layer_ranges(cuts, len(model.layers))),
        plan_text=plan.to_text(),
        evaluation_plan_text=evaluation,
        segment_costs=costs,
        max_activations=activation_capacity(model.memory, model.layers, cuts, plan),
    )


def _evaluation_plan(model: ShapeInputs, plan: Plan) -> Plan:
    """Forwards over the evaluation set; with fewer micro-batches than pipelines the last pipelines are not used."""
    micro_batches = model.evaluation_micro_batches
    shape = {"pipelines": min(micro_batches, plan.pipelines), "stages": plan.stages}
    return forward_only(**shape, micro_batches=micro_batches, ranges=plan.segments // plan.stages)


def _plan_even(model: ShapeInputs, depths: Depths) -> tuple[Plan, Cuts]:
    step = ScheduledStep(
        layers=model.layers,
        cuts=model.cut_layers(depths[0]),
        pipelines=len(depths),
        stages=depths[0],
        micro_batches=model.micro_batches,
        ranges=model.ranges,
        may_use_two_ranges=model.may_use_two_ranges,
        memory=model.memory,
        max_activations=model.max_activations,
        synchronous=model.synchronous,
        splits_backward=model.splits_backward,
        links=model.links,
    )
    plan = make_run_plan(model.schedule, step)
    return plan, step.cuts_of(plan)


def _union_of_cuts(model: ShapeInputs, depths: Depths) -> Cuts:
    """All layers at which any of the pipelines is cut."""
    return tuple(sorted({cut for depth in set(depths) for cut in model.cut_layers(depth)}))


def _plan_uneven(model: ShapeInputs, depths: Depths, cuts: Cuts) -> Plan:
    """Every worker is in the slot of its first segment and runs all segments up to the next worker's slot."""
    S = len(cuts) + 1
    slot_of = {
        (d, s): slot
        for d, depth in enumerate(depths)
        for slot, segments_held in _pipeline_slots(model, d, depth, cuts)
        for s in segments_held
    }
    shares = _micro_batch_shares(model, depths)
    empty_plan = Plan(
        model.schedule, len(depths), S, S, model.micro_batches, ((),) * (len(depths) * S), micro_batch_shares=shares
    )
    default_runners = {
        (s, m): slot_of[d, s]
        for d, micros in enumerate(empty_plan.micros_by_pipeline)
        for m in micros
        for s in range(S)
    }
    runners = {s: tuple(slot_of[d, s] for d in range(len(depths))) for s in range(S)}
    return plan_merged_stages(
        empty_plan,
        runners,
        default_runners,
        plan_costs(model.layers, cuts, len(depths), model.links),
        split_backward=model.schedule in ("zb", PLANNED),
    )


def _pipeline_slots(model: ShapeInputs, pipeline: int, depth: int, cuts: Cuts) -> list[tuple[int, list[int]]]:
    """(slot, segments) of the workers of a pipeline."""
    starts = (0, *cuts)
    starts_of_pipeline = {0, *model.cut_layers(depth)}
    slots: list[tuple[int, list[int]]] = []
    for segment, layer in enumerate(starts):
        if layer in starts_of_pipeline:
            slots.append((pipeline * len(starts) + segment, []))
        slots[-1][1].append(segment)
    return slots


def _micro_batch_shares(model: ShapeInputs, depths: Depths) -> tuple[int, ...]:
    """Micro-batches of each pipeline, so that all end as early as possible: the next goes to the first to end."""
    slowest = {depth: _slowest_stage_s(model, depth) for depth in set(depths)}
    shares = [1] * len(depths)
    for _ in range(model.micro_batches - len(depths)):
        ends = [(depth + share) * slowest[depth] for depth, share in zip(depths, shares, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def _slowest_stage_s(model: ShapeInputs, depth: int) -> float:
    stages = segment_layer_ranges(model.cut_layers(depth), len(model.layers))
    return max(sum(cost.time_s for cost in model.layers[span.start : span.stop]) for span in stages)


def predict_shape_step_s(model: ShapeInputs, shape: PipelineShape, plan: Plan | None = None) -> float:
    """Predicted seconds of a synchronous step, with the plan of the shape or with another `plan` for it."""
    cuts = tuple(first for first, _ in shape.segments[1:])
    planned = plan or Plan.from_text(shape.plan_text)
    costs = plan_costs(model.layers, cuts, len(shape.depths), model.links, planned.stages)
    return time_plan(planned, costs).makespan


def best_depths(model: ShapeInputs, nodes: int, *, spare_pipelines: int = 1) -> Depths:
    """The fastest way to put all nodes into pipelines: `spare_pipelines` more than one if possible, so that every layer
    still has a holder after a loss. Under the interleaved schedule all pipelines have the same depth, and nodes may be
    left over. Raises PlanError if there are fewer nodes than the model needs."""
    if nodes < model.min_depth:
        raise PlanError(f"{count_noun(nodes, 'node')} cannot hold the model: use at least {model.min_depth}")
    max_pipelines = min(nodes // model.min_depth, model.micro_batches)
    candidates: list[tuple[float, Depths]] = []
    for pipelines in range(min(1 + spare_pipelines, max_pipelines), max_pipelines + 1):
        used_nodes = nodes if model.ranges == 1 else nodes - nodes % pipelines
        depths = tuple(min(depth, model.max_depth) for depth in near_equal_depths(used_nodes, pipelines))
        candidates.append((predict_shape_step_s(model, build_shape(model, depths)), depths))
    return min(candidates)[1]


def slots_to_fill(plan: Plan) -> list[int]:
    """The slots that need a worker."""
    return [slot for slot in range(len(plan.workers)) if slot not in plan.failed]


def largest_memory_need(shape: PipelineShape, layers: Sequence[LayerCost]) -> tuple[int, int]:
    """What the slot that needs most memory needs: (bytes of state and activations, number of layers). Bytes are 0 for
    layers that were not measured."""
    plan = Plan.from_text(shape.plan_text)
    needs = []
    for slot in slots_to_fill(plan):
        own = [layers[index] for index in layers_of_slot(shape, plan, slot)]
        live = plan.most_activations(slot)
        needs.append((sum(layer.resident_bytes + live * layer.activation_bytes for layer in own), len(own)))
    return max(needs)


def layers_of_slot(shape: PipelineShape, plan: Plan, slot: int) -> list[int]:
    """The layers of a slot."""
    return [layer for g in plan.segments_of(slot) for layer in range(*shape.segments[g])]
