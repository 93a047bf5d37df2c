"""Resolve the strategy of a run: check that the shape allows it, or choose one (`auto`). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from culm import strategies
from culm.errors import CulmError, UsageError, describe_exception
from culm.plan.rent.strategy_goodput import GoodputInputs, PreemptionRisk, best_checkpoint_interval_s
from culm.plan.replan.plan_case import PlanCase
from culm.plan.replan.staggered_period import staggered_period
from culm.plan.reshape.segment_costs import segment_costs
from culm.schedule import Costs, Plan, time_plan

if TYPE_CHECKING:
    from culm.config import RunConfig
    from culm.plan.model.model_profile import Profile
    from culm.strategies import Strategy, StrategyChoice

_MIN_BUBBLE_SHARE = 0.02
"""If workers are idle for a smaller share of the step, there is no room for forwards ahead of a loss."""
_MAX_INTERVAL_S = 300.0
"""The longest default time between two checkpoints, unless writing one takes longer."""
_MIN_CHECKPOINTS_PER_RUN = 10
"""A strategy that restarts from checkpoints writes at least this many: the estimated length of a step may be wrong."""


@dataclass(frozen=True)
class ResolvedStrategy:
    """The strategy of a run and the settings that follow from it."""

    strategy: Strategy
    why: str
    """The reason, for the start of the run."""
    eager: bool = False
    """Whether shadow replicas run forwards ahead of a loss."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: their number does not depend on steps."""
    checkpoint_interval_s: float = 0.0
    """Seconds between two checkpoints; 0: they do not depend on time."""


@dataclass(frozen=True)
class StrategyInputs:
    """What the choice depends on, beside the request."""

    plan: Plan
    profile: Profile
    cuts: tuple[int, ...]
    synchronous_step: bool
    """Whether all stages end a step together."""
    steps: int
    workers_per_node: int = 1

    @cached_property
    def costs(self) -> Costs:
        forward, inputs, weight = zip(*segment_costs(self.profile.layers, self.cuts), strict=True)
        return Costs(forward=forward, input=inputs, weight=weight)

    @property
    def is_staggered(self) -> bool:
        return not self.synchronous_step

    @cached_property
    def step_s(self) -> float:
        """Seconds of a failure-free step."""
        return (
            staggered_period(self.plan, self.costs) if self.is_staggered else time_plan(self.plan, self.costs).makespan
        )

    @property
    def idle_share(self) -> float:
        """The share of a step in which workers are idle."""
        timeline = time_plan(self.plan, self.costs)
        if not self.is_staggered:
            return timeline.bubble_fraction
        worker_s = len(timeline.busy_time) * self.step_s
        return max(0.0, 1.0 - sum(timeline.busy_time) / worker_s) if worker_s else 0.0

    @property
    def planner_case(self) -> PlanCase:
        """The step as the planner describes it: the segments of a stage are merged."""
        parts = segment_costs(self.profile.layers, self.cuts)
        P = self.plan.stages
        stages = [[sum(kind) for kind in zip(*parts[stage::P], strict=True)] for stage in range(P)]
        forward, inputs, weight = zip(*stages, strict=True)
        return PlanCase(
            pipelines=self.plan.pipelines,
            stages=P,
            micro_batches=self.plan.micro_batches,
            costs=Costs(forward=forward, input=inputs, weight=weight),
            stagger=not self.synchronous_step,
        )

    def goodput_inputs(self, preemption_rate: float) -> GoodputInputs:
        """The run as estimates of goodput need it."""
        return GoodputInputs(
            case=self.planner_case,
            failure_free_step_s=self.step_s,
            nodes=self.plan.pipelines * self.plan.stages // self.workers_per_node,
            state_bytes=sum(layer.resident_bytes for layer in self.profile.layers),
            risk=PreemptionRisk(preemption_rate=preemption_rate),
        )


