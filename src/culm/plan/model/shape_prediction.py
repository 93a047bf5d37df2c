"""Predict the cost of a shape: partition the model for it and time its step as a plan of `culm.schedule`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from culm.plan.model.early_grad_send import knows_split_overhead, send_gradients_early
from culm.plan.model.layer_partition import Cuts, find_cuts, segment_layer_ranges, stage_memory_bytes
from culm.schedule import Costs, Kind, generate_plan, time_plan

if TYPE_CHECKING:
    from culm.plan.model.model_profile import LayerCost
    from culm.schedule import Plan, Timeline


class PipelineGrid(NamedTuple):
    """D pipelines of P stages."""

    pipelines: int
    stages: int


def near_equal_depths(nodes: int, pipelines: int) -> tuple[int, ...]:
    """All nodes in `pipelines` pipelines whose depths differ by at most one, deeper ones first."""
    return tuple(nodes // pipelines + (i < nodes % pipelines) for i in range(pipelines))


@dataclass(frozen=True, kw_only=True)
class ShapeSearchProblem:
    """The model, the nodes and the limits of a shape search."""

    layers: tuple[LayerCost, ...]
    nodes: int
    micro_batches: int
    schedule: str
    ranges: int
    memory: int | None
    bandwidth: float

    def micros_per_pipeline(self, pipelines: int) -> int:
        """Micro-batches of the fullest pipeline; no other pipeline finishes later."""
        return -(-self.micro_batches // pipelines)

    def plan_one_pipeline(self, shape: PipelineGrid) -> Plan:
        """Plan one pipeline in place of all, since they run the same actions: D times less to generate and time."""
        micro = self.micros_per_pipeline(shape.pipelines)
        return generate_plan(self.schedule, pipelines=1, stages=shape.stages, micro_batches=micro, ranges=self.ranges)

    def reduce_s(self, layer: LayerCost, pipelines: int) -> float:
        """Ring all-reduce: each holder sends 2 (D - 1) / D of the gradient, which is as large as the parameters."""
        return 2 * (pipelines - 1) / pipelines * layer.parameter_bytes / self.bandwidth


@dataclass(frozen=True)
class ShapeCandidate:
    """A shape with its cuts and its predicted time."""

    pipelines: int
    stages: int
    cuts: Cuts
    step_s: float
    """Predicted seconds per step."""
    bubble_fraction: float
    """Idle share of the used nodes' time, from 0 to 1."""
    max_stage_bytes: int
    """Bytes that the fullest stage needs."""
    idle_nodes: int
    """Nodes without a slot."""


def predict_step(problem: ShapeSearchProblem, shape: PipelineGrid, cutoff_s: float = math.inf) -> ShapeCandidate | None:
    """Partition the model for the shape within the memory, and time the step.

    Returns None if no cuts fit, or if a lower bound of the step time exceeds `cutoff_s`: the bound is faster to compute
    than the time.
    """
    plan = problem.plan_one_pipeline(shape)
    peaks = peak_in_flight(plan)

    def in_flight(segment: int, _: int) -> int:
        return peaks[segment]

    cuts = find_cuts(problem.layers, shape.stages, memory=problem.memory, in_flight=in_flight, ranges=problem.ranges)
    if cuts is None or _critical_path_bound(problem, plan, cuts) > cutoff_s:
        return None
    sent_early = send_gradients_early(plan, problem.layers, cuts)
    timeline = time_plan(sent_early, _segment_costs(problem, cuts, shape.pipelines))
    return ShapeCandidate(
        *shape,
        cuts=cuts,
        step_s=timeline.makespan,
        bubble_fraction=_bubble_fraction(problem, shape, timeline),
        max_stage_bytes=max(stage_memory_bytes(problem.layers, shape.stages, cuts, in_flight)),
        idle_nodes=problem.nodes - shape.pipelines * shape.stages,
    )


def _critical_path_bound(problem: ShapeSearchProblem, plan: Plan, cuts: Cuts) -> float:
    """Lower bound of the step: a stage starts when the first forward reaches it and ends before the last backward
    has returned to stage 0.

    With a split backward the way back does not count: the stage may end with a W, which no other stage waits for.
    """
    split = knows_split_overhead(problem.layers) or any(action.kind is Kind.I for action in plan.workers[0])
    segments = [problem.layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(problem.layers))]
    work = [sum(c.time_s for c in segment) for segment in segments]
    path_to = [sum(c.forward_s for c in segment) for segment in segments] if split else work
    busy = (plan.micro_batches * sum(work[s :: plan.stages]) for s in range(plan.stages))
    return max(start + spent for start, spent in zip(accumulate(path_to, initial=0.0), busy, strict=False))


def _segment_costs(problem: ShapeSearchProblem, cuts: Cuts, pipelines: int) -> Costs:
    """Cost of each segment. The output of a segment's last layer is sent over the boundary after it."""
    segments = [problem.layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(problem.layers))]
    return Costs(
        forward=tuple(sum(c.forward_s for c in segment) for segment in segments),
        input=tuple(sum(c.input_s for c in segment) for segment in segments),
        weight=tuple(sum(c.weight_s for c in segment) for segment in segments),
        reduce=tuple(sum(problem.reduce_s(c, pipelines) for c in segment) for segment in segments),
        step=tuple(sum(c.step_s for c in segment) for segment in segments),
        send=tuple(segment[-1].output_bytes / problem.bandwidth for segment in segments[:-1]),
        split=tuple(sum(c.halving_s or 0.0 for c in segment) for segment in segments),
    )


def _bubble_fraction(problem: ShapeSearchProblem, shape: PipelineGrid, timeline: Timeline) -> float:
    """Bubble over all pipelines: those with one micro-batch less wait for the fullest."""
    missing = shape.pipelines * problem.micros_per_pipeline(shape.pipelines) - problem.micro_batches
    busy = shape.pipelines * sum(timeline.busy_time) - missing * sum(c.time_s for c in problem.layers)
    available = shape.pipelines * shape.stages * timeline.makespan
    return max(0.0, 1 - busy / available) if available else 0.0


def work_lower_bound(problem: ShapeSearchProblem, shape: PipelineGrid) -> float:
    """Lower bound of the step: the busiest stage takes at least the mean over the stages and the longest layer."""
    micro = problem.micros_per_pipeline(shape.pipelines)
    work = [c.time_s * micro + c.step_s + problem.reduce_s(c, shape.pipelines) for c in problem.layers]
    return max(sum(work) / shape.stages, *work)


def peak_in_flight(plan: Plan) -> tuple[int, ...]:
    """By segment: the most micro-batches whose activations a worker keeps at the same time, from F to W or B."""
    change = {Kind.F: 1, Kind.I: 0, Kind.W: -1, Kind.B: -1, Kind.R: 0, Kind.S: 0}
    peaks = [0] * plan.segments
    for worker, actions in enumerate(plan.workers):
        for segment in plan.segments_of(worker):
            alive = accumulate(change[kind] for at, kind, _ in actions if at == segment)
            peaks[segment] = max(peaks[segment], *alive)
    return tuple(peaks)
