"""How long a plan takes: when each action starts and ends, given the cost of each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import ScheduleError
from culm.schedule.action import Action, Kind
from culm.schedule.dry_run import dry_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.schedule.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds (or any other unit) per action: one number for all segments, or a tuple with one for each.

    B costs input + weight, I costs input + split.
    """

    forward: float | tuple[float, ...] = 1.0
    input: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0
    reduce: float | tuple[float, ...] = 0.0
    step: float | tuple[float, ...] = 0.0
    send: float | tuple[float, ...] = 0.0
    """Time from worker to worker over a segment boundary, in either direction: one number, or one per boundary."""
    split: float | tuple[float, ...] = 0.0
    """Extra time of I and W run separately, compared with B."""


UNIT_COSTS = Costs()
"""F = I = W = 1 and the rest 0: the time slots used in the papers."""


class ActionSpan(NamedTuple):
    """An action with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A plan with the times of all actions."""

    plan: Plan
    makespan: float
    """When the last worker finishes."""
    spans: tuple[tuple[ActionSpan, ...], ...]
    """By slot number, in the order of the plan."""
    busy_time: tuple[float, ...]
    """Time that each worker spends computing, by slot number."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all live workers' time until the makespan, from 0 to 1."""
        available = self.makespan * (len(self.spans) - len(self.plan.failed))
        return max(0.0, 1 - sum(self.busy_time) / available) if available else 0.0


def time_plan(plan: Plan, costs: Costs = UNIT_COSTS) -> Timeline:
    """Compute when every action runs if each worker runs its list in order and as early as possible.

    The model: a worker runs one action at a time. F, I and B start when the worker is free and the input tensor has
    arrived: `send` after the end of its producer on another worker, at once on the same worker. Sending does not
    occupy a worker, and links do not share bandwidth. R starts on all holders of a segment together, when the last of
    them reaches it. The plan must be one that `check_plan` accepts; a plan that deadlocks raises ScheduleError.
    """
    price = action_costs(costs, plan.segments)
    send = send_costs(costs, plan.segments)
    placement = plan.placement()
    free = [0.0] * len(plan.workers)
    ends: dict[Action, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in plan.workers]
    for action, workers, needs in dry_run(plan):
        start = max([free[worker] for worker in workers])
        if needs is not None:
            send_delay = 0.0 if placement[needs] == workers[0] else send[min(needs.segment, action.segment)]
            start = max(start, ends[needs] + send_delay)
        end = ends[action] = start + price[action.kind][action.segment]
        for worker in workers:
            free[worker] = end
            spans[worker].append(ActionSpan(action, start, end))
    busy = tuple(sum(span.end - span.start for span in row) for row in spans)
    return Timeline(plan, max(free), tuple(map(tuple, spans)), busy)


def action_costs(costs: Costs, segments: int) -> dict[Kind, Sequence[float]]:
    """The cost of each kind of action, by segment. Raises a ScheduleError that names the invalid field."""
    halves = [_one_per_segment("input", costs.input, segments), _one_per_segment("weight", costs.weight, segments)]
    split = _one_per_segment("split", costs.split, segments)
    return {
        Kind.F: _one_per_segment("forward", costs.forward, segments),
        Kind.I: [i + more for i, more in zip(halves[0], split, strict=True)],
        Kind.W: halves[1],
        Kind.B: [i + w for i, w in zip(*halves, strict=True)],
        Kind.R: _one_per_segment("reduce", costs.reduce, segments),
        Kind.S: _one_per_segment("step", costs.step, segments),
    }


def send_costs(costs: Costs, segments: int) -> tuple[float, ...]:
    """The cost of crossing each boundary between two segments."""
    return _one_per_segment("send", costs.send, segments - 1)


def _one_per_segment(field: str, cost: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    """One cost for each of `count` segments or boundaries."""
    each = cost if isinstance(cost, tuple) else (cost,) * count
    if len(each) != count:
        raise ScheduleError(f"Costs.{field} has {len(each)} numbers: use {count} for this plan, or one for all")
    for value in each:
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise ScheduleError(f"Costs.{field} is {value!r}: use a number of at least 0")
    return each
