"""A dry run of a step as flat lists: quick to time again and again, from one beginning or another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.schedule import Costs, Kind
from culm.schedule.timing import prices, sends
from culm.schedule.walk import walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.schedule import Action, Plan

_NEVER = -math.inf


@dataclass
class Turns:
    """What runs when, in an order in which it can: each turn waits for its worker, and for an earlier turn.

    R and S are not among the turns: they follow when the last holder of the stage is done.
    """

    stages: int
    live: Sequence[Sequence[int]]
    """By stage: the workers that run something, as slot numbers."""
    finish: Sequence[float]
    """By stage: what R and S cost."""
    workers: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    """The turn whose output this one takes; -1: none."""
    lags: list[float] = field(default_factory=list)
    """How long that output travels."""
    prices: list[float] = field(default_factory=list)

    def add(self, worker: int, needs: int, lag: float, price: float) -> int:
        """Add a turn at the end; its number."""
        self.workers.append(worker)
        self.needs.append(needs)
        self.lags.append(lag)
        self.prices.append(price)
        return len(self.workers) - 1

    def run(self, free: list[float]) -> list[float]:
        """When each turn ends. `free` says when each worker can begin, and becomes when it is done."""
        ends: list[float] = []
        for worker, needs, lag, price in zip(self.workers, self.needs, self.lags, self.prices, strict=True):
            start = free[worker]
            if needs >= 0:
                there = ends[needs] + lag
                if there > start:  # noqa: PLR1730 (half as long as max, and this is the inner loop)
                    start = there
            free[worker] = end = start + price
            ends.append(end)
        return ends

    def ends(self, begin: Sequence[float]) -> list[float]:
        """By stage: when its R and S are done, if the stages begin at these times."""
        free = self._free(begin)
        self.run(free)
        return [max([free[w] for w in live]) + more for live, more in zip(self.live, self.finish, strict=True)]

    def starts(self, begin: Sequence[float]) -> list[float]:
        """When each turn starts, if the stages begin at these times."""
        return [end - price for end, price in zip(self.run(self._free(begin)), self.prices, strict=True)]

    def makespan(self) -> float:
        """When the last stage is done, if all begin at 0."""
        return max(self.ends([0.0] * self.stages))

    def chains(self, stage: int) -> list[float]:
        """By stage: its end, if `stage` began at 0 and all others long before."""
        return self.ends([0.0 if s == stage else _NEVER for s in range(self.stages)])

    def _free(self, begin: Sequence[float]) -> list[float]:
        size = 1 + max(worker for live in self.live for worker in live)
        free = [0.0] * size
        for stage, live in enumerate(self.live):
            for worker in live:
                free[worker] = begin[stage]
        return free


def turns_of(plan: Plan, costs: Costs) -> tuple[Turns, list[Action]]:
    """The dry run of a plan that `check` accepts, and the action of each turn."""
    price, send = prices(costs, plan.segments), sends(costs, plan.segments)
    finish = [price[Kind.R][s] + price[Kind.S][s] for s in range(plan.stages)]
    made = Turns(plan.stages, [plan.holders_of(s) for s in range(plan.stages)], finish)
    number: dict[Action | None, int] = {None: -1}
    for action, workers, needs in walk(plan):
        if action.micro is not None:
            lag = 0.0 if needs is None else send[min(needs.segment, action.segment)]
            number[action] = made.add(workers[0], number[needs], lag, price[action.kind][action.segment])
    del number[None]
    return made, [action for action in number if action is not None]
