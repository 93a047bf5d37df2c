"""`culm.estimate_deadline`: how often a deadline and a budget are kept, and at what cost, by policy of renting."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from culm.estimates.schedule_choice import parse_schedule
from culm.estimates.strategy_estimate import (
    DEFAULT_MODEL,
    MarketWindows,
    WorkloadRequest,
    find_node_type,
    node_price,
    read_price_history,
    spot_prices,
)
from culm.market.catalogue import PricedInstance
from culm.market.market_trace import MarketTrace
from culm.market.price_series import PriceSeries
from culm.plan.rent.fleet_decision import FleetLimits
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import find_simulated_strategy
from culm.sim.deadline_run import FLEET_POLICIES, DeadlineGoal, DeadlineOutcome, full_step_s, simulate_deadline
from culm.sim.simulated_strategy import SimulationContext

WORK_SHARE = 2 / 3
"""Without --samples: work as a share of what all nodes train until the deadline without losses."""
GIVE_UP_AFTER = 2.0
"""A run that is late is given up after this many times the deadline."""


@dataclass(frozen=True, kw_only=True)
class DeadlineStudy:
    """What `culm simulate --deadline` compares."""

    context: SimulationContext
    strategy: str
    goal: DeadlineGoal
    markets: int
    market: Callable[[int], MarketTrace]
    """The market of a seed, over the horizon of the goal."""
    prices: Callable[[int], PriceSeries]
    machine: PricedInstance
    """The instance type of a node."""
    source: str

    @property
    def on_demand_usd_h(self) -> float:
        return self.machine.price(spot=False)

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> dict[str, list[DeadlineOutcome]]:
        """The outcomes of every policy, in the same markets."""
        outcomes: dict[str, list[DeadlineOutcome]] = {name: [] for name in FLEET_POLICIES}
        for seed in range(self.markets):
            on_progress(seed)
            market, prices = self.market(seed), self.prices(seed)
            for name, policy in FLEET_POLICIES.items():
                outcomes[name].append(
                    simulate_deadline(
                        self.context, self.strategy, market, prices, self.on_demand_usd_h, self.goal, policy
                    )
                )
        return outcomes


def goal_of(context: SimulationContext, limits: FleetLimits, samples: float | None) -> DeadlineGoal:
    """The goal of a study. Without a number of samples: what takes two thirds of the deadline without losses."""
    w = context.workload
    if samples is None:
        samples = WORK_SHARE * limits.deadline_s / full_step_s(context) * w.samples
    calm_s = samples / w.samples * full_step_s(context)
    horizon_s = GIVE_UP_AFTER * (limits.deadline_s if math.isfinite(limits.deadline_s) else 5 * calm_s)
    return DeadlineGoal(samples=samples, limits=limits, horizon_s=horizon_s)


def make_deadline_study(
    *,
    deadline_s: float,
    budget_usd: float | None = None,
    samples: float | None = None,
    strategy: str = "auto",
    plan: str | os.PathLike[str] | None = None,
    model: str = DEFAULT_MODEL,
    instance: str | None = None,
    nodes: int | None = None,
    schedule: str | None = None,
    reconfigure: str = "cost",
    trace: str | os.PathLike[str] | None = None,
    market: str | None = None,
    seeds: int = 100,
    prices: str | os.PathLike[str] | None = None,
    on: str | None = None,
    price_history: str | None = None,
    cluster_costs: ClusterCosts | None = None,
) -> DeadlineStudy:
    """A study of `estimate_deadline`, not run yet."""
    find_simulated_strategy(strategy)
    own_prices = None if prices is None else Path(prices)
    workload = WorkloadRequest(
        None if plan is None else Path(plan), model, instance, nodes, parse_schedule(schedule), own_prices, on
    ).load()
    machine = find_node_type(workload, instance, on, own_prices)
    price = node_price(machine)
    history = None if price_history is None else read_price_history(price_history, machine.instance)
    context = SimulationContext.create(workload, cluster_costs or ClusterCosts(), reconfigure)
    limits = FleetLimits(deadline_s=deadline_s, budget_usd=math.inf if budget_usd is None else budget_usd)
    goal = goal_of(context, limits, samples)
    windows = MarketWindows(None if trace is None else Path(trace), market, goal.horizon_s, workload.nodes)
    return DeadlineStudy(
        context=context,
        strategy=strategy,
        goal=goal,
        markets=seeds,
        market=windows.market,
        prices=lambda seed: spot_prices(history, price, windows.zones, goal.horizon_s, seed),
        machine=machine,
        source=windows.source,
    )


def estimate_deadline(
    *,
    deadline_s: float,
    budget_usd: float | None = None,
    samples: float | None = None,
    strategy: str = "auto",
    plan: str | os.PathLike[str] | None = None,
    model: str = DEFAULT_MODEL,
    instance: str | None = None,
    nodes: int | None = None,
    schedule: str | None = None,
    reconfigure: str = "cost",
    trace: str | os.PathLike[str] | None = None,
    market: str | None = None,
    seeds: int = 100,
    prices: str | os.PathLike[str] | None = None,
    on: str | None = None,
    price_history: str | None = None,
    cluster_costs: ClusterCosts | None = None,
    on_market: Callable[[int], None] = lambda _: None,
) -> dict[str, list[DeadlineOutcome]]:
    """How often a deadline and a budget are kept, and at what cost, as `culm simulate --deadline` shows: the outcomes
    of each policy of renting, in the same `seeds` markets.

    `deadline_s` seconds and `budget_usd` dollars for `samples` samples; default: two thirds of what fits into the
    deadline without losses. `strategy` is the one of the run; the other arguments are those of
    `culm.compare_strategies`. `on_market` is called with the number of each market. Raises UsageError and PlanError
    for a wrong request.
    """
    study = make_deadline_study(
        deadline_s=deadline_s,
        budget_usd=budget_usd,
        samples=samples,
        strategy=strategy,
        plan=plan,
        model=model,
        instance=instance,
        nodes=nodes,
        schedule=schedule,
        reconfigure=reconfigure,
        trace=trace,
        market=market,
        seeds=seeds,
        prices=prices,
        on=on,
        price_history=price_history,
        cluster_costs=cluster_costs,
    )
    return study.run(on_market)
