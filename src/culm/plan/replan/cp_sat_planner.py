"""The shortest plan, by constraint programming (OR-Tools CP-SAT), starting from the greedy plan.

Needs the extra `planner`. CP-SAT works with whole numbers, so costs are scaled to integers and rounded down if that is
not exact: the proved bound then also holds for the real costs, and the plan is timed with the real costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.errors import PlanError, ScheduleError
from culm.plan.replan.greedy_planner import PlanSolution, plan_greedy, plan_step_time
from culm.plan.replan.plan_case import Slot
from culm.plan.replan.staggered_period import staggered_start_times
from culm.schedule import Action, Kind, check_plan

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase

DEFAULT_TIME_LIMIT_S = 10.0
"""Seconds after which the solver returns its best plan."""

MAX_FORWARDS = 12_000
"""Largest case, as forwards over all stages and micro-batches, for which a model is built."""

_MAX_DENOMINATOR = 10_000
"""If the common denominator of the costs is larger, they are rounded to this many parts of the largest cost."""
_ROUNDING = 1e-6


def plan_optimal(
    case: PlanCase, *, limit_s: float = DEFAULT_TIME_LIMIT_S, workers: int = 8, deterministic: bool = False
) -> PlanSolution:
    """The best plan that CP-SAT finds within `limit_s`, never worse than the greedy plan.

    Its `lower_bound` is the best proved bound: with a gap of 0 the plan is optimal. `solver` is "cp-sat" even if the
    greedy plan is the best. `deterministic`: the limit is one of work, in CP-SAT's deterministic seconds, so that the
    result is the same on every machine; use one worker then. Raises PlanError if OR-Tools is not installed, the limit
    is not positive, or the case is too large.
    """
    if not limit_s > 0:
        raise PlanError(f"the time limit is {limit_s} s: use a number above 0")
    if (forwards := case.stages * case.micro_batches) > MAX_FORWARDS:
        raise PlanError(
            f"the case has {forwards:,} forwards, but cp-sat takes at most {MAX_FORWARDS:,}: use --solver greedy"
        )
    start = replace(plan_greedy(case), solver="cp-sat")
    if not start.gap:
        return start
    model = _CpSatModel(start, _import_cp_model())
    lists, proved_bound = model.solve(limit_s, workers, deterministic=deterministic)
    solution = _improve(start, lists)
    return replace(solution, lower_bound=min(solution.step_time, max(start.lower_bound, proved_bound)))


def _import_cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise PlanError(
            "the solver cp-sat needs OR-Tools, which is not installed: "
            "use 'pip install culm[planner]', or --solver greedy"
        ) from None
    return cp_model


def _improve(start: PlanSolution, lists: tuple[tuple[Action, ...], ...] | None) -> PlanSolution:
    """The plan of these lists if it is valid and shorter than `start`, otherwise `start`.

    Actions that cost nothing have no order in time; if the order that was extracted is not valid, `start` is returned.
    """
    if lists is None:
        return start
    case = start.case
    plan = replace(start.plan, workers=lists).with_reduce_and_step()
    try:
        peaks = check_plan(plan).peak_activations
    except ScheduleError:
        return start
    fits = all(peak <= case.max_activations(worker % case.stages) for worker, peak in enumerate(peaks))
    step_time = plan_step_time(case, plan)
    return (
        replace(start, plan=plan, step_time=step_time, peak_activations=peaks)
        if fits and step_time < start.step_time
        else start
    )


class _ActionInterval(NamedTuple):
    """An action that may run on a worker: its start and end variables, and whether it runs there."""

    action: Action
    start: Any
    end: Any
    is_placed: Any
    interval: Any


class _CpSatModel:
    """The case as variables and constraints, with a plan as the starting hint."""

    def __init__(self, start: PlanSolution, cp: Any) -> None:
        case = start.case
        self.case, self.cp, self.model = case, cp, cp.CpModel()
        self.ticks_per_unit = _ticks_per_unit(case)
        self.own_pipeline = [pipeline for pipeline, block in enumerate(case.micros_by_pipeline) for _ in block]
        self.kinds = (Kind.F, Kind.I, Kind.W) if case.split else (Kind.F, Kind.B)
        # Each stage's window is at most T; F passes down the stages and I up, so everything is within 2 T.
        self.horizon = math.ceil(start.step_time * self.ticks_per_unit) * (2 if case.stagger else 1) + 1
        self.starts: dict[Action, Any] = {}
        self.placements: dict[tuple[int, int, int], Any] = {}
        """(stage, micro-batch, pipeline) -> whether the micro-batch runs there."""
        self.intervals: dict[Slot, list[_ActionInterval]] = defaultdict(list)
        for stage in range(case.stages):
            for micro in range(case.micro_batches):
                self._add_micro_batch(stage, micro)
        self._add_precedence()
        self._add_activation_limits()
        self._add_micro_batch_order()
        self.step_time = self._add_objective()
        self._add_hints(start)

    def _to_ticks(self, cost: float) -> int:
        return math.floor(cost * self.ticks_per_unit + _ROUNDING)

    def _ticks_of(self, kind: Kind, stage: int) -> int:
        # B is the sum of two costs; after rounding it must not exceed the sum of the rounded costs.
        return self._to_ticks(self.case.action_costs[kind][stage])

    def _add_micro_batch(self, stage: int, micro: int) -> None:
        """Add the actions of a micro-batch in a stage: on its own worker, or on any peer if that worker failed."""
        own = self.own_pipeline[micro]
        alive = self.case.live_pipelines(stage)
        peers = [own] if own in alive else alive
        for pipeline in peers:
            self.placements[stage, micro, pipeline] = self.model.new_bool_var("")
        self.model.add_exactly_one(self.placements[stage, micro, pipeline] for pipeline in peers)
        for kind in self.kinds:
            action = Action(stage, kind, micro)
            self.starts[action] = self.model.new_int_var(0, self.horizon, str(action))
            for pipeline in peers:
                self._add_interval(action, pipeline)

    def _add_interval(self, action: Action, pipeline: int) -> None:
        start, price = self.starts[action], self._ticks_of(action.kind, action.segment)
        assert action.micro is not None
        placement = self.placements[action.segment, action.micro, pipeline]
        interval = self.model.new_optional_fixed_size_interval_var(start, price, placement, "")
        slot = Slot(pipeline, action.segment)
        self.intervals[slot].append(_ActionInterval(action, start, start + price, placement, interval))

    def _add_precedence(self) -> None:
        """An action starts after its inputs have arrived, and a worker runs one action at a time."""
        for action, start in self.starts.items():
            for needed, crossing in self._required_before(action):
                self.model.add(start >= self.starts[needed] + self._ticks_of(needed.kind, needed.segment) + crossing)
        for runs in self.intervals.values():
            self.model.add_no_overlap(run.interval for run in runs)

    def _required_before(self, action: Action) -> list[tuple[Action, int]]:
        (stage, kind, micro), case = action, self.case
        sends = [self._to_ticks(send) for send in case.send_costs]
        if kind is Kind.F:
            return [(Action(stage - 1, Kind.F, micro), sends[stage - 1])] if stage else []
        if kind is Kind.W:
            return [(Action(stage, Kind.I, micro), 0)]
        behind = [(Action(stage + 1, kind, micro), sends[stage])] if stage < case.stages - 1 else []
        return [(Action(stage, Kind.F, micro), 0), *behind]

    def _add_activation_limits(self) -> None:
        """No worker keeps more activations than its limit, each from the start of F to the end of W or B."""
        for slot, runs in self.intervals.items():
            cap = self.case.max_activations(slot.stage)
            if cap >= self.case.micro_batches:
                continue
            last = {run.action.micro: run for run in runs if run.action.kind is self.kinds[-1]}
            lives = [
                self._activation_interval(run, last[run.action.micro].end) for run in runs if run.action.kind is Kind.F
            ]
            self.model.add_cumulative(lives, [1] * len(lives), cap)

    def _activation_interval(self, first: _ActionInterval, end: Any) -> Any:
        length = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_optional_interval_var(first.start, length, end, first.is_placed, "")

    def _add_micro_batch_order(self) -> None:
        """Without failures, gradients are summed in micro-batch order. With failures, the micro-batches of a pipeline
        are interchangeable, so it is enough to consider those that start in order."""
        stages = range(1) if self.case.failed else range(self.case.stages)
        kind = Kind.F if self.case.failed else self.kinds[-1]
        for block in self.case.micros_by_pipeline:
            for one, other in pairwise(block):
                for stage in stages:
                    self.model.add(self.starts[Action(stage, kind, one)] <= self.starts[Action(stage, kind, other)])

    def _add_objective(self) -> Any:
        """Minimize the makespan, or, under the staggered optimizer, the longest window of a stage from first F to S."""
        length = self.model.new_int_var(0, self.horizon, "length")
        self.stage_begins = [self.model.new_int_var(0, self.horizon, "") for _ in range(self.case.stages)]
        self.model.add(self.stage_begins[0] == 0)
        for (stage, kind, _), start in self.starts.items():
            finish = self._to_ticks(self.case.action_costs[Kind.R][stage]) + self._to_ticks(
                self.case.action_costs[Kind.S][stage]
            )
            begin = self.stage_begins[stage] if self.case.stagger else 0
            if kind is Kind.F:
                self.model.add(start >= begin)
            if kind is self.kinds[-1]:
                self.model.add(start + self._ticks_of(kind, stage) + finish <= begin + length)
        self.model.minimize(length)
        return length

    def _add_hints(self, solution: PlanSolution) -> None:
        """Start from an existing plan, and never search for a longer one."""
        at, begin = staggered_start_times(
            solution.plan, self.case.costs, solution.step_time if self.case.stagger else math.inf
        )
        early = min(begin)
        for action, start in at.items():
            self.model.add_hint(self.starts[action], self._to_ticks(start - early))
        for worker, row in enumerate(solution.plan.workers):
            pipeline, stage = divmod(worker, self.case.stages)
            for action in row:
                if action.kind is Kind.F and action.micro is not None:
                    self.model.add_hint(self.placements[stage, action.micro, pipeline], True)
        for stage in range(self.case.stages):
            self.model.add_hint(self.stage_begins[stage], self._to_ticks(begin[stage] - early))
        self.model.add(self.step_time >= math.floor(solution.lower_bound * self.ticks_per_unit + _ROUNDING))
        self.model.add(self.step_time <= math.ceil(solution.step_time * self.ticks_per_unit - _ROUNDING))

    def solve(
        self, limit_s: float, workers: int, *, deterministic: bool
    ) -> tuple[tuple[tuple[Action, ...], ...] | None, float]:
        """The lists by slot number (None if nothing was found), and the proved bound."""
        solver = self.cp.CpSolver()
        if deterministic:
            solver.parameters.max_deterministic_time = limit_s
        else:
            solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        proved_bound = solver.best_objective_bound / self.ticks_per_unit
        return (self._extract_rows(solver) if status in (self.cp.OPTIMAL, self.cp.FEASIBLE) else None), proved_bound

    def _extract_rows(self, solver: Any) -> tuple[tuple[Action, ...], ...]:
        rank = {kind: number for number, kind in enumerate((Kind.W, Kind.B, Kind.I, Kind.F))}

        def when(run: _ActionInterval) -> tuple[int, int, int]:
            return solver.value(run.start), solver.value(run.end), rank[run.action.kind]

        slots = [Slot(d, s) for d in range(self.case.pipelines) for s in range(self.case.stages)]
        rows = [[run for run in self.intervals[slot] if solver.value(run.is_placed)] for slot in slots]
        return tuple(tuple(run.action for run in sorted(row, key=when)) for row in rows)


def _ticks_per_unit(case: PlanCase) -> float:
    """The factor that makes all costs whole numbers if their common denominator is small; otherwise a fine grid."""
    costs = [cost for row in case.action_costs.values() for cost in row] + list(case.send_costs)
    parts = math.lcm(*(Fraction(cost).limit_denominator(_MAX_DENOMINATOR).denominator for cost in costs))
    return parts if parts <= _MAX_DENOMINATOR else _MAX_DENOMINATOR / max(costs)
