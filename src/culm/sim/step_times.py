"""Seconds of a step in every situation of a run, from the planner that plans real runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from culm.plan import PlanCache
from culm.plan.recover.role_assignment import RecoveryPolicy, SurvivingCluster, assign_roles, stages_without_holder
from culm.plan.rent.failure_free_step import (
    MAX_PLANNED_FORWARDS,
    failure_free_step_s,
    healthy_plan,
    planned_step_shape,
)
from culm.plan.replan.planned_schedule import PLANNED, plan_step
from culm.plan.replan.rebalance_failures import FailuresByStage, optimal_spread, with_failures_by_stage
from culm.plan.replan.staggered_period import staggered_period
from culm.plan.replan.step_bound import stage_lower_bound
from culm.schedule import Costs, Kind, Plan, generate_plan, time_plan
from culm.schedule.plan_timing import action_costs, send_costs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from culm.plan import Slot
    from culm.plan.reshape.reconfigure_policy import PipelineLayout
    from culm.sim.cluster_costs import ClusterCosts
    from culm.sim.workload import Workload


class _StandIns(RecoveryPolicy):
    """Predecessors with shadow replicas run the stages of missing workers."""

    shadows_every_stage = True
    prefers_stand_ins = True


_STAND_INS = _StandIns()


class _DepthTimes(NamedTuple):
    """Seconds in pipelines of some depth."""

    stage_s: float
    """A micro-batch in the slowest stage."""
    send_s: float
    """Mean over the boundaries."""
    reduce_and_step_s: float
    """R and S of the slowest stage."""

    @classmethod
    def of_costs(cls, costs: Costs, stages: int) -> _DepthTimes:
        price, sends = action_costs(costs, stages), send_costs(costs, stages)
        return cls(
            max(forward + backward for forward, backward in zip(price[Kind.F], price[Kind.B], strict=True)),
            sum(sends) / len(sends) if sends else 0.0,
            max(reduce + step for reduce, step in zip(price[Kind.R], price[Kind.S], strict=True)),
        )


class StepTimes:
    """Seconds per step of one workload. Each situation is computed once.

    `hits` and `misses` count look-ups of plans, by the number of workers that each stage has lost.
    """

    def __init__(self, workload: Workload, cluster_costs: ClusterCosts) -> None:
        self.workload = workload
        self.cluster_costs = cluster_costs
        self._plans = PlanCache()
        self._stages_cost_the_same = all(isinstance(cost, (int, float)) for cost in vars(workload.costs).values())
        self._rerouted_cache: dict[tuple[int, FailuresByStage], float] = {}
        self._best_unequal_cached = cache(self._best_unequal)
        self._best_spread_cached = cache(self._best_spread)
        self._merged_stages_cached = cache(self._merged_stages)
        self._doubled_stage_cached = cache(self._doubled_stage)
        self._stage_bound_cached = cache(self._stage_bound)
        self._mixed_depths_cached = cache(self._mixed_depths)
        self._bubble_share_cached = cache(self._bubble_share)
        self._depth_times_cached = cache(self._depth_times)
        self.hits = 0
        self.misses = 0

    @property
    def uses_plans(self) -> bool:
        """Whether steps are small enough for plans; else lower bounds are used."""
        w = self.workload
        return w.stages * w.micro_batches <= MAX_PLANNED_FORWARDS

    def healthy(self, pipelines: int) -> float:
        """Seconds with every slot filled."""
        return self.rerouted(pipelines, (0,) * self.workload.stages)

    def rerouted(self, pipelines: int, lost: FailuresByStage) -> float:
        """Seconds when each stage has lost this many workers, whose micro-batches run on their peers.

        Where all stages cost the same the plan is looked up by the sorted numbers.
        """
        key = (pipelines, tuple(sorted(lost)) if self._stages_cost_the_same else lost)
        if key in self._rerouted_cache:
            self.hits += 1
        else:
            self.misses += 1
            self._rerouted_cache[key] = self._rerouted_step_s(*key)
        return self._rerouted_cache[key]

    def _rerouted_step_s(self, pipelines: int, lost: FailuresByStage) -> float:
        if not any(lost) and self.workload.planning_costs is None:
            case, limits = self.workload.planning_case(pipelines), self.workload.planned_activations
            return failure_free_step_s(case, self.workload.schedule, limits)
        if not any(lost):
            return self._plan_step_s(self.plan(pipelines, self.workload.micro_batches))
        case = with_failures_by_stage(self.workload.planning_case(pipelines), lost)
        if self.workload.planning_costs is not None:
            return self._plan_step_s(self._plans.plan_for(replace(case, costs=self.workload.planning_costs)).plan)
        if self.uses_plans:
            return self._plans.plan_for(case).step_time
        return max(self._stage_bound_cached(pipelines, stage, many) for stage, many in enumerate(lost))

    def plan(self, pipelines: int, micro_batches: int) -> Plan:
        """The plan with every slot filled: the requested schedule, or the planner's."""
        w = self.workload
        case = replace(w.planning_case(pipelines), micro_batches=micro_batches, costs=w.planning_costs or w.costs)
        if w.schedule != PLANNED:
            return healthy_plan(case, w.schedule)
        return plan_step(planned_step_shape(case, w.planned_activations)).plan

    def _plan_step_s(self, plan: Plan) -> float:
        """Seconds of a step in steady state."""
        costs = self.workload.costs
        return staggered_period(plan, costs) if self.workload.stagger else time_plan(plan, costs).makespan

    def _stage_bound(self, pipelines: int, stage: int, many: int) -> float:
        """Lower bound of the step by one stage that has lost this many workers."""
        alone = [many if s == stage else 0 for s in range(self.workload.stages)]
        return stage_lower_bound(with_failures_by_stage(self.workload.planning_case(pipelines), alone), stage)

    def best_spread(self, pipelines: int, failures: int) -> FailuresByStage | None:
        """The spread of failures over stages that costs least; None if a stage would have no holder.

        In steps too large to plan: evenly over stages of equal cost, which is faster and as good by the lower bound.
        """
        return self._best_spread_cached(pipelines, failures)

    def _best_spread(self, pipelines: int, failures: int) -> FailuresByStage | None:
        P = self.workload.stages
        if failures > P * (pipelines - 1):
            return None
        if self._stages_cost_the_same and not self.uses_plans:
            return tuple(failures // P + (P - stage <= failures % P) for stage in range(P))
        return optimal_spread(self.workload.planning_case(pipelines), failures)

    def one_f_one_b(self, pipelines: int) -> float:
        """Seconds under 1F1B as most systems run it: fused backward, one step after the other."""
        return self._pipeline_s(pipelines, self.workload.stages, self._micros(pipelines), 1.0)

    def at_depth(self, pipelines: int, stages: int, *, as_published: bool) -> float:
        """Seconds at another depth, with the bubbles of 1F1B (`as_published`) or of the workload's schedule."""
        bubble = 1.0 if as_published else self._bubble_share_cached()
        return self._pipeline_s(pipelines, stages, self._micros(pipelines), bubble)

    def unequal_depths(self, workers: int, *, as_published: bool = False) -> tuple[float, tuple[int, ...]]:
        """Seconds and depths if all workers form pipelines whose depths differ by at most one and which share the batch
        so that they end together; infinity if no pipeline fits. The complete fleet keeps the planned shape.

        `as_published` keeps the bubbles of 1F1B; otherwise pipelines have as much bubble, for their depth, as the
        schedule of the workload leaves.
        """
        return self._best_unequal_cached(workers, as_published)

    def _best_unequal(self, nodes: int, as_published: bool) -> tuple[float, tuple[int, ...]]:
        w = self.workload
        planned = (self.healthy(w.pipelines), (w.stages,) * w.pipelines)
        if not as_published and w.is_complete_fleet(nodes):
            return planned
        most = min(nodes // w.min_stages, w.micro_batches) if nodes else 0
        bubble = 1.0 if as_published else self._bubble_share_cached()
        best: tuple[float, tuple[int, ...]] = planned if nodes >= w.workers and not as_published else (math.inf, ())
        for count in range(
            max(1, min(2, most)), most + 1
        ):  # two pipelines if possible: a loss leaves a holder of every layer
            depths = tuple(min(nodes // count + (i < nodes % count), w.layers or nodes) for i in range(count))
            best = min(best, (self._balanced_step_s(depths, bubble), depths))
        return best

    def layout_step_s(self, layout: PipelineLayout) -> float:
        """Seconds in pipelines of any depths. Empty slots are allowed at the planned depth only, and assumed to be
        where they cost least. Infinite for other layouts.
        """
        w, depths, holes = self.workload, layout.depths, layout.empty_slot_count
        if len(depths) > w.micro_batches or min(depths) < w.min_stages or max(depths) > (w.layers or max(depths)):
            return math.inf
        if set(depths) == {w.stages}:
            lost = self.best_spread(len(depths), holes)
            return math.inf if lost is None else self.rerouted(len(depths), lost)
        return math.inf if holes else self._mixed_depths_cached(depths)

    def _bubble_share(self) -> float:
        """Fill and drain time of a step under the workload's schedule, as a share of that of 1F1B.

        Without the staggered optimizer step: stages of pipelines of different depths do not match.
        """
        w = self.workload
        if w.schedule in ("1f1b", "gpipe"):
            return 1.0
        full = self._pipeline_s(w.pipelines, w.stages, self._micros(w.pipelines), 1.0)
        none = self._pipeline_s(w.pipelines, w.stages, self._micros(w.pipelines), 0.0)
        case = replace(w.planning_case(w.pipelines), stagger=False)
        planned = failure_free_step_s(case, w.schedule, w.planned_activations)
        return min(1.0, max(0.0, (planned - none) / (full - none))) if full > none else 0.0

    def _mixed_depths(self, depths: tuple[int, ...]) -> float:
        return self._balanced_step_s(depths, self._bubble_share_cached())

    def _balanced_step_s(self, depths: tuple[int, ...], bubble: float) -> float:
        """The shortest time in which the pipelines complete all micro-batches, each running as many as it can."""
        many, D = Counter(depths), len(depths)

        def enough(seconds: float) -> bool:
            room = sum(count * self._micro_batches_within(D, depth, seconds, bubble) for depth, count in many.items())
            return room >= self.workload.micro_batches

        tries = range(1, self.workload.micro_batches + 1)
        least = (bisect_left(tries, True, key=lambda m: enough(self._pipeline_s(D, d, m, bubble))) + 1 for d in many)
        return min(self._pipeline_s(D, depth, m, bubble) for depth, m in zip(many, least, strict=True))

    def _micro_batches_within(self, pipelines: int, depth: int, seconds: float, bubble: float) -> int:
        """Micro-batches that a pipeline completes within `seconds`."""
        first, each = self._pipeline_s(pipelines, depth, 1, bubble), self._depth_times_cached(pipelines, depth).stage_s
        return 0 if seconds < first * (1 - 1e-9) else 1 + int((seconds - first) / each + 1e-9)

    def _micros(self, pipelines: int) -> int:
        """Micro-batches of the fullest pipeline."""
        return -(-self.workload.micro_batches // pipelines)

    def _pipeline_s(self, pipelines: int, depth: int, micro: int, bubble: float) -> float:
        """Seconds of one of some pipelines that fills, runs `micro` micro-batches and drains."""
        times = self._depth_times_cached(pipelines, depth)
        ramp = (depth - 1) * (times.stage_s + 2 * times.send_s) * bubble
        return micro * times.stage_s + ramp + times.reduce_and_step_s

    def _depth_times(self, pipelines: int, depth: int) -> _DepthTimes:
        """The times of pipelines of a depth: of the layers, if they are known; else of equal layers."""
        w = self.workload
        if w.model is not None:
            return _DepthTimes.of_costs(w.model.costs(pipelines, depth), depth)
        # A stage of a shallower pipeline has more parameters to sum and to update, and one of D holders sends
        # 2 (D - 1) / D of the gradient.
        ring = (1 - 1 / pipelines) / (1 - 1 / w.pipelines) if w.pipelines > 1 else 1.0
        price, share = action_costs(w.costs, w.stages), self._largest_share(depth)
        end = max(r * ring + s for r, s in zip(price[Kind.R], price[Kind.S], strict=True))
        return _DepthTimes(w.micro_batch_s * share, w.send_s, end * share / self._largest_share(w.stages))

    def _largest_share(self, depth: int) -> float:
        """The share of the model that the largest of so many stages has: layers cannot be split."""
        layers = self.workload.layers
        return -(-layers // depth) / layers if layers else 1 / depth

    def shadowed(self, pipelines: int) -> float:
        """Seconds with a shadow replica of each stage on its predecessor, which runs forwards ahead only while idle."""
        return self.healthy(pipelines) * (1 + self.cluster_costs.shadow)

    def redundant(self, pipelines: int, *, as_published: bool = True) -> float:
        """Seconds with redundant computation, on 1F1B (`as_published`) or on the workload's schedule: every forward
        runs twice, in bubbles if it fits."""
        w, c = self.workload, self.cluster_costs
        base = self.one_f_one_b(pipelines) if as_published else self.healthy(pipelines)
        m = -(-w.micro_batches // pipelines)
        work = m * w.stage_s + self._depth_times_cached(pipelines, w.stages).reduce_and_step_s
        twice = m * w.stage_s * w.forward_share
        return base * (1 + c.shadow) + max(0.0, twice - c.bubble_use * max(0.0, base - work))

    def takeover_slowdown(self, pipelines: int, holes: Iterable[Slot]) -> float:
        """How many times longer a step takes when shadow replicas run the stages of these slots beside their own.

        Each pipeline has its own share of the batch, so the slowest one determines the step.
        """
        lost_stages: dict[int, list[int]] = {}
        for slot in sorted(holes):
            lost_stages.setdefault(slot.pipeline, []).append(slot.stage)
        return max(
            (self._merged_stages_cached(pipelines, tuple(stages)) for stages in lost_stages.values()), default=1.0
        )

    def _merged_stages(self, pipelines: int, lost: tuple[int, ...]) -> float:
        """By the plan of a real run for the rest of the pipeline; in large steps by a formula."""
        w = self.workload
        m = -(-w.micro_batches // pipelines)
        if not self.uses_plans or len(lost) >= w.stages:
            return self.doubled_stage_slowdown(pipelines, w.stages)
        plan = self.plan(1, m)
        held = {s: frozenset((s, (s + 1) % w.stages)) for s in range(w.stages) if s not in lost}
        cluster = SurvivingCluster(
            full_plan=plan, policy=_STAND_INS, held_stages=held, costs=w.costs, synchronous_step=not w.stagger
        )
        if stages_without_holder(cluster):
            return math.inf
        return max(1.0, self._plan_step_s(assign_roles(cluster).plan) / self._plan_step_s(plan))

    def doubled_stage_slowdown(self, pipelines: int, depth: int) -> float:
        """How many times longer a step takes under 1F1B when one worker of a pipeline runs two stages."""
        return self._doubled_stage_cached(pipelines, depth)

    def _doubled_stage(self, pipelines: int, depth: int) -> float:
        w = self.workload
        if depth == 1:
            return math.inf
        m = -(-w.micro_batches // pipelines)
        stage_s = w.micro_batch_s / depth
        F, B = stage_s * w.forward_share, stage_s * (1 - w.forward_share)
        each = [1.0] * (depth - 2) + [2.0]
        doubled = Costs(
            forward=tuple(F * x for x in each),
            input=tuple(B / 2 * x for x in each),
            weight=tuple(B / 2 * x for x in each),
            send=w.send_s,
        )
        slow = time_plan(generate_plan("1f1b", pipelines=1, stages=depth - 1, micro_batches=m), doubled).makespan
        return max(
            1.0,
            (slow + self._depth_times_cached(pipelines, depth).reduce_and_step_s)
            / self.at_depth(pipelines, depth, as_published=True),
        )
