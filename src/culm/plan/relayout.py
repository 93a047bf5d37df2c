"""Another shape for the same model: pipelines of other depths, cut anew, and which layer goes from whom to whom. Pure.

    Model       what shapes are cut out of
    shape_of    pipelines of given depths, cut, planned and timed; depths may differ
    templates   the best depths for every number of nodes (Oobleck)
    seating     which node takes which post: few layers on their way, holders of a layer in different zones
    moves       who gives which layers to whom

Pipelines of unequal depth are cut at different layers. The segments are the pieces that no pipeline cuts, and a worker
of a shorter pipeline runs several of them: to the plan that is a worker that runs several stages, and nothing else in
the system has to know.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TypeAlias

import msgspec

from culm.errors import PlanError
from culm.plan.choose import BANDWIDTH
from culm.plan.layout import first_layout, merged
from culm.plan.partition import Cuts, count, fit, one_f_one_b, partition, spans
from culm.plan.profile import LayerCost
from culm.schedule import Costs, Plan, forward_only, generate, timing

Depths: TypeAlias = tuple[int, ...]
"""Of the pipelines, the deepest first."""

_ROUNDS = 8
"""How often all pairs of nodes are looked at for a better exchange of posts; two or three times are enough mostly."""


class Move(msgspec.Struct, frozen=True):
    """Layers go from one worker to another, with everything that belongs to them."""

    source: int
    """Its slot in the epoch in which they go."""
    target: int
    layers: tuple[int, ...]


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
    plan = _even(model, depths) if even else _uneven(model, depths, cuts)
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


def _even(model: Model, depths: Depths) -> Plan:
    return generate(
        model.schedule,
        pipelines=len(depths),
        stages=depths[0],
        micro_batches=model.micro_batches,
        ranges=model.ranges,
    )


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


def seating(
    shape: Shape,
    strategy: str,
    nodes: Mapping[int, str],
    holders: Mapping[int, Collection[int]],
    weights: Sequence[float],
) -> dict[int, int]:
    """By post: the node that takes it, of `nodes`, which have zones.

    First no layer shall have all its holders in one zone, then as few as can be in any; then as little as can be is on
    its way: `holders` are the nodes that have a layer, `weights` what each layer weighs. At the start nobody has any,
    and nodes take posts in the order of their numbers. Where there are more nodes than posts, whoever holds what nobody
    else does is taken first.
    """
    plan = Plan.from_text(shape.plan)
    places = posts(plan)
    if len(nodes) < len(places):
        raise PlanError(f"{written(shape.depths)} needs {count(len(places), 'node')}: {len(nodes)} are there")
    task = _Seating(shape, plan, strategy, nodes, holders, weights)
    return task.improved(task.first(places))


class _Seating:
    """An assignment that is made better by exchanges."""

    def __init__(
        self,
        shape: Shape,
        plan: Plan,
        strategy: str,
        nodes: Mapping[int, str],
        holders: Mapping[int, Collection[int]],
        weights: Sequence[float],
    ) -> None:
        self.nodes, self.holders, self.weights = nodes, holders, weights
        self.layers = {slot: layers_of(shape, plan, slot) for slot in posts(plan)}
        self.circles = _circles(plan, strategy)
        self.sole = {next(iter(held)) for held in holders.values() if len(held) == 1}
        self.zoned = len(set(nodes.values())) > 1
        self.near: defaultdict[int, list[int]] = defaultdict(list)
        for number, circle in enumerate(self.circles):
            for slot in circle:
                self.near[slot].append(number)

    def overlap(self, slot: int, node: int) -> float:
        """What need not be moved."""
        return sum(self.weights[layer] for layer in self.layers[slot] if node in self.holders.get(layer, ()))

    def first(self, places: Sequence[int]) -> dict[int, int]:
        """Whoever has most of a post's layers takes it, the largest share first; of equals in order of numbers."""
        free = self._chosen(len(places))
        pairs = [(-share, slot, node) for slot in places for node in free if (share := self.overlap(slot, node))]
        taken: dict[int, int] = {}
        for _, slot, node in sorted(pairs):
            if slot not in taken and node not in taken.values():
                taken[slot] = node
        left = [node for node in free if node not in taken.values()]
        for slot in places:
            if slot not in taken:
                taken[slot] = left.pop(0)
        return taken

    def _chosen(self, many: int) -> list[int]:
        """Of all nodes so many: first whoever has a layer that nobody else has, then who has most."""
        held = Counter(node for nodes in self.holders.values() for node in nodes)
        order = sorted(self.nodes, key=lambda node: (node not in self.sole, -held[node], node))
        return sorted(order[:many])

    def improved(self, taken: dict[int, int]) -> dict[int, int]:
        """Exchange nodes between two posts as long as zones are better spread, or less has to move, by that."""
        if not self.zoned:
            return taken
        spare = [node for node in sorted(self.nodes) if node not in taken.values()]
        for _ in range(_ROUNDS):
            better = [self._exchange(taken, one, other) for one, other in combinations(taken, 2)]
            better += [self._replace(taken, slot, spare) for slot in taken if spare]
            if not any(better):
                break
        return taken

    def _exchange(self, taken: dict[int, int], one: int, other: int) -> bool:
        if self.nodes[taken[one]] == self.nodes[taken[other]]:
            return False
        before = self._worth(taken, (one, other))
        taken[one], taken[other] = taken[other], taken[one]
        if self._worth(taken, (one, other)) < before:
            return True
        taken[one], taken[other] = taken[other], taken[one]
        return False

    def _replace(self, taken: dict[int, int], slot: int, spare: list[int]) -> bool:
        """Somebody that would be left over takes a post, unless whoever had it is indispensable."""
        for index, node in enumerate(spare):
            before, own = self._worth(taken, (slot,)), taken[slot]
            taken[slot] = node
            if own not in self.sole and self._worth(taken, (slot,)) < before:
                spare[index] = own
                return True
            taken[slot] = own
        return False

    def _worth(self, taken: Mapping[int, int], slots: Iterable[int]) -> tuple[int, int, float]:
        """(circles in one zone alone, pairs of holders in one zone, what has to move) around some posts."""
        alone = pairs = 0
        for number in {number for slot in slots for number in self.near[slot]}:
            circle = self.circles[number]
            zones = Counter(self.nodes[taken[slot]] for slot in circle)
            alone += len(circle) > 1 and len(zones) == 1
            pairs += sum(math.comb(many, 2) for many in zones.values())
        return alone, pairs, -sum(self.overlap(slot, taken[slot]) for slot in slots)


