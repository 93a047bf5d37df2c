"""How long a step takes when steps follow each other without a common stop: the period of the repeating plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from culm.plan.turns import turns_of
from culm.schedule import UNIT, Costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.plan.turns import Turns
    from culm.schedule import Action, Plan


def period(plan: Plan, costs: Costs = UNIT) -> float:
    """Time per step, in the long run, under the staggered optimizer.

    A stage begins a step when all of its workers have reduced and stepped; it waits for no other stage but for data.
    So the end of a stage is the latest of (begin of stage r + the longest chain of actions from there), over all r.
    The rate at which such a system advances is the largest mean over the cycles of these chains. Equally, it is the
    smallest T such that stages can be shifted in time to let each fit from its first F to its S into T.
    """
    assert plan.segments == plan.stages, "a worker of several segments steps each of them at another time"
    return period_of(turns_of(plan, costs)[0])


def period_of(turns: Turns, enough: float = math.inf) -> float:
    """The period of a dry run. One of `enough` or more is not worked out: the first number between the two is
    returned."""
    chains: list[list[float]] = []
    for stage in range(turns.stages):
        chains.append(turns.chains(stage))
        if chains[stage][stage] >= enough:
            return chains[stage][stage]
    return _largest_mean(chains)


def begins(plan: Plan, costs: Costs, within: float) -> tuple[dict[Action, float], list[float]]:
    """When every F, I, W and B starts, and when each stage begins, if each stage takes no longer than `within`.

    That must be no less than the period. If it is infinite, all stages begin at 0, as without the staggered optimizer.
    """
    turns, actions = turns_of(plan, costs)
    begin = [0.0] * plan.stages
    if within < math.inf:
        begin = shifts([turns.chains(stage) for stage in range(plan.stages)], within)
    return dict(zip(actions, turns.starts(begin), strict=True)), begin


def shifts(chains: Sequence[Sequence[float]], within: float) -> list[float]:
    """When each stage may begin so that each ends `within` after its beginning; no less than the period."""
    stages = range(len(chains))
    begin = [0.0] * len(chains)
    for _ in stages:
        begin = [max(begin[s], *(begin[r] + chains[r][s] - within for r in stages)) for s in stages]
    return begin


def _largest_mean(weights: Sequence[Sequence[float]]) -> float:
    """The largest mean weight of a cycle in a complete graph (Karp): `weights[r][s]` of the edge from r to s."""
    nodes = range(len(weights))
    longest = [[0.0] * len(weights)]
    for _ in nodes:
        longest.append([max(longest[-1][r] + weights[r][s] for r in nodes) for s in nodes])
    last = longest[-1]
    return max(min((last[s] - longest[k][s]) / (len(weights) - k) for k in nodes) for s in nodes)
