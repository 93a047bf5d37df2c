"""How much the time and the cost of a fleet vary: quantiles over simulated markets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from culm.market.market_trace import HOUR
from culm.market.trace_generator import MarketModel, generate_trace
from culm.plan.rent.strategy_goodput import present_share
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, simulate_trace
from culm.sim.planned_workload import planned_workload
from culm.sim.simulated_strategy import SimulationContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.plan.rent.fleet_search import Fleet, FleetGoal
    from culm.sim.engine import StrategyRun

SIMULATED_MARKETS = 20
_MAX_HOURS = 240.0
"""Longer runs are simulated for so long and extrapolated at their mean speed and cost."""


@dataclass(frozen=True)
class FleetSpread:
    """The 10 %, 50 % and 90 % quantiles of simulated runs."""

    hours: tuple[float, float, float]
    usd: tuple[float, float, float]
    runs: int
    kept: float | None = None
    """Share of the markets in which the run keeps the deadline and the cost limit; None: there is no limit."""

    def as_json(self) -> dict[str, object]:
        return {
            "hours": list(self.hours),
            "usd": list(self.usd),
            "quantiles": [0.1, 0.5, 0.9],
            "runs": self.runs,
            "kept": self.kept,
        }


def simulate_spread(fleet: Fleet, goal: FleetGoal, *, markets: int = SIMULATED_MARKETS) -> FleetSpread | None:
    """Simulate the fleet in random markets with its preemption rate until the samples of a goal are trained.

    None on demand, where nothing varies. Runs without progress count as infinitely long.
    """
    if not fleet.source.spot or not fleet.source.risk.preemption_rate:
        return None
    workload = planned_workload(fleet.option, "fleet", fleet.query, fleet.source.offer)
    risk = fleet.source.risk
    context = SimulationContext.create(workload, ClusterCosts())
    hours = min(_MAX_HOURS, 1.5 * fleet.hours + 2.0)
    market = MarketModel(
        nodes=workload.nodes,
        hours=hours,
        rate=risk.preemption_rate,
        group=risk.mean_group_size,
        zones=fleet.option.zones,
        available=max(0.01, present_share(risk.preemption_rate, risk.replace_s)),
    )
    price = NodePrice(fleet.source.offer.usd_per_h, fleet.source.offer.usd_per_h)
    ends = [
        _end_of_run(simulate_trace(context, fleet.option.strategy, generate_trace(market, seed), price), goal.samples)
        for seed in range(markets)
    ]
    limited = math.isfinite(goal.deadline_h) or math.isfinite(goal.max_usd)
    kept = sum(h <= goal.deadline_h and dollars <= goal.max_usd for h, dollars in ends) / len(ends)
    hour_quantiles, usd_quantiles = (_deciles([end[part] for end in ends]) for part in (0, 1))
    return FleetSpread(hour_quantiles, usd_quantiles, markets, kept if limited else None)


def _end_of_run(run: StrategyRun, samples: float) -> tuple[float, float]:
    """Hours and dollars until the samples are trained for good; extrapolated if the run ends before."""
    if run.samples < samples:
        return (
            (run.seconds / HOUR * samples / run.samples, run.usd * samples / run.samples)
            if run.samples
            else (
                math.inf,
                math.inf,
            )
        )
    last = max(
        (point for point in run.points if point.samples <= samples), key=lambda point: point.t, default=run.points[0]
    )
    more_s = (samples - last.samples) / last.rate if last.rate else 0.0
    return (last.t + more_s) / HOUR, last.usd + more_s * run.usd / run.seconds


def _deciles(values: Sequence[float]) -> tuple[float, float, float]:
    if any(map(math.isinf, values)) or len(values) < 2:
        ordered = sorted(values)
        return ordered[0], ordered[len(ordered) // 2], ordered[-1]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[4], cuts[8]
