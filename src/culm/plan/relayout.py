"""Another shape for the same model: pipelines of other depths, cut anew. Pure.

    Model       what shapes are cut out of
    shape_of    pipelines of given depths, cut, planned and timed; depths may differ
    templates   the best depths for every number of nodes (Oobleck)

Pipelines of unequal depth are cut at different layers. The segments are the pieces that no pipeline cuts, and a worker
of a shorter pipeline runs several of them: to the plan that is a worker that runs several stages, and nothing else in
the system has to know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import msgspec

from culm.errors import PlanError
from culm.plan.choose import BANDWIDTH
from culm.plan.haste import hastened
from culm.plan.layout import merged
from culm.plan.partition import Cuts, count, fit, one_f_one_b, partition, spans
from culm.plan.profile import LayerCost
from culm.schedule import Costs, Plan, forward_only, generate, timing

Depths: TypeAlias = tuple[int, ...]
"""Of the pipelines, the deepest first."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is made of the nodes: pipelines by their depths, the cut, and the plan with every post filled."""

    depths: Depths
    segments: tuple[tuple[int, int], ...]
    """Layers [first, last + 1) of each."""
    plan: str
    """Slots that no pipeline has a worker for have failed in it."""
    evaluation: str | None
    costs: tuple[tuple[float, float, float], ...]
    """Seconds of F, I and W by segment."""
    activations: int | None
    """The most activations that a worker has room for at once; None: any number."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What shapes are cut out of."""

    layers: tuple[LayerCost, ...]
    micro_batches: int
    schedule: str = "1f1b"
    ranges: int = 1
    """Segments of a worker; more than one under the interleaved schedule alone."""
    evaluation_parts: int = 0
    """Micro-batches of an evaluation; 0: there is none."""
    memory: int | None = None
    """Bytes of a worker."""

    @cached_property
    def shallowest(self) -> int:
        """The least depth that the memory allows. Raises PlanError where none does."""
        keep = one_f_one_b(self.micro_batches)
        for depth in range(1, self.deepest + 1):
            if fit(self.layers, depth, memory=self.memory, in_flight=keep, ranges=self.ranges) is not None:
                return depth
        partition(self.layers, self.deepest, memory=self.memory, ranges=self.ranges)
        raise PlanError(f"no number of stages fits into {self.memory} bytes: use a larger device")

    @property
    def deepest(self) -> int:
        return len(self.layers) // self.ranges

    def cut(self, depth: int) -> Cuts:
        keep = one_f_one_b(self.micro_batches)
        return partition(self.layers, depth, memory=self.memory, in_flight=keep, ranges=self.ranges)


def parse(text: str) -> Depths:
    """Read "2x3" (two pipelines of three) or "3+2". Raises PlanError."""
    if match := re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text):
        return (int(match[2]),) * int(match[1])
    if re.fullmatch(r"[1-9][0-9]{0,5}(\+[1-9][0-9]{0,5})*", text):
        return tuple(sorted(map(int, text.split("+")), reverse=True))
    raise PlanError(f"{text!r} is no layout: write 2x3 for two pipelines of three nodes, or 3+2 for unequal ones")


def written(depths: Depths) -> str:
    """What `parse` reads."""
    return f"{len(depths)}x{depths[0]}" if len(set(depths)) == 1 else "+".join(map(str, depths))


def shape_of(model: Model, depths: Depths) -> Shape:
    """Pipelines of these depths: each cut as well as can be, and planned. Raises PlanError for what does not fit."""
    if len(depths) > model.micro_batches:
        raise PlanError(
            f"{count(len(depths), 'pipeline')} have {count(model.micro_batches, 'micro-batch')} to share: use at most "
            f"{model.micro_batches}"
        )
    even = len(set(depths)) == 1
    if not even and model.ranges > 1:
        raise PlanError(f"{written(depths)} is uneven, which the interleaved schedule can not be: use 1f1b or zb")
    cuts = model.cut(depths[0]) if even else _refined(model, depths)
    costs = segment_costs(model.layers, cuts)
    plan = _even(model, depths, cuts) if even else _uneven(model, depths, cuts)
    evaluation = _evaluation(model, plan).to_text() if model.evaluation_parts else None
    return Shape(
        depths=depths,
        segments=tuple((span.start, span.stop) for span in spans(cuts, len(model.layers))),
        plan=plan.to_text(),
        evaluation=evaluation,
        costs=costs,
        activations=activations(model.memory, model.layers, cuts, plan),
    )


def _evaluation(model: Model, plan: Plan) -> Plan:
    """Forwards over the evaluation set; with fewer micro-batches than pipelines the last ones sit it out."""
    parts = model.evaluation_parts
    shape = {"pipelines": min(parts, plan.pipelines), "stages": plan.stages}
    return forward_only(**shape, micro_batches=parts, ranges=model.ranges)


def _even(model: Model, depths: Depths, cuts: Cuts) -> Plan:
    schedule = generate(
        model.schedule,
        pipelines=len(depths),
        stages=depths[0],
        micro_batches=model.micro_batches,
        ranges=model.ranges,
    )
    return hastened(schedule, model.layers, cuts)


def _refined(model: Model, depths: Depths) -> Cuts:
    """All places where any of the pipelines is cut."""
    return tuple(sorted({cut for depth in set(depths) for cut in model.cut(depth)}))


