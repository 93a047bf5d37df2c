"""How long a plan takes: when each action starts and ends, given what each kind costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import ScheduleError
from culm.schedule.action import Action, Kind
from culm.schedule.walk import walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.schedule.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds (or any other unit) per action: one number for all segments, or a tuple with one for each.

    B costs input + weight.
    """

    forward: float | tuple[float, ...] = 1.0
    input: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0
    reduce: float | tuple[float, ...] = 0.0
    step: float | tuple[float, ...] = 0.0
    send: float | tuple[float, ...] = 0.0
    """From worker to worker, over the boundary between two segments either way: one for all, or one per boundary."""


UNIT = Costs()
"""F = I = W = 1 and the rest free: the time slots of the papers."""


class Span(NamedTuple):
    """An action in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A plan in time."""

    plan: Plan
    makespan: float
    """When the last worker is done."""
    spans: tuple[tuple[Span, ...], ...]
    """By slot number, in the order of the plan."""
    busy: tuple[float, ...]
    """Time that each worker spends in actions, by slot number."""

    @property
    def bubble(self) -> float:
        """The share of all live workers' time until the makespan in which they are idle, from 0 to 1."""
        room = self.makespan * (len(self.spans) - len(self.plan.failed))
        return max(0.0, 1 - sum(self.busy) / room) if room else 0.0


def timing(plan: Plan, costs: Costs = UNIT) -> Timeline:
    """When everything happens if each worker runs its list in order and as early as it can.

    The model: a worker does one thing at a time. F, I and B start when the worker is free and the tensor is there:
    `send` after its producer ended on another worker, at once on the same. Sending keeps nobody busy, and links do not
    share bandwidth. R starts on all holders of a segment together, when the last of them reaches it.
    The plan is taken to be one that `check` accepts; one that can not finish is refused here too.
    """
    price = prices(costs, plan.segments)
    send = sends(costs, plan.segments)
    placement = plan.placement()
    free = [0.0] * len(plan.workers)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in plan.workers]
    for action, workers, needs in walk(plan):
        start = max([free[worker] for worker in workers])
        if needs is not None:
            crossing = 0.0 if placement[needs] == workers[0] else send[min(needs.segment, action.segment)]
            start = max(start, ends[needs] + crossing)
        end = ends[action] = start + price[action.kind][action.segment]
        for worker in workers:
            free[worker] = end
            spans[worker].append(Span(action, start, end))
    busy = tuple(sum(span.end - span.start for span in row) for row in spans)
    return Timeline(plan, max(free), tuple(map(tuple, spans)), busy)


def prices(costs: Costs, segments: int) -> dict[Kind, Sequence[float]]:
    """What each kind of action costs, by segment. A ScheduleError names the field that does not fit."""
    halves = [_per("input", costs.input, segments), _per("weight", costs.weight, segments)]
    return {
        Kind.F: _per("forward", costs.forward, segments),
        Kind.I: halves[0],
        Kind.W: halves[1],
        Kind.B: [i + w for i, w in zip(*halves, strict=True)],
        Kind.R: _per("reduce", costs.reduce, segments),
        Kind.S: _per("step", costs.step, segments),
    }


def sends(costs: Costs, segments: int) -> tuple[float, ...]:
    """What it costs to cross each boundary between two segments."""
    return _per("send", costs.send, segments - 1)


def _per(field: str, cost: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    """One cost for each of `count` segments or boundaries."""
    each = cost if isinstance(cost, tuple) else (cost,) * count
    if len(each) != count:
        raise ScheduleError(f"Costs.{field} has {len(each)} numbers: use {count} for this plan, or one for all")
    for value in each:
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise ScheduleError(f"Costs.{field} is {value!r}: use a number of at least 0")
    return each
