"""Plans of a step in which each worker runs two segments: segment s and segment P + s of 2 P on stage s. Pure.

A worker begins after fewer and shorter segments than with one segment of twice the length, so that the bubbles at the
start and the end of a step are half as long. Backwards are split, and weight gradients fill what is left. It costs
twice the sends. The candidates are Megatron's interleaved 1F1B and list schedules under several rules, all within the
memory of each worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, TypeAlias

from culm.plan.replan.fast_timing import FlatDryRun, RunnableOrder
from culm.plan.replan.staggered_period import dry_run_period
from culm.schedule import Action, Costs, Kind, Plan, interleaved
from culm.schedule.plan_timing import action_costs, send_costs

RANGES = 2
"""Segments of a worker."""

MAX_ACTIONS = 24_000
"""Steps in which a pipeline has more actions are not planned with two segments per worker."""

_PLAN_BUDGET = 150_000
"""Budget of scheduled actions over all rules: limits the planning time to about two seconds."""
_ESTIMATE_BUDGET = 15_000
"""The same for an estimate, of which a table needs many."""

_ROUNDING = 1e-9

_EncodedRow: TypeAlias = list[tuple[int, int, int]]
"""(kind, segment, micro-batch) of each action of a worker."""

SegmentPrices: TypeAlias = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]

_F, _I, _W = range(3)


@dataclass(frozen=True, kw_only=True)
class TwoRanges:
    """A model cut into two segments per worker."""

    costs: Costs
    """Of the 2 P segments."""
    activation: tuple[int, ...]
    """By segment: the size of the activations of a micro-batch, in any unit."""
    room: tuple[int, ...]
    """By stage: the most activations that its worker may keep, in the same unit."""

    @property
    def stages(self) -> int:
        return len(self.room)

    def is_possible(self, micro_batches: int) -> bool:
        """Whether every worker has room for a micro-batch of both segments, and the step of so many micro-batches per
        pipeline is small enough to plan."""
        P = self.stages
        pairs = zip(self.activation[:P], self.activation[P:], self.room, strict=True)
        small = 3 * RANGES * P * micro_batches <= MAX_ACTIONS
        return P > 1 and small and all(first + second <= room for first, second, room in pairs)


@dataclass(frozen=True, kw_only=True)
class TwoRangeStep(TwoRanges):
    """The step of one pipeline to plan."""

    micro_batches: int
    """Of the pipeline."""
    staggered: bool = True
    """Whether a worker begins its next step without waiting for the others."""

    @classmethod
    def of(cls, ranges: TwoRanges, micro_batches: int, *, staggered: bool) -> TwoRangeStep:
        """A step of so many micro-batches per pipeline."""
        return cls(
            costs=ranges.costs,
            activation=ranges.activation,
            room=ranges.room,
            micro_batches=micro_batches,
            staggered=staggered,
        )

    @property
    def segments(self) -> int:
        return RANGES * self.stages

    @cached_property
    def prices(self) -> SegmentPrices:
        """Seconds of F, I and W by segment."""
        return segment_prices(self.costs, self.segments)

    @cached_property
    def update_s(self) -> list[float]:
        """Seconds of R and S by stage."""
        price, P = action_costs(self.costs, self.segments), self.stages
        return [sum(price[kind][g] for kind in (Kind.R, Kind.S) for g in (s, P + s)) for s in range(P)]

    def fits(self, plan: Plan) -> bool:
        """Whether no worker of a plan of this step keeps more than it has room for."""
        for row, room in zip(plan.workers, self.room, strict=True):
            live = 0
            for segment, kind, _ in row:
                change = (kind is Kind.F) - (kind in (Kind.W, Kind.B))
                live += change * self.activation[segment]
                if live > room:
                    return False
        return True


def segment_prices(costs: Costs, segments: int) -> SegmentPrices:
    """Seconds of F, I and W by segment."""
    price = action_costs(costs, segments)
    forward, inputs, weight = (tuple(price[kind]) for kind in (Kind.F, Kind.I, Kind.W))
    return forward, inputs, weight


class _Rule(NamedTuple):
    """Which action a free worker runs if several are ready. W always comes last, because no worker waits for it."""

    prefers: Literal["backward", "forward", "turns", "second"]
    """The kind to run first; "turns" alternates; "second": forwards of the second segment, then backwards."""
    lead: tuple[int, float] | None = None
    """(a, b): how many forwards of its first segment a worker may run ahead of their backwards: a (P - s) + b P. None:
    any number."""

    def most_open(self, stages: int, stage: int, micro_batches: int) -> int:
        if self.lead is None:
            return micro_batches
        return max(1, self.lead[0] * (stages - stage) + round(self.lead[1] * stages))


_RULES = (
    _Rule("backward"),
    _Rule("turns", (2, 0.5)),
    _Rule("turns"),
    _Rule("backward", (1, 0.4)),
    _Rule("turns", (1, 0.5)),
    _Rule("backward", (1, 0.9)),
    _Rule("turns", (1, 0.75)),
    _Rule("backward", (2, 0.5)),
    _Rule("second", (2, 0)),
    _Rule("forward", (1, 0.4)),
    _Rule("turns", (2, 0.25)),
    _Rule("backward", (1, 0.5)),
    _Rule("forward", (1, 1)),
    _Rule("turns", (1, 1)),
)
"""Tried in this order until the bound is met. Selected from 76 rules by how often they were best for 4 and 8 stages, 8
to 32 micro-batches, four ratios of F, I and W, and the memory of 1F1B and 1.5 times that."""


@dataclass
class _Schedule:
    """Result of a pass: the rows of all workers, and their dry run."""

    rows: list[_EncodedRow]
    dry_run: FlatDryRun = field(repr=False)

    def step_s(self, step: TwoRangeStep, cutoff: float) -> float:
        return dry_run_period(self.dry_run, cutoff) if step.staggered else self.dry_run.makespan()


def two_range_plans(step: TwoRangeStep) -> Iterator[Plan]:
    """Interleaved 1F1B where it fits, and the best list schedule, for one pipeline. `check_plan` accepts them. None if
    the step is not possible."""
    if not step.is_possible(step.micro_batches):
        return
    simple = _interleaved_order(step.stages, step.micro_batches).plan
    if step.fits(simple):
        yield simple
    yield _to_plan(step, _best_schedule(step, _PLAN_BUDGET).rows)


def two_range_step_s(step: TwoRangeStep) -> float:
    """The shortest step time of `two_range_plans`, infinite if there is none. For a large step, fewer
    rules are tried, and backwards are not merged: a run may be a little faster."""
    if not step.is_possible(step.micro_batches):
        return math.inf
    simple = _interleaved_order(step.stages, step.micro_batches)
    best = _best_schedule(step, _ESTIMATE_BUDGET).step_s(step, math.inf)
    if step.fits(simple.plan):
        best = min(best, _Schedule([], simple.with_costs(step.costs)).step_s(step, best))
    return best


@lru_cache(maxsize=128)
def _interleaved_order(stages: int, micro_batches: int) -> RunnableOrder:
    return RunnableOrder.of_plan(interleaved(pipelines=1, stages=stages, micro_batches=micro_batches, ranges=RANGES))


@lru_cache(maxsize=64)
def _best_schedule(step: TwoRangeStep, budget: int) -> _Schedule:
    """The schedule of the rule with the shortest step, of equals the first. At least two passes are made."""
    forward, inputs, weight = step.prices
    P, least = step.stages, 0.0
    for s in range(P):
        work = sum(forward[g] + inputs[g] + weight[g] for g in (s, P + s))
        least = max(least, step.micro_batches * work + step.update_s[s])
    actions = 3 * step.segments * step.micro_batches
    best: _Schedule | None = None
    best_s = math.inf
    # A short send or overhead makes a greedy worker run something else before the action that the plan needs first:
    # orders that are found without these times are often shorter with them, too.
    variants = dict.fromkeys((replace(step.costs, send=0.0, split=0.0), step.costs, replace(step.costs, send=0.0)))
    passes = [(rule, costs) for rule in _RULES for costs in variants]
    for rule, costs in passes[: max(2, budget // actions)]:
        found = _list_schedule(step, rule, costs)
        seconds = found.step_s(step, best_s)
        if seconds < best_s * (1 - _ROUNDING):
            best, best_s = found, seconds
        if best_s <= least * (1 + _ROUNDING):
            break
    assert best is not None, "a pass always ends"
    return best


def _list_schedule(step: TwoRangeStep, rule: _Rule, costs: Costs) -> _Schedule:  # noqa: PLR0912, PLR0915 (one loop)
    """One pass with these costs; the dry run has those of the step. Cannot deadlock: a worker always leaves room for
    one micro-batch of its second segment, whose forwards and backwards run through all second segments without needing
    room for a first one."""
    P, M, n = step.stages, step.micro_batches, step.segments
    price, send, size = segment_prices(costs, n), send_costs(costs, n), step.activation
    real_price, real_send = step.prices, send_costs(step.costs, n)
    most_open = [rule.most_open(P, s, M) for s in range(P)]
    arrivals: tuple[list[deque[float]], list[deque[float]]] = ([deque() for _ in range(n)], [deque() for _ in range(n)])
    arrivals[_F][0].extend([0.0] * M)
    numbers: list[list[list[int]]] = [[[] for _ in range(n)] for _ in (_F, _I)]
    weights: list[deque[tuple[int, int]]] = [deque() for _ in range(P)]
    busy, live, opened, last = [0.0] * P, [0] * P, [0] * P, [_I] * P
    rows: list[_EncodedRow] = [[] for _ in range(P)]
    dry_run = FlatDryRun(P, [(s,) for s in range(P)], step.update_s)
    events = [(0.0, s) for s in range(P)]
    heapify(events)

    def is_ready(kind: int, segment: int, now: float) -> bool:
        queue = arrivals[kind][segment]
        return bool(queue) and queue[0] <= now

    while events:
        now, s = heappop(events)
        if busy[s] > now:
            continue
        first, second = s, P + s
        forward = -1
        if is_ready(_F, second, now) and live[s] + size[second] <= step.room[s]:
            forward = second
        elif (
            is_ready(_F, first, now)
            and opened[s] < most_open[s]
            and live[s] + size[first] + size[second] <= step.room[s]
        ):
            forward = first
        backward = second if is_ready(_I, second, now) else first if is_ready(_I, first, now) else -1
        if forward >= 0 and backward >= 0:
            prefers_forward = {
                "backward": False,
                "forward": True,
                "turns": last[s] != _F,
                "second": forward == second,
            }[rule.prefers]
            forward, backward = (forward, -1) if prefers_forward else (-1, backward)
        if forward >= 0:
            kind, segment, micro = _F, forward, len(numbers[_F][forward])
        elif backward >= 0:
            kind, segment, micro = _I, backward, len(numbers[_I][backward])
        elif weights[s]:
            kind, (segment, micro) = _W, weights[s].popleft()
        else:
            continue  # an arrival wakes the worker again
        busy[s] = end = now + price[kind][segment]
        heappush(events, (end, s))
        rows[s].append((kind, segment, micro))
        producer, delay = -1, 0.0
        if kind != _W:
            arrivals[kind][segment].popleft()
            numbers[kind][segment].append(len(dry_run.workers))
            last[s] = kind
        if kind == _F:
            live[s] += size[segment]
            opened[s] += segment == first
            if segment:
                producer, delay = numbers[_F][segment - 1][micro], real_send[segment - 1]
            if segment + 1 < n:
                arrivals[_F][segment + 1].append(end + send[segment])
                heappush(events, (end + send[segment], (segment + 1) % P))
            else:
                arrivals[_I][segment].append(end)
        elif kind == _I:
            opened[s] -= segment == first
            weights[s].append((segment, micro))
            if segment + 1 < n:
                producer, delay = numbers[_I][segment + 1][micro], real_send[segment]
            if segment:
                arrivals[_I][segment - 1].append(end + send[segment - 1])
                heappush(events, (end + send[segment - 1], (segment - 1) % P))
        else:
            live[s] -= size[segment]
        dry_run.workers.append(s)
        dry_run.producers.append(producer)
        dry_run.send_delays.append(delay)
        dry_run.durations.append(real_price[kind][segment])
    return _Schedule(rows, dry_run)


def _to_plan(step: TwoRangeStep, rows: list[_EncodedRow]) -> Plan:
    kinds = (Kind.F, Kind.I, Kind.W)
    workers = tuple(tuple(Action(segment, kinds[kind], micro) for kind, segment, micro in row) for row in rows)
    plan = Plan("two-range", 1, step.stages, step.segments, step.micro_batches, workers)
    return replace(plan.with_reduce_and_step(), name="two-range")