def resolve_strategy(request: RunConfig, inputs: StrategyInputs) -> ResolvedStrategy:
    """The strategy of a run, and why. Raises UsageError for a strategy that cannot work in this shape, and for one of
    the user with a method that raises."""
    requested = strategies.get(request.strategy)
    try:
        return _resolve(request, requested, inputs)
    except CulmError:
        raise
    except Exception as error:
        raised = describe_exception(error)
        raise UsageError(f"--strategy {request.strategy} raised {raised}: fix that method") from error


def _resolve(request: RunConfig, requested: Strategy, inputs: StrategyInputs) -> ResolvedStrategy:
    shape = strategies.RunShape(
        inputs.plan.pipelines,
        inputs.plan.stages,
        has_folder=request.out is not None,
        workers_per_node=request.node_workers,
    )
    requested.check(shape)
    chosen = requested.choose(inputs.goodput_inputs(request.preemption_rate), shape)
    _check_shadows(chosen.strategy, inputs.plan)
    every, seconds, checkpoint_note = _checkpoint_interval(request, requested, chosen, inputs)
    eager, eager_note = _eager_forwards(chosen.strategy, inputs)
    return ResolvedStrategy(chosen.strategy, chosen.why + checkpoint_note + eager_note, eager, every, seconds)


def _check_shadows(strategy: Strategy, plan: Plan) -> None:
    """Raise UsageError for initial shadows that no worker of the plan can hold."""
    slots, stages = range(len(plan.workers)), range(plan.stages)
    for shadow in strategy.initial_shadows(plan):
        if shadow.slot not in slots or shadow.source not in slots or shadow.stage not in stages:
            raise UsageError(
                f"--strategy {strategy.name}: initial_shadows has {shadow}, but the plan has {len(slots)} slots and "
                f"{len(stages)} stages, numbered from 0"
            )
        if shadow.slot in plan.holders_of(shadow.stage) or shadow.source not in plan.holders_of(shadow.stage):
            raise UsageError(
                f"--strategy {strategy.name}: initial_shadows has {shadow}: use a slot that does not run stage "
                f"{shadow.stage}, and a source that does"
            )


def _checkpoint_interval(
    request: RunConfig, requested: Strategy, chosen: StrategyChoice, inputs: StrategyInputs
) -> tuple[int, float, str]:
    """(steps between two checkpoints, seconds between two, note for the reason): steps as requested, or else the best
    interval in seconds, of a few minutes at most: an estimate of risks does not cover a run that is killed."""
    if request.checkpoint_every:
        return request.checkpoint_every, 0.0, ""
    if request.out is None:
        unprotected = requested.chooses_another and chosen.strategy.survives_losses
        return 0, 0.0, "; without --out there is no checkpoint if all holders of a layer are lost" * unprotected
    run = inputs.goodput_inputs(request.preemption_rate)
    write_s = run.state_bytes / (run.risk.storage_bandwidth * run.nodes)
    best_s = chosen.checkpoint_interval_s or best_checkpoint_interval_s(run)
    seconds = max(write_s, min(best_s, _MAX_INTERVAL_S))
    if not chosen.strategy.restarts_from_checkpoint:
        return 0, seconds, f"; a checkpoint every {seconds:.0f} s"
    every = max(1, round(seconds / inputs.step_s)) if inputs.step_s else 1
    every = min(every, max(1, inputs.steps // _MIN_CHECKPOINTS_PER_RUN))
    return every, seconds, f"; a checkpoint every {every} steps"


def _eager_forwards(strategy: Strategy, inputs: StrategyInputs) -> tuple[bool, str]:
    """(whether shadow replicas run forwards ahead of a loss, note for the reason): only if there are bubbles."""
    if not strategy.eager_forwards:
        return False, ""
    idle = inputs.idle_share
    if idle < _MIN_BUBBLE_SHARE:
        return False, f"; {inputs.plan.name} leaves {idle:.1%} of the time idle, so eager becomes lazy"
    return True, f"; replicas run forward in the bubbles, {idle:.0%} of the time"
