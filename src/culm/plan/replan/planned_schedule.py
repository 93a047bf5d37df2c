"""The schedule `planned`: the shortest plan of a step without failures for given costs. Pure.

The candidates are 1F1B, ZB-H1 (also with only the last backwards split) and the plans of the greedy planner with whole
and with split backwards. Each of them is timed with the costs of the run: with the period of the staggered optimizer,
in which a stage begins its next step as soon as it has made its own optimizer step, or with the makespan where all
stages make that step together. A split backward costs more time than a whole one (`Costs.split`), so an I and a W that
follow each other become one B where that makes no other stage wait.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLANNED = "planned"
"""The name of the schedule and of its plans."""

MIN_AUTO_GAIN = 0.02
"""`auto` leaves 1F1B only for a schedule whose predicted step is shorter by more than this share. Predictions from a
profile are no more accurate than that, and 1F1B keeps the fewest activations."""

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
    """The shortest plan that is known for a step, within the activation limit. `check_plan` accepts it."""
    best = min(_candidates(shape.one_pipeline), key=lambda candidate: candidate.step_s)
    return replace(best, plan=repeat_pipeline(best.plan, shape.pipelines, shape.micro_batches))


def planned_step_s(shape: StepShape) -> float:
    """The predicted time per step of `plan_step`, found faster: without an overhead of split backwards no merge of
    halves makes a step shorter, and plans that do not depend on costs are made once."""
    one = shape.one_pipeline
    split = one.costs.split
    if any(split) if isinstance(split, tuple) else split:
        return plan_step(shape).step_s
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
    """Predicted time per step of a plan. With several segments per worker stages cannot be staggered."""
    if staggered and plan.segments == plan.stages and not plan.stage_overrides:
        return staggered_period(plan, costs)
    return time_plan(plan, costs).makespan


def bubble_free_step_s(shape: StepShape) -> float:
    """The work of the slowest stage, M x (F + I + W) without the overhead of splitting: no step is shorter, because a
    worker runs one action at a time."""
    one = shape.one_pipeline
    price = one.plan_case(split=False).action_costs
    return max(one.micro_batches * (price[Kind.F][s] + price[Kind.B][s]) for s in range(shape.stages))


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
