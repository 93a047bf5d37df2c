"""Explain in sentences why a plan with failed slots takes as long as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.plan.replan.plan_case import fits_in_bubble
from culm.plan.replan.step_bound import stage_lower_bound
from culm.text_format import count_noun

if TYPE_CHECKING:
    from culm.plan.replan.greedy_planner import PlanSolution
    from culm.plan.replan.plan_case import PlanCase


def explain_plan(solution: PlanSolution) -> tuple[str, ...]:
    """What the failures add to each stage, which stage is the bottleneck, and whether a shorter plan can exist."""
    case = solution.case
    damaged = sorted({slot.stage for slot in case.failed})
    return (*(_explain_stage_load(case, stage) for stage in damaged), _explain_bottleneck(case), _explain_gap(solution))


def _explain_stage_load(case: PlanCase, stage: int) -> str:
    more = case.max_micros_per_worker(stage) - len(case.micros_by_pipeline[0])
    free = case.stages - 1
    fits = "has room for them" if fits_in_bubble(case, stage) else f"has room for {free} only"
    alive = f"{len(case.live_pipelines(stage))} of {count_noun(case.pipelines, 'worker')}"
    load = (
        f"up to {count_noun(case.max_micros_per_worker(stage), 'micro-batch')} each, {more} more than without a failure"
    )
    return f"stage {stage} runs on {alive}: {load}; with equal times the bubble of 1F1B {fits}"


def _explain_bottleneck(case: PlanCase) -> str:
    stage = max(range(case.stages), key=lambda stage: stage_lower_bound(case, stage))
    reason = "its work, and the path to it and back" if case.stages > 1 else "its work"
    return f"the bound of {stage_lower_bound(case, stage):.6g} comes from stage {stage}: {reason}"


def _explain_gap(solution: PlanSolution) -> str:
    if not solution.gap:
        return "the plan meets the bound: no plan is shorter"
    limit = f"but not below {solution.lower_bound:.6g}"
    return f"the plan is {solution.gap:.1%} above the bound: a shorter one may exist, {limit}"
