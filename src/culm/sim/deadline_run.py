"""Simulate a run with a budget and a deadline: nodes are rented by the decision function of real runs.

`simulate_deadline` drives the engine through a market. At every change of the fleet, and every few minutes, the fleet
policy is asked how many spot and on-demand nodes there should be: `decide_fleet` of `culm.plan.rent.fleet_decision`,
which `culm launch` calls with the progress of a real run, or one of two simple policies to compare it with.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from culm.market.market_trace import HOUR, MarketTrace, NodeEvent
from culm.market.price_series import PriceMove, PriceSeries
from culm.plan.rent.fleet_decision import (
    FleetDecision,
    FleetHistory,
    FleetLimits,
    FleetProgress,
    NodeOffers,
    budget_stop_reason,
    decide_fleet,
    share_window_s,
)
from culm.sim.compare_strategies import find_simulated_strategy
from culm.sim.engine import Engine
from culm.sim.simulated_strategy import SimulationContext

FleetPolicy: TypeAlias = Callable[[FleetProgress, FleetLimits, NodeOffers], FleetDecision]
DECIDE_EVERY_S = 300.0
"""Time between two decisions without a change of the fleet."""


def spot_only(progress: FleetProgress, limits: FleetLimits, offers: NodeOffers) -> FleetDecision:
    """Spot nodes alone, whatever the deadline is."""
    del offers
    why = budget_stop_reason(progress.cost_usd, progress.cost_if_stopped_usd, limits.budget_usd)
    return FleetDecision(spot=progress.nodes, on_demand=0, stop=why is not None, why=why or "spot nodes alone")


def on_demand_only(progress: FleetProgress, limits: FleetLimits, offers: NodeOffers) -> FleetDecision:
    """On-demand nodes alone, whatever they cost."""
    del offers
    why = budget_stop_reason(progress.cost_usd, progress.cost_if_stopped_usd, limits.budget_usd)
    return FleetDecision(spot=0, on_demand=progress.nodes, stop=why is not None, why=why or "on-demand nodes alone")


FLEET_POLICIES: Mapping[str, FleetPolicy] = {
    "mixed": decide_fleet,
    "spot only": spot_only,
    "on-demand only": on_demand_only,
}


@dataclass(frozen=True, kw_only=True)
class DeadlineGoal:
    """What a run has to train, and the promises about it."""

    samples: float
    limits: FleetLimits
    horizon_s: float
    """When a run that is late is given up."""


class DeadlineOutcome(NamedTuple):
    """How one run ended."""

    seconds: float
    """Seconds until the last sample, or until the run was stopped or given up."""
    usd: float
    samples: float
    kept_deadline: bool
    kept_budget: bool
    """Whether all samples were trained within the budget."""
    on_demand_share: float
    """Share of the node hours that were rented on demand."""
    decisions: int
    """How often the wanted fleet changed."""

    @property
    def kept_both(self) -> bool:
        return self.kept_deadline and self.kept_budget


def simulate_deadline(
    context: SimulationContext,
    strategy: str,
    market: MarketTrace,
    prices: PriceSeries,
    on_demand_usd_h: float,
    goal: DeadlineGoal,
    policy: FleetPolicy = decide_fleet,
) -> DeadlineOutcome:
    """Train the samples of a goal in a market whose spot nodes come and go, with the on-demand nodes of a policy."""
    return _DeadlineRun(context, strategy, market, prices, on_demand_usd_h, goal, policy).run()


class _SpotMarket:
    """The spot nodes that the market has, and which of them are rented: at most as many as are wanted."""

    def __init__(self) -> None:
        self._offered: dict[str, str] = {}
        self.rented: dict[str, str] = {}
        """Zone by node, the longest rented first."""

    def apply(self, events: list[NodeEvent]) -> list[NodeEvent]:
        """Apply changes of the market. Returns those of rented nodes: they are lost."""
        lost = []
        for event in events:
            if event.kind == "add":
                self._offered[event.node] = event.zone
            elif self.rented.pop(event.node, None) is not None:
                lost.append(event)
            else:
                self._offered.pop(event.node, None)
        return lost

    def rent(self, wanted: int, now: float) -> list[NodeEvent]:
        """Rent offered nodes up to a number, or give back the newest ones beyond it."""
        if len(self.rented) > wanted:
            extra = list(self.rented)[wanted:]
            self._offered.update((name, self.rented.pop(name)) for name in reversed(extra))
            return [NodeEvent(now, "remove", name) for name in extra]
        names = list(self._offered)[: wanted - len(self.rented)]
        self.rented.update((name, self._offered.pop(name)) for name in names)
        return [NodeEvent(now, "add", name, self.rented[name]) for name in names]


class _DeadlineRun:
    """One run. Giving a node back is simulated as a loss of it: that costs more than a hand-over."""

    def __init__(
        self,
        context: SimulationContext,
        strategy: str,
        market: MarketTrace,
        prices: PriceSeries,
        on_demand_usd_h: float,
        goal: DeadlineGoal,
        policy: FleetPolicy,
    ) -> None:
        w = context.workload
        empty = MarketTrace((), goal.horizon_s, market.source)
        costs = context.cluster_costs
        self._engine = Engine(
            empty, find_simulated_strategy(strategy)(context), costs, prices, w.samples, w.workers_per_node
        )
        self._market, self._prices, self._on_demand_usd_h = market, prices, on_demand_usd_h
        self._goal, self._policy, self._nodes = goal, policy, w.nodes
        self._step_samples = w.samples
        self._full_step_s = full_step_s(context)
        self._spot = _SpotMarket()
        self._on_demand: list[str] = []
        self._on_demand_s = 0.0
        self._node_count = 0
        self._decisions = 0
        self._wanted = (-1, -1)
        self._stop_s = costs.load_s(w) + costs.stall_s + self._full_step_s
        window_s = share_window_s(goal.limits.deadline_s)
        self._history = FleetHistory(w.nodes, window_s=window_s)

    def run(self) -> DeadlineOutcome:
        engine = self._engine
        for t, moment in groupby(self._timeline(), key=lambda change: change[0]):
            begin, usd_h = engine.now, engine.ledger.usd_h
            if self._advance(min(t, self._goal.horizon_s)):
                return self._finished(begin, usd_h)
            if t >= self._goal.horizon_s:
                break
            changes = [change for _, change in moment]
            engine.apply_prices([change for change in changes if isinstance(change, PriceMove)])
            lost = self._spot.apply([change for change in changes if isinstance(change, NodeEvent)])
            if self._decide(t, lost):
                break
        return self._outcome(engine.now, engine.ledger.usd_if_ended(engine.now), finished=False)

    def _timeline(self) -> Iterator[tuple[float, NodeEvent | PriceMove | None]]:
        """Changes of the market and of prices, and the times of further decisions."""
        ticks = (
            (number * DECIDE_EVERY_S, None) for number in range(1 + math.ceil(self._goal.horizon_s / DECIDE_EVERY_S))
        )
        events = ((event.t, event) for event in self._market.events)
        moves = ((move.t, move) for move in self._prices.moves if move.t > 0)
        return heapq.merge(ticks, events, moves, key=lambda change: change[0])

    def _advance(self, t: float) -> bool:
        """Advance to a time. Returns whether all samples were trained by then."""
        self._on_demand_s += len(self._on_demand) * (t - self._engine.now)
        self._engine.advance_through(t)
        return self._engine.result.samples >= self._goal.samples

    def _decide(self, now: float, lost: list[NodeEvent]) -> bool:
        """Ask the policy, after these losses, and change the fleet. Returns whether the run stops."""
        if lost:
            self._engine.apply_events(lost)
        self._note_fleet(now)
        decision = self._policy(self._progress(now), self._goal.limits, self._offers(now))
        if decision.stop:
            return True
        self._decisions += (decision.spot, decision.on_demand) != self._wanted
        self._wanted = (decision.spot, decision.on_demand)
        changes = self._spot.rent(decision.spot, now)
        extra = self._on_demand[decision.on_demand :]
        del self._on_demand[decision.on_demand :]
        changes += [NodeEvent(now, "remove", name) for name in extra]
        if changes:
            self._engine.apply_events(sorted(changes, key=lambda event: event.kind == "add"))
        new = [self._new_name() for _ in range(decision.on_demand - len(self._on_demand))]
        if new:
            self._on_demand += new
            events = [NodeEvent(now, "add", name, "on-demand") for name in new]
            self._engine.apply_events(events, usd_h=self._on_demand_usd_h)
        self._note_fleet(now)
        return False

    def _new_name(self) -> str:
        self._node_count += 1
        return f"on-demand {self._node_count}"

    def _note_fleet(self, now: float) -> None:
        self._history.update(now, len(self._spot.rented), len(self._on_demand))

    def _progress(self, now: float) -> FleetProgress:
        ledger, samples = self._engine.ledger, self._engine.result.samples
        useful_s = samples / self._step_samples * self._full_step_s
        return FleetProgress(
            elapsed_s=now,
            steps_done=int(samples / self._step_samples),
            steps=math.ceil(self._goal.samples / self._step_samples),
            nodes=self._nodes,
            full_step_s=self._full_step_s,
            spot_shares=self._history.spot_shares(now),
            efficiency=self._history.efficiency(now, useful_s),
            spot_nodes=len(self._spot.rented),
            on_demand_nodes=len(self._on_demand),
            cost_usd=ledger.usd(now),
            cost_if_stopped_usd=ledger.usd(now) + ledger.usd_h * (self._stop_s + DECIDE_EVERY_S) / HOUR,
        )

    def _offers(self, now: float) -> NodeOffers:
        return NodeOffers(spot_usd_h=self._prices.at(now), on_demand_usd_h=self._on_demand_usd_h)

    def _finished(self, begin: float, usd_h: float) -> DeadlineOutcome:
        """The run has trained its samples at some time since `begin`, at `usd_h`: find it."""
        result, now = self._engine.result, self._engine.now
        last = max((p for p in result.points if p.samples <= self._goal.samples), key=lambda p: (p.t, p.samples))
        rate = last.rate or (result.samples - last.samples) / max(now - last.t, 1e-9)
        at = min(now, max(begin, last.t + (self._goal.samples - last.samples) / rate))
        self._on_demand_s -= len(self._on_demand) * (now - at)
        result.node_seconds -= self._engine.alive_count * (now - at)
        usd = self._engine.ledger.usd_if_ended(now) - usd_h * (now - at) / HOUR
        return self._outcome(at, usd, finished=True)

    def _outcome(self, seconds: float, usd: float, *, finished: bool) -> DeadlineOutcome:
        limits = self._goal.limits
        node_s = max(self._engine.result.node_seconds, 1e-9)
        return DeadlineOutcome(
            seconds=seconds,
            usd=usd,
            samples=min(self._engine.result.samples, self._goal.samples),
            kept_deadline=finished and seconds <= limits.deadline_s,
            kept_budget=finished and usd <= limits.budget_usd,
            on_demand_share=min(1.0, self._on_demand_s / node_s),
            decisions=self._decisions,
        )


def full_step_s(context: SimulationContext) -> float:
    """Seconds of a step with all nodes and without a loss, under the schedule of the workload."""
    return context.workload.failure_free_step_s()
