"""Step times of other shapes than the planned one: what a leader predicts for them, and what they turn out to take.

Small cases whose schedule is given are cut, planned and arranged around their holes by the functions that do so in a
real run; others are told by the formulas of `culm.sim.steps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from culm.plan import Slot
from culm.plan.choose import BANDWIDTH
from culm.plan.layout import SHADOWING, World, arrange_around, first_layout, orphaned
from culm.plan.partition import spans
from culm.plan.period import period
from culm.plan.profile import LayerCost
from culm.plan.reconfigure import Layout
from culm.plan.relayout import Depths, Model, Shape, plan_costs, posts, shape_of, step_s
from culm.schedule import Costs, Kind, Plan, timing
from culm.schedule.timing import prices, sends

if TYPE_CHECKING:
    from culm.sim.steps import Steps

SMALL = 600
"""Cases of more forwards are not planned in other shapes."""

Holes: TypeAlias = frozenset[Slot]


class Shapes:
    """Seconds per step of one workload in any pipelines; each situation is worked out once."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.workload = steps, steps.workload
        self._shape = cache(lambda depths: shape_of(self.believed, depths))
        self._plan = cache(self._arranged)
        self._exact = cache(self._timed)

    @property
    def exact(self) -> bool:
        """Whether other shapes are planned."""
        w = self.workload
        return bool(w.schedule and w.layers) and w.stages * w.micro_batches <= SMALL

    def predicted(self, depths: Depths) -> float:
        """What a leader expects of pipelines of these depths; infinite where nothing is known of them."""
        if not self.exact:
            return self.steps.layout(Layout(depths))
        return step_s(self.believed, self._shape(depths))

    def running(self, depths: Depths, holes: Holes, strategy: str) -> float:
        """What it would have expected of what is run now."""
        plan = self._plan(depths, holes, strategy) if self.exact else None
        if plan is not None:
            return step_s(self.believed, self._shape(depths), plan)
        share = self.steps.charges.shadow if strategy in SHADOWING else 0.0
        return self.actual(depths, holes, strategy) / (1 + share)

    def actual(self, depths: Depths, holes: Holes, strategy: str) -> float:
        """What a step takes. A part that no pipeline has a worker for is run by somebody who was given a copy of it,
        beside its own and for all pipelines."""
        shadows = strategy in SHADOWING
        missing = overlap(depths, holes, shadows=shadows)
        if missing >= len(depths):
            alone = self.steps.layout(Layout(depths[-1:])) * self.steps.doubled(1, depths[-1])
            return max(alone, self._work(depths, holes)) * self._upkeep(shadows)
        if set(depths) == {self.workload.stages}:
            found = self._shadowed(depths, holes) if shadows else math.inf
            return found if found < math.inf else self._rerouted(depths, holes) * self._upkeep(shadows)
        if self.exact:
            return self._exact(depths, holes, strategy)
        twice = self.steps.doubled(len(depths), max(depths)) if shadows and holes and not missing else 1.0
        found = self.steps.layout(Layout(depths[missing:])) * twice
        return max(found, self._work(depths, holes)) * self._upkeep(shadows)

    def _work(self, depths: Depths, holes: Holes) -> float:
        """All of a step's work, shared evenly by those who are there. The formulas count one stage that is run beside
        another, however many are; whoever does so, this is the least that it takes."""
        there = sum(depths) - len(holes)
        return self.workload.micro_batches * self.workload.total_s / there if there else math.inf

    def _upkeep(self, shadows: bool) -> float:
        return 1 + self.steps.charges.shadow if shadows else 1.0

    def _shadowed(self, depths: Depths, holes: Holes) -> float:
        """Predecessors run both stages; infinite where one is gone too."""
        if neighbours(holes, self.workload.stages):
            return math.inf
        return self.steps.shadowed(len(depths)) * self.steps.taken_over(len(depths), holes)

    def _rerouted(self, depths: Depths, holes: Holes) -> float:
        """One hole is where it is; of several it is taken that nodes move until they are where they hurt least."""
        if len(holes) != 1 or len(depths) == 1:
            return self.steps.layout(Layout(depths, len(holes)))
        (hole,) = holes
        spread = tuple(int(stage == hole.stage) for stage in range(self.workload.stages))
        return self.steps.rerouted(len(depths), spread)

    # Planned as a real run plans them.

    @cached_property
    def believed(self) -> Model:
        """What a leader takes the model for: its layers alike, with the costs that plans are made with."""
        w = self.workload
        costs = w.expected or w.costs
        price = prices(costs, w.stages)
        each = [sum(price[kind]) / w.layers for kind in (Kind.F, Kind.I, Kind.W)]
        return self._model(costs, [each] * w.layers)

    @cached_property
    def measured(self) -> Model:
        """The same with what actions turn out to take: the layers of a stage share what it takes."""
        w = self.workload
        price = prices(w.costs, w.stages)
        stages = spans(self.believed.cut(w.stages), w.layers)
        works = [[price[kind][s] / len(span) for kind in (Kind.F, Kind.I, Kind.W)] for s, span in enumerate(stages)]
        return self._model(w.costs, [works[s] for s, span in enumerate(stages) for _ in span])

    def _model(self, costs: Costs, works: Sequence[Sequence[float]]) -> Model:
        """Layers with these F, I and W. How many bytes they have follows from what the network takes for them."""
        w, price, crossing = self.workload, prices(costs, self.workload.stages), sends(costs, self.workload.stages)
        rings = 2 * (w.pipelines - 1) / w.pipelines
        sizes = {
            "parameter_bytes": round(sum(price[Kind.R]) / rings * BANDWIDTH / len(works)) if rings else 0,
            "state_bytes": round(w.state_bytes / len(works)),
            "output_bytes": round(sum(crossing) / len(crossing) * BANDWIDTH) if crossing else 0,
            "activation_bytes": 0,
        }
        layers = [
            LayerCost(
                name=str(number),
                forward_s=forward,
                input_s=inputs,
                weight_s=weight,
                step_s=sum(price[Kind.S]) / len(works),
                **sizes,
            )
            for number, (forward, inputs, weight) in enumerate(works)
        ]
        return Model(layers=tuple(layers), micro_batches=w.micro_batches, schedule=w.schedule)

    def _arranged(self, depths: Depths, holes: Holes, strategy: str) -> Plan | None:
        """The plan with every post filled, or around its holes; None where a stage has no holder."""
        shape: Shape = self._shape(depths)
        plan = Plan.from_text(shape.plan)
        if not holes:
            return plan
        lost = {_seat(plan, hole) for hole in holes}
        held = {slot: set(plan.stages_of(slot)) for slot in posts(plan)}
        for replica in first_layout(plan, strategy):
            held[replica.slot].add(replica.stage)
        left = {slot: frozenset(stages) for slot, stages in held.items() if slot not in lost}
        forward, inputs, weight = zip(*shape.costs, strict=True)
        costs = Costs(forward=forward, input=inputs, weight=weight)
        world = World(plan=plan, strategy=strategy, held=left, costs=costs, joint=not self.workload.stagger)
        return None if orphaned(world) else arrange_around(world).plan

    def _timed(self, depths: Depths, holes: Holes, strategy: str) -> float:
        plan = self._plan(depths, holes, strategy)
        if plan is None:
            return math.inf
        cuts = tuple(first for first, _ in self._shape(depths).segments[1:])
        costs = plan_costs(self.measured, cuts, len(depths))
        return period(plan, costs) if self.workload.stagger else timing(plan, costs).makespan


