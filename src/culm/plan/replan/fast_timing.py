"""A dry run of a step as flat lists, which can be timed many times quickly, with different start times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.schedule import Costs, Kind
from culm.schedule.dry_run import dry_run
from culm.schedule.plan_timing import action_costs, send_costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.schedule import Action, Plan

_NEVER = -math.inf


@dataclass
class FlatDryRun:
    """Actions in a runnable order: each waits for its worker and for the action that produces its input.

    R and S are not included: they follow when the last holder of the stage has finished.
    """

    stages: int
    live_workers: Sequence[Sequence[int]]
    """By stage: the slot numbers of the workers that run something."""
    update_costs: Sequence[float]
    """By stage: the cost of R and S."""
    workers: list[int] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    """Index of the action whose output this one uses; -1: none."""
    send_delays: list[float] = field(default_factory=list)
    """Time that this output takes to arrive."""
    durations: list[float] = field(default_factory=list)

    def end_times(self, free_at: list[float]) -> list[float]:
        """When each action ends. `free_at` says when each worker can start; it is updated to when it finishes."""
        ends: list[float] = []
        for worker, needs, delay, duration in zip(
            self.workers, self.producers, self.send_delays, self.durations, strict=True
        ):
            start = free_at[worker]
            if needs >= 0:
                arrival = ends[needs] + delay
                if arrival > start:  # noqa: PLR1730 (max would double the time of this inner loop)
                    start = arrival
            free_at[worker] = end = start + duration
            ends.append(end)
        return ends

    def stage_end_times(self, stage_begins: Sequence[float]) -> list[float]:
        """By stage: when its R and S are finished if the stages begin at `stage_begins`."""
        free_at = self._initial_free_times(stage_begins)
        self.end_times(free_at)
        return [
            max([free_at[w] for w in live]) + more
            for live, more in zip(self.live_workers, self.update_costs, strict=True)
        ]

    def start_times(self, stage_begins: Sequence[float]) -> list[float]:
        """When each action starts if the stages begin at `stage_begins`."""
        return [
            end - price
            for end, price in zip(self.end_times(self._initial_free_times(stage_begins)), self.durations, strict=True)
        ]

    def makespan(self) -> float:
        """When the last stage finishes if all begin at 0."""
        return max(self.stage_end_times([0.0] * self.stages))

    def longest_chains_from(self, stage: int) -> list[float]:
        """By stage: its end if `stage` begins at 0 and all others long before."""
        return self.stage_end_times([0.0 if s == stage else _NEVER for s in range(self.stages)])

    def _initial_free_times(self, stage_begins: Sequence[float]) -> list[float]:
        size = 1 + max(worker for live in self.live_workers for worker in live)
        free_at = [0.0] * size
        for stage, live in enumerate(self.live_workers):
            for worker in live:
                free_at[worker] = stage_begins[stage]
        return free_at


@dataclass(frozen=True)
class RunnableOrder:
    """The order of a plan's dry run without its costs: plans that differ only in costs share it."""

    plan: Plan
    actions: list[Action]
    workers: list[int]
    producers: list[int]
    boundaries: list[int]
    """The segment boundary over which the input arrives; -1: none."""

    @classmethod
    def of_plan(cls, plan: Plan) -> RunnableOrder:
        """The order of a plan that `check_plan` accepts."""
        order = cls(plan, [], [], [], [])
        number: dict[Action, int] = {}
        placement = plan.placement() if plan.segments > plan.stages or plan.stage_overrides else {}
        for action, workers, needs in dry_run(plan):
            if action.micro is not None:
                number[action] = len(number)
                order.actions.append(action)
                order.workers.append(workers[0])
                order.producers.append(-1 if needs is None else number[needs])
                is_local = needs is None or placement.get(needs) == workers[0]
                order.boundaries.append(-1 if is_local or needs is None else min(needs.segment, action.segment))
        return order

    def with_costs(self, costs: Costs) -> FlatDryRun:
        """The dry run with the times of these costs."""
        plan, P = self.plan, self.plan.stages
        price, send = action_costs(costs, plan.segments), (*send_costs(costs, plan.segments), 0.0)
        return FlatDryRun(
            P,
            [plan.holders_of(s) for s in range(P)],
            [sum(price[Kind.R][g] + price[Kind.S][g] for g in range(s, plan.segments, P)) for s in range(P)],
            self.workers,
            self.producers,
            [send[boundary] for boundary in self.boundaries],
            [price[action.kind][action.segment] for action in self.actions],
        )


def flatten_plan(plan: Plan, costs: Costs) -> tuple[FlatDryRun, list[Action]]:
    """The dry run of a plan that `check_plan` accepts, and the action of each entry."""
    order = RunnableOrder.of_plan(plan)
    return order.with_costs(costs), order.actions
