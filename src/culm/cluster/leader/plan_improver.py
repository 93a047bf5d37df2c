"""Plan improver: while training continues, a solver looks for a shorter plan of the healthy step.

The leader's shell runs it in a thread, once for each shape of the run. The reshape controller adopts a better
plan at a step boundary, as it adopts another shape; no layer moves. What is trained does not depend on the plan, only
the step time does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.events import ImprovePlan, PlanSearched
from culm.errors import PlanError
from culm.plan.replan.improve_plan import improve_plan
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.reshape.run_schedule import ScheduledStep, predicted_step_s
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.leader.leader_state import LeaderState
    from culm.cluster.run_setup import RunSetup
    from culm.plan.reshape.pipeline_shape import Depths, PipelineShape

_MIN_STEPS_GAINED = 2.0
"""A better plan is adopted only if it saves the time of this many of the remaining steps: the open steps have to drain,
and the epoch changes."""


@dataclass(frozen=True)
class ImprovedPlan:
    """A shorter plan for a shape."""

    shape: PipelineShape
    """The shape with the better plan."""
    gain: float
    """By which share a step is shorter."""
    why: str


class PlanImprover:
    """Improves the plan of each shape once. `improved_shape` starts the search or returns its result at once."""

    def __init__(self, state: LeaderState) -> None:
        self._state = state
        self._shapes: dict[Depths, PipelineShape] = {}
        """The shapes for which a search was started."""
        self._found: dict[Depths, ImprovedPlan] = {}

    def improved_shape(self, shape: PipelineShape, remaining_steps: int) -> ImprovedPlan | None:
        """A better plan for the current shape, if one is known and adopting it pays. Call it only in an epoch in which
        every slot is filled."""
        if not self._applies_to(shape):
            return None
        if shape.depths not in self._shapes:
            self._shapes[shape.depths] = shape
            self._state.emit(ImprovePlan(shape))
        found = self._found.get(shape.depths)
        if found is None or found.shape.plan_text == shape.plan_text:
            return None
        return found if found.gain * remaining_steps > _MIN_STEPS_GAINED else None

    def _applies_to(self, shape: PipelineShape) -> bool:
        setup = self._state.setup
        return setup.schedule == PLANNED and setup.improve_plan > 0 and len(set(shape.depths)) == 1

    def handle_search(self, event: PlanSearched) -> None:
        """Record the result of a search."""
        if not event.plan:
            self._state.log_event("plan_kept", why=event.why)
            return
        shape = self._shapes[event.depths]
        self._found[shape.depths] = _describe(shape, step_of(self._state.initial_setup, shape), event)


def search_plan(setup: RunSetup, shape: PipelineShape) -> PlanSearched:
    """Search for a shorter plan of a shape. Takes as long as the setup allows: call it in a thread."""
    if len(shape.segments) > shape.depths[0]:
        return PlanSearched(shape.depths, why="the solver plans one segment per worker, and this plan has two")
    try:
        better = improve_plan(step_of(setup, shape).planner_shape, Plan.from_text(shape.plan_text), setup.improve_plan)
    except PlanError as error:
        return PlanSearched(shape.depths, why=f"the plan is not improved: {error}")
    if better is None:
        return PlanSearched(shape.depths, why="the solver found no plan that is shorter by 1 % or more")
    return PlanSearched(shape.depths, better.plan.to_text(), better.step_s)


def step_of(setup: RunSetup, shape: PipelineShape) -> ScheduledStep:
    """The step of a shape as the planner takes it."""
    plan = Plan.from_text(shape.plan_text)
    return ScheduledStep(
        layers=setup.layers,
        cuts=tuple(first for first, _ in shape.segments[1:]),
        pipelines=plan.pipelines,
        stages=plan.stages,
        micro_batches=plan.micro_batches,
        memory=setup.memory,
        max_activations=setup.max_activations,
        synchronous=setup.synchronous_step,
        links=setup.links,
    )


def _describe(shape: PipelineShape, step: ScheduledStep, found: PlanSearched) -> ImprovedPlan:
    before = predicted_step_s(Plan.from_text(shape.plan_text), step)
    gain = 1 - found.step_s / before
    why = f"a better plan was found: {found.step_s:.4g} s per step predicted instead of {before:.4g}, {gain:.1%} less"
    return ImprovedPlan(msgspec.structs.replace(shape, plan_text=found.plan), gain, why)