def _circles(plan: Plan, strategy: str) -> list[tuple[int, ...]]:
    """By stage: the posts that hold it, shadows included."""
    shadows = first_layout(plan, strategy)
    return [
        tuple(sorted({*plan.holders_of(stage), *(r.slot for r in shadows if r.stage == stage)}))
        for stage in range(plan.stages)
    ]


def moves(shape: Shape, seats: Mapping[int, int], holders: Mapping[int, Collection[int]]) -> tuple[Move, ...]:
    """Who gives which layers to whom, by slot of the new shape: every worker what it lacks, from whoever has given
    least so far. Every layer has a holder with a seat."""
    plan = Plan.from_text(shape.plan)
    slot_of = {node: slot for slot, node in seats.items()}
    given: Counter[int] = Counter()
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for target, node in sorted(seats.items()):
        for layer in layers_of(shape, plan, target):
            if node in holders[layer]:
                continue
            source = min((slot_of[other] for other in holders[layer] if other in slot_of), key=lambda s: (given[s], s))
            given[source] += 1
            found[source, target].append(layer)
    return tuple(Move(source, target, tuple(layers)) for (source, target), layers in sorted(found.items()))


def unseated(layers: Iterable[int], seats: Mapping[int, int], holders: Mapping[int, Collection[int]]) -> list[int]:
    """The layers that nobody with a seat holds."""
    seated = set(seats.values())
    return [layer for layer in layers if seated.isdisjoint(holders.get(layer, ()))]
