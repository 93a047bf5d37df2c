"""Seconds of a step with every slot filled, under a schedule. The table of `culm plan` and the simulator both ask here.

A schedule is one of `culm run --schedule`. Steps under `planned` take as long as the plan that a run would choose.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from culm.plan.model.early_grad_send import split_awaited_backwards
from culm.plan.replan.fast_timing import RunnableOrder
from culm.plan.replan.planned_schedule import MIN_AUTO_GAIN, PLANNED, StepShape, planned_step_s
from culm.plan.replan.staggered_period import dry_run_period
from culm.plan.replan.step_bound import step_lower_bound
from culm.plan.replan.symmetry import achievable_period, single_pipeline_case
from culm.schedule import generate_plan, time_plan

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase
    from culm.schedule import Plan

ESTIMATED_SCHEDULES = (PLANNED, "1f1b", "zb", "gpipe")
"""Schedules whose steps can be estimated: one segment per worker."""

AUTO = "auto"

MAX_PLANNED_FORWARDS = 4_000
"""Steps in which a pipeline has more forwards are not planned, but taken at their lower bound, which is close."""

StageLimits: TypeAlias = tuple[int, ...]
"""By stage: the most activations that a worker may keep under `planned`."""


def resolve_schedule(case: PlanCase, schedule: str, limits: StageLimits | None = None) -> str:
    """The schedule itself; for "auto" the one that a run would choose: 1F1B, unless `planned` is faster by more than
    `MIN_AUTO_GAIN`."""
    if schedule != AUTO:
        return schedule
    gain = 1 - failure_free_step_s(case, PLANNED, limits) / failure_free_step_s(case, "1f1b")
    return PLANNED if gain > MIN_AUTO_GAIN else "1f1b"


@lru_cache(maxsize=4096)
def failure_free_step_s(case: PlanCase, schedule: str = PLANNED, limits: StageLimits | None = None) -> float:
    """Seconds per step with every slot filled. All pipelines run the same actions, so the fullest one is timed.

    `limits` are those of a run, for `planned`; None: as many activations as the first stage of 1F1B keeps, which a run
    allows if all stages are equal. The memory of the case limits plans with failed slots only.
    """
    one = single_pipeline_case(case)
    if one.two_ranges is not None and not one.two_ranges.is_possible(one.micro_batches):
        one = replace(one, two_ranges=None)
    m, ramp = one.micro_batches, _RAMP_STEPS * one.stages
    if schedule == "gpipe" or m <= 2 * ramp:
        return _step_s(one, schedule, limits)
    # In the middle of a step these schedules repeat: each further micro-batch takes as long as the one before.
    few, more = (_step_s(replace(one, micro_batches=count), schedule, limits) for count in (ramp, 2 * ramp))
    return few + (m - ramp) * (more - few) / ramp


def _step_s(one: PlanCase, schedule: str, limits: StageLimits | None) -> float:
    if schedule != PLANNED:
        return _builtin_step_s(one, schedule)
    shape = planned_step_shape(one, limits)
    if one.stages * one.micro_batches > MAX_PLANNED_FORWARDS:
        return step_lower_bound(shape.plan_case(split=shape.splits_backward))
    return planned_step_s(replace(shape, two_ranges=one.two_ranges))


def planned_step_shape(case: PlanCase, limits: StageLimits | None) -> StepShape:
    """A case with every slot filled as a run plans it under `planned`, with one segment per worker."""
    return StepShape(
        pipelines=case.pipelines,
        stages=case.stages,
        micro_batches=case.micro_batches,
        costs=case.costs,
        max_activations=limits,
        staggered=case.stagger,
        splits_backward=case.split,
    )


_RAMP_STEPS = 4
"""After this many micro-batches per stage a step is in its steady state."""


def healthy_plan(case: PlanCase, schedule: str) -> Plan:
    """The plan of a step with every slot filled under a schedule of `culm run`, with gradients sent early as there."""
    plan = generate_plan(schedule, pipelines=case.pipelines, stages=case.stages, micro_batches=case.micro_batches)
    return split_awaited_backwards(plan, case.costs) if case.early_sends else plan


@lru_cache(maxsize=1024)
def _builtin_order(schedule: str, stages: int, micro_batches: int) -> RunnableOrder:
    """The order of actions of one pipeline. Steps that differ only in costs, as on other instances, share it."""
    return RunnableOrder.of_plan(generate_plan(schedule, pipelines=1, stages=stages, micro_batches=micro_batches))


def _builtin_step_s(one: PlanCase, schedule: str) -> float:
    if not one.stagger:
        return time_plan(healthy_plan(one, schedule), one.costs).makespan
    order = (
        RunnableOrder.of_plan(healthy_plan(one, schedule))
        if one.early_sends  # what is split depends on the costs
        else _builtin_order(schedule, one.stages, one.micro_batches)
    )
    dry_run = order.with_costs(one.costs)
    if one.stages * one.micro_batches <= MAX_PLANNED_FORWARDS:
        return dry_run_period(dry_run)
    bound = step_lower_bound(replace(one, split=schedule == "zb" or one.early_sends, memory=None))
    return achievable_period(dry_run, bound)