def _uneven(model: Model, depths: Depths, cuts: Cuts) -> Plan:
    """Every worker sits in the slot of its first segment, and runs all up to the next worker's."""
    S = len(cuts) + 1
    runs = {
        (d, s): slot for d, depth in enumerate(depths) for slot, held in _posts(model, d, depth, cuts) for s in held
    }
    shares = _shares(model, depths)
    bare = Plan(model.schedule, len(depths), S, S, model.micro_batches, ((),) * (len(depths) * S), shares=shares)
    home = {(s, m): runs[d, s] for d, micros in enumerate(bare.by_pipeline) for m in micros for s in range(S)}
    runners = {s: tuple(runs[d, s] for d in range(len(depths))) for s in range(S)}
    return merged(bare, runners, home, plan_costs(model, cuts, len(depths)), halved=model.schedule == "zb")


def _posts(model: Model, pipeline: int, depth: int, cuts: Cuts) -> list[tuple[int, list[int]]]:
    """(slot, segments) of the workers of a pipeline."""
    starts = (0, *cuts)
    own = {0, *model.cut(depth)}
    found: list[tuple[int, list[int]]] = []
    for segment, layer in enumerate(starts):
        if layer in own:
            found.append((pipeline * len(starts) + segment, []))
        found[-1][1].append(segment)
    return found


def _shares(model: Model, depths: Depths) -> tuple[int, ...]:
    """So many micro-batches for each pipeline that all end as early as can be: the next goes to whoever ends first."""
    slowest = {depth: _slowest(model, depth) for depth in set(depths)}
    shares = [1] * len(depths)
    for _ in range(model.micro_batches - len(depths)):
        ends = [(depth + share) * slowest[depth] for depth, share in zip(depths, shares, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def _slowest(model: Model, depth: int) -> float:
    stages = spans(model.cut(depth), len(model.layers))
    return max(sum(cost.time_s for cost in model.layers[span.start : span.stop]) for span in stages)


def segment_costs(layers: Sequence[LayerCost], cuts: Cuts) -> tuple[tuple[float, float, float], ...]:
    """Seconds of F, I and W of each segment."""
    segments = [layers[span.start : span.stop] for span in spans(cuts, len(layers))]
    return tuple(
        (sum(c.forward_s for c in each), sum(c.input_s for c in each), sum(c.weight_s for c in each))
        for each in segments
    )


def activations(memory: int | None, layers: Sequence[LayerCost], cuts: Cuts, plan: Plan) -> int | None:
    """How many activations the fullest stage has room for beside what a recovery needs: the weights of the step before,
    the complete sums, and what crosses the boundaries of a stage in two open steps."""
    if memory is None:
        return None
    found = []
    for span in spans(cuts, len(layers)):
        held = layers[span.start : span.stop]
        before = layers[span.start - 1].output_bytes if span.start else 0
        crossing = 2 * len(plan.micros_of(0)) * (held[-1].output_bytes + before)
        state = sum(layer.resident_bytes + 2 * layer.parameter_bytes for layer in held)
        room = memory - state - crossing
        found.append(max(1, room // max(1, sum(layer.activation_bytes for layer in held))))
    return min(found)


def plan_costs(model: Model, cuts: Cuts, pipelines: int, bandwidth: float = BANDWIDTH) -> Costs:
    """What each segment costs, with what crosses its boundaries and is added up over the pipelines."""
    forward, inputs, weight = zip(*segment_costs(model.layers, cuts), strict=True)
    segments = [model.layers[span.start : span.stop] for span in spans(cuts, len(model.layers))]
    ring = 2 * (pipelines - 1) / pipelines / bandwidth
    return Costs(
        forward=forward,
        input=inputs,
        weight=weight,
        reduce=tuple(ring * sum(c.parameter_bytes for c in each) for each in segments),
        step=tuple(sum(c.step_s for c in each) for each in segments),
        send=tuple(each[-1].output_bytes / bandwidth for each in segments[:-1]),
    )


def step_s(model: Model, shape: Shape, plan: Plan | None = None) -> float:
    """Predicted seconds of a step that begins and ends for all together; of another plan of the shape, where given."""
    cuts = tuple(first for first, _ in shape.segments[1:])
    planned = plan or Plan.from_text(shape.plan)
    return timing(planned, plan_costs(model, cuts, len(shape.depths))).makespan


def uneven(nodes: int, pipelines: int) -> Depths:
    """All nodes in so many pipelines, whose depths differ by one at most."""
    return tuple(nodes // pipelines + (i < nodes % pipelines) for i in range(pipelines))


def template(model: Model, nodes: int, *, spare: int = 1) -> Depths:
    """The fastest way to have all nodes in pipelines, `spare` more of them than one where that is possible, so that a
    loss leaves a holder of every layer. Under the interleaved schedule pipelines are of one depth, and nodes may be
    left over. Raises PlanError for fewer nodes than the model needs."""
    if nodes < model.shallowest:
        raise PlanError(f"{count(nodes, 'node')} can not hold the model: it needs {model.shallowest}")
    most = min(nodes // model.shallowest, model.micro_batches)
    found: list[tuple[float, Depths]] = []
    for pipelines in range(min(1 + spare, most), most + 1):
        used = nodes if model.ranges == 1 else nodes - nodes % pipelines
        depths = tuple(min(depth, model.deepest) for depth in uneven(used, pipelines))
        found.append((step_s(model, shape_of(model, depths)), depths))
    return min(found)[1]


def templates(model: Model, nodes: int) -> dict[int, Depths]:
    """By number of nodes, up to so many: what is made of them (Oobleck's templates)."""
    return {many: template(model, many) for many in range(model.shallowest, nodes + 1)}


def posts(plan: Plan) -> list[int]:
    """The slots that a worker is wanted for."""
    return [slot for slot in range(len(plan.workers)) if slot not in plan.failed]


def layers_of(shape: Shape, plan: Plan, slot: int) -> list[int]:
    """The layers of a post."""
    return [layer for g in plan.segments_of(slot) for layer in range(*shape.segments[g])]
