"""The schedule `planned`: the shortest plan of a step without failures for given costs. Pure.

The candidates are 1F1B, ZB-H1 (also with only the last backwards split) and the plans of the greedy planner with whole
and with split backwards; and with two segments per worker, where the model can be cut so, interleaved 1F1B and list
schedules (`two_range_schedule`), if they are faster by `MIN_RANGES_GAIN`. Each of them is timed with the costs of the
run: with the period of the staggered optimizer, in which a stage begins its next step as soon as it has made its own
optimizer step, or with the makespan where all stages make that step together. A split backward costs more time than a
whole one (`Costs.split`), so an I and a W that follow each other become one B where that makes no other stage wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from culm.plan.replan.fast_timing import RunnableOrder
from culm.plan.replan.greedy_planner import plan_greedy
from culm.plan.replan.plan_case import PlanCase
from culm.plan.replan.staggered_period import dry_run_period, staggered_period
from culm.plan.replan.step_bound import step_lower_bound
from culm.plan.replan.two_range_schedule import TwoRanges, TwoRangeStep, two_range_plans, two_range_step_s
from culm.schedule import (
    Action,
    Costs,
    Kind,
    Plan,
    check_plan,
    one_f_one_b,
    split_micro_batches,
    time_plan,
    zero_bubble,
)
from culm.schedule.plan_timing import action_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLANNED = "planned"
"""The name of the schedule and of its plans."""

MIN_AUTO_GAIN = 0.02
"""`auto` leaves 1F1B only for a schedule whose predicted step is shorter by more than this share. Predictions from a
profile are no more accurate than that, and 1F1B keeps the fewest activations."""

MIN_RANGES_GAIN = 0.01
"""Two segments per worker have to shorten a step by more than this share: the run of an action has costs of its own,
which the predictions do not know, and there are twice as many."""

_ROUNDING = 1e-9
"""Plans whose step times differ by a smaller share are equally fast."""
_MAX_SINGLE_MERGES = 1_000
"""Plans with more actions per pipeline merge the halves of a worker's backwards all together or not at all."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The step to plan."""

    pipelines: int
    stages: int
    micro_batches: int
    """M, over all pipelines."""
    costs: Costs
    max_activations: tuple[int, ...] | None = None
    """By stage: the most activations that a worker may keep; None: as many as the first stage of 1F1B."""
    staggered: bool = True
    """Whether a stage makes its optimizer step without waiting for the others."""
    splits_backward: bool = True
    """Whether a backward can be split into I and W."""
    two_ranges: TwoRanges | None = None
    """The model cut into two segments per worker; None: it cannot be, or must not."""

    @property
    def activation_limits(self) -> tuple[int, ...]:
        """By stage: the most activations that a worker may keep."""
        return (self.stages,) * self.stages if self.max_activations is None else self.max_activations

    def fits(self, plan: Plan) -> bool:
        """Whether a plan that `check_plan` accepts keeps the activation limits."""
        peaks = check_plan(plan).peak_activations
        return all(peak <= self.activation_limits[slot % self.stages] for slot, peak in enumerate(peaks))

    @property
    def one_pipeline(self) -> StepShape:
        """The fullest pipeline alone: the others run the same actions, or one micro-batch less."""
        return replace(self, pipelines=1, micro_batches=-(-self.micro_batches // self.pipelines))

    @property
    def two_range_step(self) -> TwoRangeStep | None:
        """One pipeline with two segments per worker."""
        if self.two_ranges is None or not self.splits_backward:
            return None
        micros = -(-self.micro_batches // self.pipelines)
        return TwoRangeStep.of(self.two_ranges, micros, staggered=self.staggered)

    def costs_of(self, plan: Plan) -> Costs:
        """The costs of the segments of a plan of this step."""
        if plan.segments == self.stages:
            return self.costs
        assert self.two_ranges is not None, "the plan was made from them"
        return self.two_ranges.costs

    def plan_case(self, *, split: bool) -> PlanCase:
        """The step as the planners take it."""
        return PlanCase(
            pipelines=self.pipelines,
            stages=self.stages,
            micro_batches=self.micro_batches,
            costs=self.costs,
            split=split,
            stagger=self.staggered,
            memory=self.activation_limits,
        )


@dataclass(frozen=True)
class PlannedStep:
    """A plan of a step and its predicted time."""

    plan: Plan
    step_s: float
    """Predicted time per step, in the unit of the costs."""


def plan_step(shape: StepShape) -> PlannedStep:
    """The shortest plan that is known for a step, within the activation limit. `check_plan` accepts it. It has one or
    two segments per worker."""
    one = shape.one_pipeline
    best = min(_candidates(one), key=lambda candidate: candidate.step_s)
    with_two = min(_two_range_candidates(one), key=lambda candidate: candidate.step_s, default=best)
    if with_two.step_s < best.step_s * (1 - MIN_RANGES_GAIN):
        best = with_two
    return replace(best, plan=repeat_pipeline(best.plan, shape.pipelines, shape.micro_batches))


def planned_step_s(shape: StepShape) -> float:
    """The predicted time per step of `plan_step`, found faster: without an overhead of split backwards no merge of
    halves makes a step shorter, and plans that do not depend on costs are made once."""
    one = shape.one_pipeline
    split = one.costs.split
    if any(split) if isinstance(split, tuple) else split:
        return plan_step(shape).step_s
    best = _one_range_step_s(one)
    step = one.two_range_step
    with_two = math.inf if step is None else two_range_step_s(step)
    return with_two if with_two < best * (1 - MIN_RANGES_GAIN) else best


def _one_range_step_s(one: StepShape) -> float:
    case = one.plan_case(split=one.splits_backward)
    bound, best = step_lower_bound(case), plan_greedy(case).step_time
    for maker in _builtin_makers(one):
        if best <= bound * (1 + _ROUNDING):
            break
        order, peaks = _order_and_peaks(maker)
        if all(peak <= limit for peak, limit in zip(peaks, one.activation_limits, strict=True)):
            dry_run = order.with_costs(one.costs)
            best = min(best, dry_run_period(dry_run, best) if one.staggered else dry_run.makespan())
    return best


class _PlanMaker(NamedTuple):
    """A plan of one pipeline that does not depend on costs."""

    stages: int
    micro_batches: int
    split_last: int | None
    """How many of the last backwards are split, as by `zero_bubble`; 0: none (1F1B); None: all."""

    def plan(self) -> Plan:
        counts = {"pipelines": 1, "stages": self.stages, "micro_batches": self.micro_batches}
        return one_f_one_b(**counts) if self.split_last == 0 else zero_bubble(**counts, split_last=self.split_last)


def _builtin_makers(one: StepShape) -> list[_PlanMaker]:
    """1F1B and the variants of ZB-H1. Of equally fast plans the first is the simplest."""
    P, M = one.stages, one.micro_batches
    lasts = [None, *(last for last in (P - 1, P, 3 * P // 2, 2 * P) if 0 < last < M)] if one.splits_backward else []
    return [_PlanMaker(P, M, last) for last in (0, *lasts)]


@lru_cache(maxsize=512)
def _order_and_peaks(maker: _PlanMaker) -> tuple[RunnableOrder, tuple[int, ...]]:
    plan = maker.plan()
    return RunnableOrder.of_plan(plan), check_plan(plan).peak_activations


def predict_step_s(plan: Plan, costs: Costs, *, staggered: bool) -> float:
    """Predicted time per step of a plan. Stages of uneven pipelines are not staggered."""
    if staggered and not plan.stage_overrides:
        return staggered_period(plan, costs)
    return time_plan(plan, costs).makespan


def bubble_free_step_s(shape: StepShape, *, ranges: int = 1) -> float:
    """The work of the slowest stage, M x (F + I + W) without the overhead of splitting: no step with so many segments
    per worker is shorter, because a worker runs one action at a time."""
    one, P = shape.one_pipeline, shape.stages
    costs = shape.costs if ranges == 1 or shape.two_ranges is None else shape.two_ranges.costs
    price = action_costs(costs, ranges * P)
    work = [forward + backward for forward, backward in zip(price[Kind.F], price[Kind.B], strict=True)]
    return one.micro_batches * max(sum(work[s::P]) for s in range(P))


def repeat_pipeline(plan: Plan, pipelines: int, micro_batches: int) -> Plan:
    """The plan of several pipelines from the plan of the fullest one: a smaller pipeline omits its last micro-batch."""
    rows = [
        tuple(_renumber(action, block) for action in row if action.micro is None or action.micro < len(block))
        for block in split_micro_batches(pipelines, micro_batches)
        for row in plan.workers
    ]
    return replace(plan, pipelines=pipelines, micro_batches=micro_batches, workers=tuple(rows))


def merge_adjacent_halves(plan: Plan, step_time: Callable[[Plan], float]) -> PlannedStep:
    """Run an I and the W of the same micro-batch right after it as one B, wherever the step does not become longer."""
    best = PlannedStep(plan, step_time(plan))
    for worker in range(len(plan.workers)):
        pairs = _adjacent_halves(best.plan.workers[worker])
        merged = _try_merge(best, worker, pairs, step_time)
        if merged is best and sum(map(len, plan.workers)) <= _MAX_SINGLE_MERGES:
            for pair in pairs:
                merged = _try_merge(merged, worker, [pair], step_time)
        best = merged
    return best


def _candidates(one: StepShape) -> Iterator[PlannedStep]:
    def step_time(plan: Plan) -> float:
        return predict_step_s(plan, one.costs, staggered=one.staggered)

    simplest, *others = [maker.plan() for maker in _builtin_makers(one)]
    greedy = [plan_greedy(one.plan_case(split=split)).plan for split in ((False, True) if others else (False,))]
    for plan in (simplest, greedy[0], *others, *greedy[1:]):
        if one.fits(plan):
            yield merge_adjacent_halves(replace(plan, name=PLANNED), step_time)


def _two_range_candidates(one: StepShape) -> Iterator[PlannedStep]:
    step = one.two_range_step
    if step is None:
        return

    def step_time(plan: Plan) -> float:
        return predict_step_s(plan, step.costs, staggered=one.staggered)

    for plan in two_range_plans(step):
        yield merge_adjacent_halves(replace(plan, name=PLANNED), step_time)


def _renumber(action: Action, block: range) -> Action:
    return action if action.micro is None else action._replace(micro=block[action.micro])


def _adjacent_halves(row: Sequence[Action]) -> list[Action]:
    """Every I that the W of its micro-batch follows."""
    return [one for one, other in pairwise(row) if one.kind is Kind.I and _weight_half(one) == other]


def _try_merge(
    best: PlannedStep, worker: int, chosen: Sequence[Action], step_time: Callable[[Plan], float]
) -> PlannedStep:
    """The plan in which a worker runs the chosen I and their W as B, if it is not longer than `best`."""
    if not chosen:
        return best
    halves = {action: action._replace(kind=Kind.B) for action in chosen}
    dropped = {_weight_half(action) for action in chosen}
    row = tuple(halves.get(action, action) for action in best.plan.workers[worker] if action not in dropped)
    rows = best.plan.workers
    plan = replace(best.plan, workers=(*rows[:worker], row, *rows[worker + 1 :]))
    seconds = step_time(plan)
    return PlannedStep(plan, seconds) if seconds <= best.step_s * (1 + _ROUNDING) else best


def _weight_half(action: Action) -> Action:
    return action._replace(kind=Kind.W)
