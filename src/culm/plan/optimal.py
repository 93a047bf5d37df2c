"""The shortest plan there is, by constraint programming (OR-Tools CP-SAT), with the greedy plan as a start.

Needs the extra `planner`. Time runs in whole units there, so costs are scaled to whole numbers and rounded down where
that is not exact: the bound that is proved then holds for the real costs too, and the plan is timed with these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.errors import PlanError, ScheduleError
from culm.plan.failures import Slot
from culm.plan.greedy import Rerouted, duration, greedy
from culm.plan.period import begins
from culm.schedule import Action, Kind, check

if TYPE_CHECKING:
    from culm.plan.failures import Case

LIMIT_S = 10.0
"""Seconds after which the solver is asked for the best plan that it has."""

LARGEST = 12_000
"""Forwards, over all stages and micro-batches, up to which a model is made at all."""

_FINEST = 10_000
"""Costs whose common denominator is larger are rounded to that many parts of the largest of them."""
_EXACT = 1e-6


def optimal(case: Case, *, limit_s: float = LIMIT_S, workers: int = 8) -> Rerouted:
    """The best plan that CP-SAT finds in the time, never worse than the greedy one.

    Its `bound` is the best that was proved: with a gap of 0 the plan is optimal. `solver` is "cp-sat" even where the
    greedy plan turned out to be the best. Raises PlanError if OR-Tools is not installed, the limit is not positive, or
    the case is too large.
    """
    if not limit_s > 0:
        raise PlanError(f"the time limit is {limit_s} s: use a number above 0")
    if (forwards := case.stages * case.micro_batches) > LARGEST:
        raise PlanError(f"the case has {forwards:,} forwards, and cp-sat takes {LARGEST:,} at most: use greedy")
    start = replace(greedy(case), solver="cp-sat")
    if not start.gap:
        return start
    model = _Model(start, _cp_model())
    lists, least = model.solve(limit_s, workers)
    found = _better(start, lists)
    return replace(found, bound=min(found.slots, max(start.bound, least)))


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise PlanError(
            "the solver cp-sat needs OR-Tools, which is not installed: use 'pip install culm[planner]', or greedy"
        ) from None
    return cp_model


def _better(start: Rerouted, lists: tuple[tuple[Action, ...], ...] | None) -> Rerouted:
    """The plan of these lists if it can run and is shorter than the one there is.

    Actions that cost nothing have no order in time; where the one taken can not run, the start stays.
    """
    if lists is None:
        return start
    case = start.case
    plan = replace(start.plan, workers=lists).with_updates()
    try:
        peaks = check(plan).peak_activations
    except ScheduleError:
        return start
    fits = all(peak <= case.cap(worker % case.stages) for worker, peak in enumerate(peaks))
    spent = duration(case, plan)
    return replace(start, plan=plan, slots=spent, peak_activations=peaks) if fits and spent < start.slots else start


class _Run(NamedTuple):
    """An action that may run on a worker: its start and end on the clock, and whether it does run there."""

    action: Action
    start: Any
    end: Any
    here: Any
    interval: Any


class _Model:
    """The case as variables and constraints, with a plan to start from."""

    def __init__(self, start: Rerouted, cp: Any) -> None:
        case = start.case
        self.case, self.cp, self.model = case, cp, cp.CpModel()
        self.scale = _scale(case)
        self.home = [pipeline for pipeline, block in enumerate(case.blocks) for _ in block]
        self.kinds = (Kind.F, Kind.I, Kind.W) if case.split else (Kind.F, Kind.B)
        # A stage begins and ends within T; F goes down the stages and I up, so all of them are within 2 T.
        self.horizon = math.ceil(start.slots * self.scale) * (2 if case.stagger else 1) + 1
        self.starts: dict[Action, Any] = {}
        self.here: dict[tuple[int, int, int], Any] = {}
        """(stage, micro-batch, pipeline) -> whether it runs there."""
        self.runs: dict[Slot, list[_Run]] = defaultdict(list)
        for stage in range(case.stages):
            for micro in range(case.micro_batches):
                self._place(stage, micro)
        self._follow()
        self._hold()
        self._order()
        self.length = self._objective()
        self._hint(start)

    def _whole(self, cost: float) -> int:
        return math.floor(cost * self.scale + _EXACT)

    def _price(self, kind: Kind, stage: int) -> int:
        # B is the sum of two prices, and must be no more than the two after rounding.
        return self._whole(self.case.prices[kind][stage])

    def _place(self, stage: int, micro: int) -> None:
        """The actions of a micro-batch in a stage, on its own worker or on any peer of a failed one."""
        own = self.home[micro]
        alive = self.case.live(stage)
        peers = [own] if own in alive else alive
        for pipeline in peers:
            self.here[stage, micro, pipeline] = self.model.new_bool_var("")
        self.model.add_exactly_one(self.here[stage, micro, pipeline] for pipeline in peers)
        for kind in self.kinds:
            action = Action(stage, kind, micro)
            self.starts[action] = self.model.new_int_var(0, self.horizon, str(action))
            for pipeline in peers:
                self._run(action, pipeline)

    def _run(self, action: Action, pipeline: int) -> None:
        start, price = self.starts[action], self._price(action.kind, action.segment)
        assert action.micro is not None
        here = self.here[action.segment, action.micro, pipeline]
        interval = self.model.new_optional_fixed_size_interval_var(start, price, here, "")
        slot = Slot(pipeline, action.segment)
        self.runs[slot].append(_Run(action, start, start + price, here, interval))

    def _follow(self) -> None:
        """What an action takes from others is there when it starts; a worker does one thing at a time."""
        for action, start in self.starts.items():
            for needed, crossing in self._needs(action):
                self.model.add(start >= self.starts[needed] + self._price(needed.kind, needed.segment) + crossing)
        for runs in self.runs.values():
            self.model.add_no_overlap(run.interval for run in runs)

    def _needs(self, action: Action) -> list[tuple[Action, int]]:
        (stage, kind, micro), case = action, self.case
        sends = [self._whole(send) for send in case.sends]
        if kind is Kind.F:
            return [(Action(stage - 1, Kind.F, micro), sends[stage - 1])] if stage else []
        if kind is Kind.W:
            return [(Action(stage, Kind.I, micro), 0)]
        behind = [(Action(stage + 1, kind, micro), sends[stage])] if stage < case.stages - 1 else []
        return [(Action(stage, Kind.F, micro), 0), *behind]

    def _hold(self) -> None:
        """No worker has more activations alive than its cap, each from the start of F to the end of W or B."""
        for slot, runs in self.runs.items():
            cap = self.case.cap(slot.stage)
            if cap >= self.case.micro_batches:
                continue
            last = {run.action.micro: run for run in runs if run.action.kind is self.kinds[-1]}
            lives = [self._life(run, last[run.action.micro].end) for run in runs if run.action.kind is Kind.F]
            self.model.add_cumulative(lives, [1] * len(lives), cap)

    def _life(self, first: _Run, end: Any) -> Any:
        length = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_optional_interval_var(first.start, length, end, first.here, "")

    def _order(self) -> None:
        """With every worker alive, sums keep the micro-batches in order. Otherwise those of a pipeline may be swapped
        as a whole, so they can be taken to begin in order."""
        stages = range(1) if self.case.failed else range(self.case.stages)
        kind = Kind.F if self.case.failed else self.kinds[-1]
        for block in self.case.blocks:
            for one, other in pairwise(block):
                for stage in stages:
                    self.model.add(self.starts[Action(stage, kind, one)] <= self.starts[Action(stage, kind, other)])

    def _objective(self) -> Any:
        """The makespan; or, under the staggered optimizer, the longest window of a stage from its first F to its S."""
        length = self.model.new_int_var(0, self.horizon, "length")
        self.begin = [self.model.new_int_var(0, self.horizon, "") for _ in range(self.case.stages)]
        self.model.add(self.begin[0] == 0)
        for (stage, kind, _), start in self.starts.items():
            finish = self._whole(self.case.prices[Kind.R][stage]) + self._whole(self.case.prices[Kind.S][stage])
            begin = self.begin[stage] if self.case.stagger else 0
            if kind is Kind.F:
                self.model.add(start >= begin)
            if kind is self.kinds[-1]:
                self.model.add(start + self._price(kind, stage) + finish <= begin + length)
        self.model.minimize(length)
        return length

    def _hint(self, found: Rerouted) -> None:
        """Start from a plan that is there, and never look for a longer one."""
        at, begin = begins(found.plan, self.case.costs, found.slots if self.case.stagger else math.inf)
        early = min(begin)
        for action, start in at.items():
            self.model.add_hint(self.starts[action], self._whole(start - early))
        for worker, row in enumerate(found.plan.workers):
            pipeline, stage = divmod(worker, self.case.stages)
            for action in row:
                if action.kind is Kind.F and action.micro is not None:
                    self.model.add_hint(self.here[stage, action.micro, pipeline], True)
        for stage in range(self.case.stages):
            self.model.add_hint(self.begin[stage], self._whole(begin[stage] - early))
        self.model.add(self.length >= math.floor(found.bound * self.scale + _EXACT))
        self.model.add(self.length <= math.ceil(found.slots * self.scale - _EXACT))

    def solve(self, limit_s: float, workers: int) -> tuple[tuple[tuple[Action, ...], ...] | None, float]:
        """The lists by slot number (None: nothing was found), and the bound that was proved."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        least = solver.best_objective_bound / self.scale
        return (self._lists(solver) if status in (self.cp.OPTIMAL, self.cp.FEASIBLE) else None), least

    def _lists(self, solver: Any) -> tuple[tuple[Action, ...], ...]:
        rank = {kind: number for number, kind in enumerate((Kind.W, Kind.B, Kind.I, Kind.F))}

        def when(run: _Run) -> tuple[int, int, int]:
            return solver.value(run.start), solver.value(run.end), rank[run.action.kind]

        slots = [Slot(d, s) for d in range(self.case.pipelines) for s in range(self.case.stages)]
        rows = [[run for run in self.runs[slot] if solver.value(run.here)] for slot in slots]
        return tuple(tuple(run.action for run in sorted(row, key=when)) for row in rows)


def _scale(case: Case) -> float:
    """What makes whole numbers of all costs, if their common denominator is small; else a fine grid."""
    costs = [cost for row in case.prices.values() for cost in row] + list(case.sends)
    parts = math.lcm(*(Fraction(cost).limit_denominator(_FINEST).denominator for cost in costs))
    return parts if parts <= _FINEST else _FINEST / max(costs)
