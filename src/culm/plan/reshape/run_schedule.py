"""The plan of a run's healthy steps under a schedule, and the choice of the schedule by `auto`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from culm.plan.model.early_grad_send import send_gradients_early
from culm.plan.model.layer_partition import Cuts, partition_layers
from culm.plan.model.model_profile import LayerCost
from culm.plan.rent.link_costs import NodeLinks, without_first_input_gradient
from culm.plan.replan.planned_schedule import (
    MIN_AUTO_GAIN,
    PLANNED,
    StepShape,
    bubble_free_step_s,
    plan_step,
    predict_step_s,
)
from culm.plan.replan.two_range_schedule import RANGES, TwoRanges
from culm.plan.reshape.segment_costs import (
    activation_capacities,
    capacities_of_1f1b,
    plan_costs,
    split_overheads,
    two_range_memory,
)
from culm.schedule import Costs, Plan, generate_plan


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """What the plan of a step depends on, beside the name of the schedule."""

    layers: tuple[LayerCost, ...]
    cuts: Cuts
    pipelines: int
    stages: int
    micro_batches: int
    ranges: int = 1
    """Segments per worker under the interleaved schedule."""
    may_use_two_ranges: bool = False
    """Whether `planned` may cut the layers anew, into two segments per worker, where that is faster."""
    memory: int | None = None
    """Memory of a worker in bytes; None: as much as 1F1B needs on its fullest worker."""
    max_activations: int | None = None
    """The most activations that a worker may keep, in place of the limit from the memory."""
    synchronous: bool = False
    """Whether all stages make their optimizer step together (clip_norm, skipped steps)."""
    splits_backward: bool = True
    """Whether layers can run their backward in two parts. Compiled layers cannot."""
    links: NodeLinks | None = None
    """The network between the workers; None: not known."""

    @cached_property
    def costs(self) -> Costs:
        """Costs of the segments, with the overhead of splitting a backward."""
        return self._costs_of_cuts(self.cuts)

    def _costs_of_cuts(self, cuts: Cuts) -> Costs:
        costs = plan_costs(self.layers, cuts, self.pipelines, self.links, self.stages)
        return without_first_input_gradient(replace(costs, split=split_overheads(self.layers, cuts)))

    @cached_property
    def two_range_cuts(self) -> Cuts | None:
        """The cuts of two segments per worker; None: that is not allowed, or there are too few layers."""
        if not self.may_use_two_ranges or not 1 < self.stages <= len(self.layers) // RANGES:
            return None
        return partition_layers(self.layers, self.stages, ranges=RANGES)

    def cuts_of(self, plan: Plan) -> Cuts:
        """The cuts into the segments of a plan of this step."""
        if plan.segments == len(self.cuts) + 1:
            return self.cuts
        assert self.two_range_cuts is not None, "the plan was made from them"
        return self.two_range_cuts

    @property
    def planner_shape(self) -> StepShape:
        """The step as the planner takes it: one segment per worker, or two where that is faster."""
        return StepShape(
            pipelines=self.pipelines,
            stages=self.stages,
            micro_batches=self.micro_batches,
            costs=self.costs,
            max_activations=self._activation_limits,
            staggered=not self.synchronous,
            splits_backward=self.splits_backward,
            two_ranges=self._two_ranges,
        )

    @property
    def _two_ranges(self) -> TwoRanges | None:
        cuts = self.two_range_cuts
        if cuts is None:
            return None
        costs = self._costs_of_cuts(cuts)
        micros = -(-self.micro_batches // self.pipelines)
        return two_range_memory(
            self.layers, self.cuts, cuts, costs, micros, memory=self.memory, max_activations=self.max_activations
        )

    @property
    def _activation_limits(self) -> tuple[int, ...]:
        micros = -(-self.micro_batches // self.pipelines)
        if self.max_activations is not None:
            return (self.max_activations,) * self.stages
        if self.memory is not None:
            return tuple(activation_capacities(self.memory, self.layers, self.cuts, micros))
        return tuple(capacities_of_1f1b(self.layers, self.cuts, micros))


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule of a run, its plan, and why."""

    name: str
    plan: Plan
    cuts: Cuts
    """The cuts into the segments of the plan."""
    why: str
    """For the start of the run; empty: nothing to say."""
    prediction: dict[str, float]
    """Predicted seconds of a step, and shares; empty: no profile was used. The keys are those of
    `Summary.schedule_prediction`."""


