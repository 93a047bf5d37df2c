"""Slow node controller: collects how long workers compute, and starts an epoch with less work for slow ones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from culm.plan.replan.slow_nodes import (
    MAX_WAIT_WINDOWS,
    PaceHistory,
    SlowCase,
    SlowDecision,
    UsualPaces,
    decide_slow_nodes,
    slow_factors,
    window_steps,
)
from culm.schedule import UNIT_COSTS, Costs, Kind, Plan
from culm.schedule.plan_timing import action_costs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.cluster.leader.leader_state import LeaderState
    from culm.runtime.epoch import Epoch
    from culm.runtime.messages import StepReport

REPLACE_WITHIN_S = 3600.0
"""How long a slow node may take to hand over to the node that replaces it: it has no deadline of its own."""


class SlowNodeController:
    """Decides every few steps. Off under strategies that do not recover in place: their plans are fixed."""

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self.active: dict[int, float] = {}
        """By worker: the factor that the current plan takes into account."""
        self.reason = ""
        """Why the next epoch has another plan; empty: it has another cause."""
        self._history, self._usual = PaceHistory(), UsualPaces()
        self._epoch = 0
        self._next_check = 0
        self._wait_windows = 1
        """Windows between two changes; doubles with each change, so that a node that is slow at times costs little."""
        self._slots: dict[int, int] = {}
        """By worker of the epoch."""
        self._expected_s: dict[Kind, list[float]] = {}
        self._prices: dict[str, float] = {}
        """The seconds that the profile gives for an action, by segment and kind as in 2F."""

    @functools.cached_property
    def _is_on(self) -> bool:
        """Whether slow nodes are looked for: a shape does not change that."""
        setup = self.state.setup
        return setup.slow_factor > 0 and setup.keeps_action_outputs and setup.strategy_object.recovers_in_place

    @property
    def _window(self) -> int:
        """The number of steps over which paces are taken."""
        return window_steps(self.state.recovery_metrics.usual_step_s)

    def record(self, report: StepReport) -> None:
        """Take note of a step report of the current epoch."""
        epoch = self.state.epoch
        if not self._is_on or epoch is None or report.step < epoch.start or not report.busy_s:
            return
        if epoch.number != self._epoch:
            self._enter_epoch(epoch)
        slot = self._slots.get(report.worker)
        if slot is not None:
            prices = self._prices
            self._history.add(slot, report.busy_s, sum(prices[name] * n for name, n in report.actions.items()))

    def _enter_epoch(self, epoch: Epoch) -> None:
        setup = self.state.setup
        self._epoch = epoch.number
        self._history.clear()
        self._slots = {member.worker: slot for slot, member in enumerate(epoch.members) if member is not None}
        self._next_check = self.state.ledger.next_step + self._wait_windows * self._window
        costs = UNIT_COSTS
        if setup.costs:
            forward, inputs, weight = zip(*setup.costs, strict=True)
            costs = Costs(forward=forward, input=inputs, weight=weight)
        segments = Plan.from_text(epoch.plan).segments
        self._expected_s = {kind: list(prices) for kind, prices in action_costs(costs, segments).items()}
        self._prices = {
            f"{g}{kind}": price for kind, prices in self._expected_s.items() for g, price in enumerate(prices)
        }

    def factors_by_slot(self, slots: Mapping[int, int]) -> dict[int, float]:
        """The factors that the next plan takes into account, given the slots by worker."""
        return {slots[worker]: factor for worker, factor in self.active.items() if worker in slots}

    def forget(self) -> None:
        """The next epoch has a plan that does not take slow nodes into account."""
        self.active, self.reason = {}, ""

    def decide(self) -> SlowDecision | None:
        """After a commit: what to do about slow nodes; None: nothing. Updates `active`."""
        state, epoch = self.state, self.state.epoch
        if not self._is_on or epoch is None or epoch.number != self._epoch or state.ledger.next_step < self._next_check:
            return None
        self._next_check += self._window
        if epoch.leaving_slots or state.end_step is not None:
            return None
        case = self._case(epoch)
        decision = None if case is None else decide_slow_nodes(case)
        if decision is None or decision.verdict == "keep":
            return None
        workers = {slot: worker for worker, slot in self._slots.items()}
        self.active = {workers[slot]: factor for slot, factor in decision.factors.items() if slot in workers}
        if decision.verdict != "report":
            self._wait_windows = min(MAX_WAIT_WINDOWS, 2 * self._wait_windows)
            self.reason = decision.why
        return decision

    def _case(self, epoch: Epoch) -> SlowCase | None:
        state, full = self.state, Plan.from_text(self.state.setup.plan)
        step_s = state.recovery_metrics.usual_step_s
        if full.stage_overrides or step_s is None:
            return None
        current, paces = Plan.from_text(epoch.plan), self._history.medians(self._window)
        nodes = {slot: member.node for slot, member in enumerate(epoch.members) if member is not None}
        active, threshold = self.factors_by_slot(self._slots), state.setup.slow_factor
        runs = {slot: (worker, current.segments_of(slot)) for worker, slot in self._slots.items()}
        factors = {
            **slow_factors(paces, full.stages, threshold, active, nodes),
            **self._usual.slow_factors(
                paces, full.stages, threshold, runs, active, nodes, is_measured=state.setup.profile_is_measured
            ),
        }
        if not factors and not active:
            return None
        runners = {stage: current.holders_of(stage) for stage in range(full.stages)}
        homes = {
            (g, micro): d * full.stages + g % full.stages
            for d, micros in enumerate(full.micros_by_pipeline)
            for g in range(full.segments)
            if d * full.stages + g % full.stages in runners[g % full.stages]
            for micro in micros
        }
        return SlowCase(
            plan=full,
            runners=runners,
            homes=homes,
            factors=factors,
            segment_s=[self._expected_s[Kind.F][g] + self._expected_s[Kind.B][g] for g in range(full.segments)],
            active=active,
            step_s=step_s,
            steps_left=state.setup.steps - state.ledger.next_step,
            standby=bool(state.members.waiting_members(epoch)),
        )
