"""Seconds of a step with every slot filled, under a schedule. The table of `culm plan` and the simulator both ask here.

A schedule is "planned" (the plan of `culm.plan.replan.greedy_planner`: split backward, staggered optimizer, within the
memory of the case) or one of `culm run --schedule`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from culm.plan.model.early_grad_send import split_awaited_backwards
from culm.plan.replan.fast_timing import RunnableOrder
from culm.plan.replan.greedy_planner import plan_greedy
from culm.plan.replan.staggered_period import dry_run_period
from culm.plan.replan.step_bound import step_lower_bound
from culm.plan.replan.symmetry import achievable_period, single_pipeline_case
from culm.schedule import generate_plan, time_plan

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase
    from culm.schedule import Plan

PLANNED = "planned"
ESTIMATED_SCHEDULES = (PLANNED, "1f1b", "zb", "gpipe")
"""Schedules whose steps can be estimated: one segment per worker."""

AUTO = "auto"
_AUTO_SCHEDULES = (PLANNED, "zb", "1f1b")
"""The schedules that `auto` chooses from; of equals the first."""

MAX_PLANNED_FORWARDS = 4_000
"""Steps in which a pipeline has more forwards are not planned, but taken at their lower bound, which is close."""


def resolve_schedule(case: PlanCase, schedule: str) -> str:
    """The schedule itself; for "auto" the one with the shortest failure-free step."""
    return min(_AUTO_SCHEDULES, key=lambda name: failure_free_step_s(case, name)) if schedule == AUTO else schedule


@lru_cache(maxsize=4096)
def failure_free_step_s(case: PlanCase, schedule: str = PLANNED) -> float:
    """Seconds per step with every slot filled. All pipelines run the same actions, so the fullest one is timed."""
    one = single_pipeline_case(case)
    if schedule == PLANNED:
        is_large = one.stages * one.micro_batches > MAX_PLANNED_FORWARDS
        return step_lower_bound(one) if is_large else plan_greedy(one).step_time
    m, ramp = one.micro_batches, _RAMP_STEPS * one.stages
    if schedule == "gpipe" or m <= 2 * ramp:
        return _builtin_step_s(one, schedule)
    # In the middle of a step these schedules repeat: each further micro-batch takes as long as the one before.
    few, more = (_builtin_step_s(replace(one, micro_batches=count), schedule) for count in (ramp, 2 * ramp))
    return few + (m - ramp) * (more - few) / ramp


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
