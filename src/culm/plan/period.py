"""How long a step takes when steps follow each other without a common stop: the period of the repeating plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule import UNIT, Costs, Kind
from culm.schedule.timing import prices, sends
from culm.schedule.walk import walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.schedule import Action, Plan

_NEVER = -math.inf


def period(plan: Plan, costs: Costs = UNIT, enough: float = math.inf) -> float:
    """Time per step, in the long run, under the staggered optimizer.

    A stage begins a step when all of its workers have reduced and stepped; it waits for no other stage but for data.
    So the end of a stage is the latest of (begin of stage r + the longest chain of actions from there), over all r.
    The rate at which such a system advances is the largest mean over the cycles of these chains. Equally, it is the
    smallest T such that stages can be shifted in time to let each fit from its first F to its S into T.

    A period of `enough` or more is not worked out: the first number between the two is returned.
    """
    assert plan.segments == plan.stages, "a worker of several segments steps each of them at another time"
    turns = _turns(plan, costs)
    chains: list[list[float]] = []
    for stage in range(plan.stages):
        chains.append(_chains(turns, stage, plan))
        if chains[stage][stage] >= enough:
            return chains[stage][stage]
    return _largest_mean(chains)


def begins(plan: Plan, costs: Costs, within: float) -> tuple[dict[Action, float], list[float]]:
    """When every F, I, W and B starts, and when each stage begins, if each stage takes no longer than `within`.

    That must be no less than the period. If it is infinite, all stages begin at 0, as without the staggered optimizer.
    """
    stages = range(plan.stages)
    turns = _turns(plan, costs)
    begin = [0.0] * plan.stages
    if within < math.inf:
        chains = [_chains(turns, stage, plan) for stage in stages]
        for _ in stages:
            begin = [max(begin[s], *(begin[r] + chains[r][s] - within for r in stages)) for s in stages]
    ends = _run(turns, [begin[worker % plan.stages] for worker in range(len(plan.workers))])
    started = {turn.action: end - turn.price for turn, end in zip(turns, ends, strict=True)}
    return {action: at for action, at in started.items() if action.micro is not None}, begin


class _Turn(NamedTuple):
    """An action of a dry run, with what it waits for as the number of an earlier turn (-1: nothing)."""

    action: Action
    workers: tuple[int, ...]
    needs: int
    crossing: float
    price: float


def _turns(plan: Plan, costs: Costs) -> list[_Turn]:
    price, send = prices(costs, plan.segments), sends(costs, plan.segments)
    number: dict[Action, int] = {}
    turns: list[_Turn] = []
    for action, workers, needs in walk(plan):
        crossing = 0.0 if needs is None else send[min(needs.segment, action.segment)]
        turns.append(
            _Turn(action, workers, -1 if needs is None else number[needs], crossing, price[action.kind][action.segment])
        )
        if action.kind not in (Kind.R, Kind.S):
            number[action] = len(turns) - 1
    return turns


def _chains(turns: Sequence[_Turn], stage: int, plan: Plan) -> list[float]:
    """By stage: its end, if `stage` began at 0 and all others long before."""
    free = [0.0 if worker % plan.stages == stage else _NEVER for worker in range(len(plan.workers))]
    _run(turns, free)
    return [max(free[worker] for worker in plan.holders_of(s)) for s in range(plan.stages)]


def _run(turns: Sequence[_Turn], free: list[float]) -> list[float]:
    """When each turn ends if the workers are free from then on; `free` becomes when they are done."""
    ends: list[float] = []
    for _, workers, needs, crossing, price in turns:
        start = free[workers[0]] if len(workers) == 1 else max([free[worker] for worker in workers])
        if needs >= 0 and ends[needs] + crossing > start:
            start = ends[needs] + crossing
        end = start + price
        ends.append(end)
        for worker in workers:
            free[worker] = end
    return ends


def _largest_mean(weights: Sequence[Sequence[float]]) -> float:
    """The largest mean weight of a cycle in a complete graph (Karp): `weights[r][s]` of the edge from r to s."""
    nodes = range(len(weights))
    longest = [[0.0] * len(weights)]
    for _ in nodes:
        longest.append([max(longest[-1][r] + weights[r][s] for r in nodes) for s in nodes])
    last = longest[-1]
    return max(min((last[s] - longest[k][s]) / (len(weights) - k) for k in nodes) for s in nodes)