def make_run_plan(name: str, step: ScheduledStep) -> Plan:
    """The plan of a healthy step under the schedule called `name`, which is not auto."""
    if name == PLANNED:
        return plan_step(step.planner_shape).plan
    plan = generate_plan(
        name,
        pipelines=step.pipelines,
        stages=step.stages,
        micro_batches=step.micro_batches,
        ranges=step.ranges,
    )
    return send_gradients_early(plan, step.layers, step.cuts) if step.splits_backward else plan


def choose_schedule(name: str, step: ScheduledStep) -> ScheduleChoice:
    """The schedule called `name`, or the fastest by prediction if that is `auto`."""
    if name == "auto":
        return _fastest_schedule(step)
    if name == PLANNED:
        return _choose_planned(step)
    plan = make_run_plan(name, step)
    early = "gradients that the previous stage waits for are sent before weight gradients are computed (I, then W)"
    as_generated = generate_plan(
        name, pipelines=step.pipelines, stages=step.stages, micro_batches=step.micro_batches, ranges=step.ranges
    )
    return ScheduleChoice(name, plan, step.cuts, early if plan != as_generated else "", {})


def predicted_step_s(plan: Plan, step: ScheduledStep) -> float:
    """Predicted seconds of a step with a plan."""
    return predict_step_s(plan, step.costs, staggered=not step.synchronous)


def _fastest_schedule(step: ScheduledStep) -> ScheduleChoice:
    """1F1B, unless the planner's schedule gains more than MIN_AUTO_GAIN. ZB-H1 needs no choice of its own: it is one of
    the planner's candidates."""
    planned = _choose_planned(step)
    gain = planned.prediction["gain_over_1f1b"]
    if gain > MIN_AUTO_GAIN:
        return planned
    simple = choose_schedule("1f1b", step)
    why = f"1f1b: a planned schedule would shorten the step by {max(gain, 0.0):.1%}, less than {MIN_AUTO_GAIN:.0%}"
    return replace(simple, why=f"{why}; {simple.why}" if simple.why else why)


def _choose_planned(step: ScheduledStep) -> ScheduleChoice:
    shape = step.planner_shape
    planned = plan_step(shape)
    simple_s = predicted_step_s(make_run_plan("1f1b", step), step)
    ranges = planned.plan.segments // planned.plan.stages
    prediction = {
        "step_s": planned.step_s,
        "of_bubble_free": bubble_free_step_s(shape, ranges=ranges) / planned.step_s if planned.step_s else 1.0,
        "gain_over_1f1b": 1 - planned.step_s / simple_s if simple_s else 0.0,
    }
    why = (
        f"planned: {planned.step_s:.4g} s per step predicted, {abs(prediction['gain_over_1f1b']):.1%} "
        f"{'less' if prediction['gain_over_1f1b'] >= 0 else 'more'} than with 1f1b, "
        f"{prediction['of_bubble_free']:.1%} of the speed without bubbles"
        + (f", with {ranges} segments per worker" if ranges > 1 else "")
    )
    if step.synchronous:
        staggered_s = plan_step(replace(shape, staggered=True)).step_s
        cost = max(0.0, planned.step_s / staggered_s - 1) if staggered_s else 0.0
        prediction["synchronous_step_cost"] = cost
        why += (
            "; clip_norm or skipped steps need all gradients before any update, so stages make the optimizer step "
            f"together, which makes a step {cost:.1%} longer"
        )
    return ScheduleChoice(PLANNED, planned.plan, step.cuts_of(planned.plan), why, prediction)