def _seat(plan: Plan, hole: Slot) -> int:
    """The slot of the plan that a place in a pipeline is."""
    return [slot for slot in posts(plan) if slot // plan.stages == hole.pipeline][hole.stage]


def neighbours(holes: Iterable[Slot], stages: int) -> bool:
    """Whether two slots that follow each other in one pipeline are empty: then the shadow of one is gone too."""
    gone = {(slot.pipeline, slot.stage) for slot in holes}
    return any((d, (s + 1) % stages) in gone for d, s in gone)


def overlap(depths: Sequence[int], holes: Iterable[Slot], *, shadows: bool) -> int:
    """In how many pipelines at most the same part of the model has no holder. With shadows a part of a pipeline has one
    as long as its own worker or the one before it is there."""
    gone = set(holes)
    bare = [(d, s) for d, s in gone if not shadows or (d, (s - 1) % depths[d]) in gone]
    edges = [(s / depths[d], 1) for d, s in bare] + [((s + 1) / depths[d], -1) for d, s in bare]
    most = now = 0
    for _, change in sorted(edges):  # what ends comes before what begins in the same place
        now += change
        most = max(most, now)
    return most


def bare_parts(depths: Sequence[int], holes: Iterable[Slot], *, shadows: bool) -> list[set[Slot]]:
    """For each part of the model that has no holder in any pipeline: the slots of those that it had."""
    gone = set(holes)
    edges = sorted({edge for d, s in gone for edge in (s / depths[d], (s + 1) / depths[d])})
    found = []
    for begin, end in pairwise(edges):
        own = [Slot(d, int((begin + end) / 2 * depth)) for d, depth in enumerate(depths)]
        before = [Slot(d, (s - 1) % depths[d]) for d, s in own] if shadows else []
        if gone.issuperset(part := {*own, *before}):
            found.append(part)
    return found
