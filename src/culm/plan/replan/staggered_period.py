"""Step time under the staggered optimizer, where steps overlap: the period of the repeating plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from culm.plan.replan.fast_timing import flatten_plan
from culm.schedule import UNIT_COSTS, Costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.plan.replan.fast_timing import FlatDryRun
    from culm.schedule import Action, Plan


def staggered_period(plan: Plan, costs: Costs = UNIT_COSTS) -> float:
    """Time per step, in the long run, under the staggered optimizer.

    A stage begins a step when all of its workers have run R and S; it waits for other stages only for data. So the end
    of a stage is the maximum over all stages r of (begin of r + the longest chain of actions from there). The step
    time is the largest mean over the cycles of these chains. Equivalently, it is the smallest T such that the stages
    can be shifted in time so that each fits from its first F to its S into T. R and S of all segments of a worker
    follow its last action here.
    """
    return dry_run_period(flatten_plan(plan, costs)[0])


def dry_run_period(dry_run: FlatDryRun, cutoff: float = math.inf) -> float:
    """The period of a dry run. If it is `cutoff` or more, the first lower bound that reaches `cutoff` is returned
    instead."""
    chains: list[list[float]] = []
    for stage in range(dry_run.stages):
        chains.append(dry_run.longest_chains_from(stage))
        if chains[stage][stage] >= cutoff:
            return chains[stage][stage]
    return _max_cycle_mean(chains)


def staggered_start_times(plan: Plan, costs: Costs, max_period: float) -> tuple[dict[Action, float], list[float]]:
    """When every F, I, W and B starts, and when each stage begins, if each stage takes no longer than `max_period`.

    `max_period` must be at least the period. If it is infinite, all stages begin at 0, as without staggering.
    """
    dry_run, actions = flatten_plan(plan, costs)
    begin = [0.0] * plan.stages
    if max_period < math.inf:
        begin = stage_offsets([dry_run.longest_chains_from(stage) for stage in range(plan.stages)], max_period)
    return dict(zip(actions, dry_run.start_times(begin), strict=True)), begin


def stage_offsets(chains: Sequence[Sequence[float]], max_period: float) -> list[float]:
    """When each stage may begin so that each ends within `max_period` of its beginning."""
    stages = range(len(chains))
    begin = [0.0] * len(chains)
    for _ in stages:
        begin = [max(begin[s], *(begin[r] + chains[r][s] - max_period for r in stages)) for s in stages]
    return begin


def _max_cycle_mean(weights: Sequence[Sequence[float]]) -> float:
    """The largest mean weight of a cycle in a complete graph (Karp): `weights[r][s]` of the edge from r to s."""
    nodes = range(len(weights))
    longest = [[0.0] * len(weights)]
    for _ in nodes:
        longest.append([max(longest[-1][r] + weights[r][s] for r in nodes) for s in nodes])
    last = longest[-1]
    return max(min((last[s] - longest[k][s]) / (len(weights) - k) for k in nodes) for s in nodes)
