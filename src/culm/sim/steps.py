"""How long a step takes in each situation that a run can get into: planned by the planner that plans real runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from culm.plan import Plans
from culm.plan.bound import bound, stage_bound
from culm.plan.layout import World, arrange_around, orphaned
from culm.plan.normalize import Spread, placed, spread
from culm.plan.period import period
from culm.schedule import Costs, Plan, generate, timing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from culm.plan import Slot
    from culm.plan.reconfigure import Layout
    from culm.sim.costs import Charges
    from culm.sim.workload import Workload

LARGE = 4_000
"""Cases with more forwards are not planned but taken at their bound, which plans of large cases are near to."""


class Steps:
    """Seconds per step of one workload, each situation worked out once.

    `hits` and `misses` are those of the plans, which are looked up by how many workers each stage has lost.
    """

    def __init__(self, workload: Workload, charges: Charges) -> None:
        self.workload = workload
        self.charges = charges
        self._plans = Plans()
        self._alike = all(isinstance(cost, (int, float)) for cost in vars(workload.costs).values())
        self._known: dict[tuple[int, Spread], float] = {}
        self._uneven = cache(self._best_uneven)
        self._best = cache(self._best_spread)
        self._merged = cache(self._merged_stages)
        self._doubled = cache(self._doubled_stage)
        self._least = cache(self._stage_least)
        self._mixed = cache(self._mixed_depths)
        self._bubble = cache(self._bubble_share)
        self.hits = 0
        self.misses = 0

    @property
    def planned(self) -> bool:
        """Whether cases are small enough for plans; else bounds are used."""
        w = self.workload
        return w.stages * w.micro_batches <= LARGE

    def healthy(self, pipelines: int) -> float:
        """Every slot filled."""
        return self.rerouted(pipelines, (0,) * self.workload.stages)

    def rerouted(self, pipelines: int, lost: Spread) -> float:
        """With so many workers of each stage lost, whose micro-batches run on their peers.

        Where all stages cost the same it does not matter which of them have lost how many: the plan is looked up by
        the sorted numbers.
        """
        key = (pipelines, tuple(sorted(lost)) if self._alike else lost)
        if key in self._known:
            self.hits += 1
        else:
            self.misses += 1
            self._known[key] = self._time(*key)
        return self._known[key]

    def _time(self, pipelines: int, lost: Spread) -> float:
        if self.workload.schedule and not any(lost):
            return self._length(self.plan(pipelines, self.workload.micro_batches))
        case = placed(self.workload.case(pipelines), lost)
        if self.workload.expected is not None:
            return self._length(self._plans.best(replace(case, costs=self.workload.expected)).plan)
        if self.planned:
            return self._plans.best(case).slots
        return max(self._least(pipelines, stage, many) for stage, many in enumerate(lost))

    def plan(self, pipelines: int, micro_batches: int) -> Plan:
        """What is run while every slot is filled: the schedule that was asked for, or what the planner makes."""
        w = self.workload
        if w.schedule:
            return generate(w.schedule, pipelines=pipelines, stages=w.stages, micro_batches=micro_batches)
        return self._plans.best(replace(w.case(pipelines), micro_batches=micro_batches)).plan

    def _length(self, plan: Plan) -> float:
        """Of a step in the long run."""
        costs = self.workload.costs
        return period(plan, costs) if self.workload.stagger else timing(plan, costs).makespan

    def _stage_least(self, pipelines: int, stage: int, many: int) -> float:
        """What a stage asks for at least when it has lost so many."""
        alone = [many if s == stage else 0 for s in range(self.workload.stages)]
        return stage_bound(placed(self.workload.case(pipelines), alone), stage)

    def best_spread(self, pipelines: int, failures: int) -> Spread | None:
        """Where so many failures hurt least; None if a stage would be left without a holder.

        In cases too large to plan, evenly over stages that cost the same: that is quicker, and as good by the bound.
        """
        return self._best(pipelines, failures)

    def _best_spread(self, pipelines: int, failures: int) -> Spread | None:
        P = self.workload.stages
        if failures > P * (pipelines - 1):
            return None
        if self._alike and not self.planned:
            return tuple(failures // P + (P - stage <= failures % P) for stage in range(P))
        return spread(self.workload.case(pipelines), failures)

    def one_f_one_b(self, pipelines: int) -> float:
        """What most systems run: fused backward, one step after the other."""
        return self.even(pipelines, self.workload.stages)

    def even(self, pipelines: int, stages: int) -> float:
        """1F1B at another depth."""
        return self._ramp(stages, -(-self.workload.micro_batches // pipelines), 1.0)

    def uneven(self, nodes: int, *, published: bool = False) -> tuple[float, tuple[int, ...]]:
        """All nodes in pipelines of depths that differ by one at most, which share the batch so as to end together.

        Seconds and depths; infinity if not even one pipeline can be made. `published` keeps the bubbles of 1F1B;
        otherwise pipelines have as much bubble, for their depth, as the planner leaves.
        """
        return self._uneven(nodes, published)

    def _best_uneven(self, nodes: int, published: bool) -> tuple[float, tuple[int, ...]]:
        w = self.workload
        most = min(nodes // w.fewest, w.micro_batches) if nodes else 0
        bubble = 1.0 if published else self._bubble()
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        for count in range(1, most + 1):
            depths = tuple(min(nodes // count + (i < nodes % count), w.layers or nodes) for i in range(count))
            best = min(best, (self._together(depths, bubble), depths))
        return best

    def layout(self, layout: Layout) -> float:
        """Pipelines of any depths. Holes are taken to be where they hurt least, and only at the planned depth.

        Infinite where nothing is known of such a layout.
        """
        w, depths, holes = self.workload, layout.depths, layout.holes
        if len(depths) > w.micro_batches or min(depths) < w.fewest or max(depths) > (w.layers or max(depths)):
            return math.inf
        if set(depths) == {w.stages}:
            lost = self.best_spread(len(depths), holes)
            return math.inf if lost is None else self.rerouted(len(depths), lost)
        return math.inf if holes else self._mixed(depths)

    def _bubble_share(self) -> float:
        """The ramp of the planner's step, as a share of that of 1F1B.

        Without the staggered optimizer: stages of pipelines of different depths do not match.
        """
        w = self.workload
        full = self._ramp(w.stages, -(-w.micro_batches // w.pipelines), 1.0)
        none = self._ramp(w.stages, -(-w.micro_batches // w.pipelines), 0.0)
        case = replace(w.case(w.pipelines), stagger=False)
        planned = self._plans.best(case).slots if self.planned else bound(case)
        return min(1.0, max(0.0, (planned - none) / (full - none))) if full > none else 0.0

    def _mixed_depths(self, depths: tuple[int, ...]) -> float:
        return self._together(depths, self._bubble())

    def _together(self, depths: tuple[int, ...], bubble: float) -> float:
        """The shortest time in which all micro-batches are done, each pipeline taking as many as it can."""
        many = Counter(depths)

        def enough(seconds: float) -> bool:
            room = sum(count * self._fits(depth, seconds, bubble) for depth, count in many.items())
            return room >= self.workload.micro_batches

        tries = range(1, self.workload.micro_batches + 1)
        least = (bisect_left(tries, True, key=lambda m: enough(self._ramp(d, m, bubble))) + 1 for d in many)
        return min(self._ramp(depth, m, bubble) for depth, m in zip(many, least, strict=True))

    def _fits(self, depth: int, seconds: float, bubble: float) -> int:
        """Micro-batches that a pipeline gets through."""
        first, each = self._ramp(depth, 1, bubble), self._stage_s(depth)
        return 0 if seconds < first * (1 - 1e-9) else 1 + int((seconds - first) / each + 1e-9)

    def _ramp(self, depth: int, micro: int, bubble: float) -> float:
        """A pipeline that fills, works and drains."""
        w, each = self.workload, self._stage_s(depth)
        return micro * each + (depth - 1) * (each * bubble + 2 * w.send_s * bubble) + w.finish_s

    def _stage_s(self, depth: int) -> float:
        """A micro-batch in the slowest stage: layers can not be cut."""
        layers = self.workload.layers
        share = -(-layers // depth) / layers if layers else 1 / depth
        return self.workload.total_s * share

    def shadowed(self, pipelines: int) -> float:
        """With a shadow of each stage on its predecessor. It runs forwards ahead of time only while it would wait."""
        return self.healthy(pipelines) * (1 + self.charges.shadow)

    def redundant(self, pipelines: int) -> float:
        """Redundant computation as published, on 1F1B: every forward is run twice, in the bubble as far as it goes."""
        w, c = self.workload, self.charges
        base = self.one_f_one_b(pipelines)
        m = -(-w.micro_batches // pipelines)
        work = m * w.stage_s + w.finish_s
        twice = m * w.stage_s * w.forward_share
        return base * (1 + c.shadow) + max(0.0, twice - c.bubble_use * max(0.0, base - work))

    def taken_over(self, pipelines: int, holes: Iterable[Slot]) -> float:
        """How much longer a step takes, as a factor, when shadows run the stages of these slots beside their own.

        Each pipeline has its own share of the batch, so the one that is hurt most sets the pace.
        """
        hurt: dict[int, list[int]] = {}
        for slot in sorted(holes):
            hurt.setdefault(slot.pipeline, []).append(slot.stage)
        return max((self._merged(pipelines, tuple(stages)) for stages in hurt.values()), default=1.0)

    def _merged_stages(self, pipelines: int, lost: tuple[int, ...]) -> float:
        """By the plan that a real run makes for what is left of the pipeline; in large cases by a formula."""
        w = self.workload
        m = -(-w.micro_batches // pipelines)
        if not self.planned or len(lost) >= w.stages:
            return self.doubled(pipelines, w.stages)
        plan = self.plan(1, m)
        held = {s: frozenset((s, (s + 1) % w.stages)) for s in range(w.stages) if s not in lost}
        world = World(plan=plan, strategy="shadow", held=held, costs=w.costs, joint=not w.stagger)
        if orphaned(world):
            return math.inf
        return max(1.0, self._length(arrange_around(world).plan) / self._length(plan))

    def doubled(self, pipelines: int, depth: int) -> float:
        """How much longer a step takes where one worker of a pipeline carries two stages, under 1F1B."""
        return self._doubled(pipelines, depth)

    def _doubled_stage(self, pipelines: int, depth: int) -> float:
        w = self.workload
        if depth == 1:
            return math.inf
        m = -(-w.micro_batches // pipelines)
        stage_s = w.total_s / depth
        F, B = stage_s * w.forward_share, stage_s * (1 - w.forward_share)
        each = [1.0] * (depth - 2) + [2.0]
        hurt = Costs(
            forward=tuple(F * x for x in each),
            input=tuple(B / 2 * x for x in each),
            weight=tuple(B / 2 * x for x in each),
            send=w.send_s,
        )
        slow = timing(generate("1f1b", pipelines=1, stages=depth - 1, micro_batches=m), hurt).makespan
        return max(1.0, (slow + w.finish_s) / self.even(pipelines, depth))
