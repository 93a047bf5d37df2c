"""What a shape would cost: the model cut for it, and its step timed as a plan of `culm.schedule`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from culm.plan.partition import Cuts, fit, spans, stage_memory
from culm.schedule import Costs, Kind, generate, timing

if TYPE_CHECKING:
    from culm.plan.profile import LayerCost
    from culm.schedule import Plan, Timeline


class Shape(NamedTuple):
    """D x P."""

    pipelines: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be placed, on what."""

    layers: tuple[LayerCost, ...]
    nodes: int
    micro_batches: int
    schedule: str
    ranges: int
    memory: int | None
    bandwidth: float

    def micro(self, pipelines: int) -> int:
        """Micro-batches of the fullest pipeline: the others are done no later."""
        return -(-self.micro_batches // pipelines)

    def plan(self, shape: Shape) -> Plan:
        """One pipeline stands for all, since they do the same side by side: D times less to generate and to time."""
        micro = self.micro(shape.pipelines)
        return generate(self.schedule, pipelines=1, stages=shape.stages, micro_batches=micro, ranges=self.ranges)

    def reduce_s(self, layer: LayerCost, pipelines: int) -> float:
        """A ring: everyone sends 2 (D - 1) / D of the gradient, which is as large as the parameters."""
        return 2 * (pipelines - 1) / pipelines * layer.parameter_bytes / self.bandwidth


@dataclass(frozen=True)
class Candidate:
    """A shape, cut and timed."""

    pipelines: int
    stages: int
    cuts: Cuts
    step_s: float
    """Predicted seconds per step."""
    bubble: float
    """Share of the used nodes' time in which they wait, from 0 to 1."""
    memory: int
    """Bytes that the fullest stage needs."""
    idle: int
    """Nodes without a slot."""


def predict(task: Task, shape: Shape, enough: float = math.inf) -> Candidate | None:
    """The shape, cut as well as the memory allows, and timed.

    None if no cut fits, or if the step is sure to take longer than `enough`: that is quicker to see than how long.
    """
    plan = task.plan(shape)
    peaks = live(plan)

    def in_flight(segment: int, _: int) -> int:
        return peaks[segment]

    cuts = fit(task.layers, shape.stages, memory=task.memory, in_flight=in_flight, ranges=task.ranges)
    if cuts is None or _path_bound(task, plan, cuts) > enough:
        return None
    timeline = timing(plan, _costs(task, cuts, shape.pipelines))
    return Candidate(
        *shape,
        cuts=cuts,
        step_s=timeline.makespan,
        bubble=_bubble(task, shape, timeline),
        memory=max(stage_memory(task.layers, shape.stages, cuts, in_flight)),
        idle=task.nodes - shape.pipelines * shape.stages,
    )


def _path_bound(task: Task, plan: Plan, cuts: Cuts) -> float:
    """No step is shorter: a stage begins when a forward has come down to it, and ends before a backward has gone up.

    Unless backward is split: then it may end with a W, for which nobody waits.
    """
    split = any(action.kind is Kind.I for action in plan.workers[0])
    segments = [task.layers[span.start : span.stop] for span in spans(cuts, len(task.layers))]
    work = [sum(c.time_s for c in segment) for segment in segments]
    above = [sum(c.forward_s for c in segment) for segment in segments] if split else work
    busy = (plan.micro_batches * sum(work[s :: plan.stages]) for s in range(plan.stages))
    return max(start + spent for start, spent in zip(accumulate(above, initial=0.0), busy, strict=False))


def _costs(task: Task, cuts: Cuts, pipelines: int) -> Costs:
    """What each segment costs. The boundary behind it is crossed by what its last layer puts out."""
    segments = [task.layers[span.start : span.stop] for span in spans(cuts, len(task.layers))]
    return Costs(
        forward=tuple(sum(c.forward_s for c in segment) for segment in segments),
        input=tuple(sum(c.input_s for c in segment) for segment in segments),
        weight=tuple(sum(c.weight_s for c in segment) for segment in segments),
        reduce=tuple(sum(task.reduce_s(c, pipelines) for c in segment) for segment in segments),
        step=tuple(sum(c.step_s for c in segment) for segment in segments),
        send=tuple(segment[-1].output_bytes / task.bandwidth for segment in segments[:-1]),
    )


def _bubble(task: Task, shape: Shape, timeline: Timeline) -> float:
    """As if all pipelines had been timed: those with a micro-batch less wait for the fullest."""
    missing = shape.pipelines * task.micro(shape.pipelines) - task.micro_batches
    busy = shape.pipelines * sum(timeline.busy) - missing * sum(c.time_s for c in task.layers)
    room = shape.pipelines * shape.stages * timeline.makespan
    return max(0.0, 1 - busy / room) if room else 0.0


def work_bound(task: Task, shape: Shape) -> float:
    """No step is shorter: a stage is busy for the mean over the stages, or for the longest layer, if not for more."""
    micro = task.micro(shape.pipelines)
    work = [c.time_s * micro + c.step_s + task.reduce_s(c, shape.pipelines) for c in task.layers]
    return max(sum(work) / shape.stages, *work)


def live(plan: Plan) -> tuple[int, ...]:
    """By segment: the most micro-batches whose activations a worker keeps at once, each from its F to its W or B."""
    change = {Kind.F: 1, Kind.I: 0, Kind.W: -1, Kind.B: -1, Kind.R: 0, Kind.S: 0}
    peaks = [0] * plan.segments
    for worker, actions in enumerate(plan.workers):
        for segment in plan.segments_of(worker):
            alive = accumulate(change[kind] for at, kind, _ in actions if at == segment)
            peaks[segment] = max(peaks[segment], *alive)
    return tuple(peaks)
