"""Improve the plan of a healthy step with CP-SAT, within a limit of work. Pure: the same inputs give the same plan."""

from __future__ import annotations

from dataclasses import replace

from culm.plan.replan.cp_sat_planner import plan_optimal
from culm.plan.replan.planned_schedule import (
    PLANNED,
    PlannedStep,
    StepShape,
    merge_adjacent_halves,
    predict_step_s,
    repeat_pipeline,
)
from culm.schedule import Plan

MIN_GAIN = 0.01
"""A plan that shortens the step by a smaller share is not worth another epoch."""


def improve_plan(shape: StepShape, current: Plan, work_limit: float) -> PlannedStep | None:
    """A plan whose predicted step is shorter than that of `current` by more than MIN_GAIN; None: none was found.

    `work_limit` limits the work of the solver, in its deterministic seconds, so that the result does not depend on the
    load of the machine. The solver uses one thread. Raises PlanError if OR-Tools is not installed or the step is too
    large.
    """

    def step_time(plan: Plan) -> float:
        return predict_step_s(plan, shape.costs, staggered=shape.staggered)

    found = plan_optimal(shape.one_pipeline.plan_case(split=True), limit_s=work_limit, workers=1, deterministic=True)
    best = merge_adjacent_halves(replace(found.plan, name=PLANNED), step_time)
    plan = repeat_pipeline(best.plan, shape.pipelines, shape.micro_batches)
    seconds = step_time(plan)
    return PlannedStep(plan, seconds) if shape.fits(plan) and seconds < step_time(current) * (1 - MIN_GAIN) else None
