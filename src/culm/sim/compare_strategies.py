"""Compare strategies over one market trace or many seeded ones, with confidence intervals."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, TypeAlias

from culm.errors import UsageError
from culm.market.market_trace import HOUR, MarketTrace, NodeEvent
from culm.market.price_series import PriceSeries
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.engine import Engine, StrategyRun
from culm.sim.paper_strategies import ON_DEMAND, PUBLISHED_STRATEGIES
from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext
from culm.sim.workload import Workload
from culm.strategies import registry
from culm.text_format import count_noun

SimulatedStrategyFactory: TypeAlias = Callable[[SimulationContext], SimulatedStrategy]


def simulated_strategies() -> dict[str, SimulatedStrategyFactory]:
    """All strategies that can be simulated, by name: the registered ones, then the published systems."""
    return {**{each.name: each.simulated for each in registry.by_preference()}, **PUBLISHED_STRATEGIES}


def find_simulated_strategy(name: str) -> SimulatedStrategyFactory:
    """The strategy of a name or of "module:Class". Raises UsageError, with the nearest name, if there is none."""
    known = simulated_strategies()
    if name in known:
        return known[name]
    if ":" in name:
        return registry.get(name).simulated
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use all, {', '.join(known)}, or module:Class"
    raise UsageError(f"there is no --strategy {name!r}: {hint}")


@dataclass(frozen=True)
class NodePrice:
    """Dollars per hour of a node, with all its workers."""

    spot: float
    on_demand: float
    series: PriceSeries | None = None
    """Spot prices that move; None: `spot` all the time."""


@dataclass(frozen=True)
class MeanInterval:
    """The mean over runs and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> MeanInterval:
        mean = fmean(values)
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, mean, mean)
        half = student_t_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


def student_t_975(degrees_of_freedom: int) -> float:
    """The 97.5 % point of Student's t (Hill's expansion around the normal; within 1 % from 3 degrees of freedom on)."""
    z = 1.959964
    exact = {1: 12.706, 2: 4.303}
    g1, g2, g3 = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return exact.get(
        degrees_of_freedom, z + g1 / degrees_of_freedom + g2 / degrees_of_freedom**2 + g3 / degrees_of_freedom**3
    )


@dataclass
class StrategyOutcome:
    """The runs of one strategy."""

    name: str
    runs: list[StrategyRun] = field(default_factory=list)
    plan_hits: int = 0
    plan_misses: int = 0

    @property
    def changes_training(self) -> bool:
        """Whether the strategy leaves samples out, so that its result differs."""
        return self.name not in PUBLISHED_STRATEGIES and registry.get(self.name).changes_training

    @property
    def goodput(self) -> MeanInterval:
        """Useful samples per second over all of the time."""
        return MeanInterval.from_values([run.samples / run.seconds for run in self.runs])

    @property
    def cost_per_h(self) -> MeanInterval:
        return MeanInterval.from_values([run.usd / run.seconds * HOUR for run in self.runs])

    @property
    def value(self) -> MeanInterval:
        """Samples per second per dollar per hour."""
        return MeanInterval.from_values([run.samples / run.usd / HOUR if run.usd else 0.0 for run in self.runs])

    @property
    def usd_per_million(self) -> MeanInterval:
        """Infinite where a run got nowhere."""
        return MeanInterval.from_values([run.usd / run.samples * 1e6 if run.samples else math.inf for run in self.runs])

    @property
    def split(self) -> dict[str, float]:
        """Shares of the time, which add up to 1."""
        kinds = dict.fromkeys(kind for run in self.runs for kind in run.seconds_by_kind)
        return {kind: fmean(run.seconds_by_kind.get(kind, 0.0) / run.seconds for run in self.runs) for kind in kinds}

    def mean(self, figure: Callable[[StrategyRun], float]) -> float:
        return fmean(figure(run) for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        million = self.usd_per_million
        return {
            "goodput": self.goodput.value,
            "goodput_ci": [self.goodput.low, self.goodput.high],
            "cost_per_h": self.cost_per_h.value,
            "cost_usd": self.mean(lambda run: run.usd),
            "value": self.value.value,
            "value_ci": [self.value.low, self.value.high],
            "usd_per_million": million.value if math.isfinite(million.value) else None,
            "usd_per_million_ci": [million.low, million.high] if math.isfinite(million.value) else None,
            "split": self.split,
            "preemptions": self.mean(lambda run: run.preemptions),
            "recoveries": self.mean(lambda run: run.recoveries),
            "rollbacks": self.mean(lambda run: run.rollbacks),
            "nodes": self.mean(lambda run: run.node_seconds / run.seconds),
            "decisions": _sum_counts(run.decision_counts for run in self.runs),
            "plans": {"hits": self.plan_hits, "misses": self.plan_misses},
        }


def _sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for count in counts:
        for name, many in count.items():
            found[name] = found.get(name, 0) + many
    return found


def parse_strategy_names(text: str) -> list[str]:
    """The names in `--strategy`: one, several separated by commas, or all. Raises UsageError for an unknown one."""
    if text == "all":
        return list(simulated_strategies())
    names = [name.strip() for name in text.split(",") if name.strip()] or [text]
    for name in names:
        find_simulated_strategy(name)
    return names


def simulate(
    workload: Workload,
    traces: Iterable[MarketTrace],
    names: Sequence[str],
    *,
    cluster_costs: ClusterCosts,
    price: NodePrice,
    reconfigure: str = "cost",
    as_published: bool = False,
) -> dict[str, StrategyOutcome]:
    """Run every strategy over every trace and return the outcomes by name.

    `reconfigure` is the policy by which culm's own strategies change their shape; PlanError is raised for an unknown
    one. All strategies run the schedule of the workload; with `as_published`, published systems run 1F1B instead. Step
    times are computed once and shared: plans that one strategy needed are found by the next.
    """
    context = SimulationContext.create(workload, cluster_costs, reconfigure, as_published=as_published)
    outcomes = {name: StrategyOutcome(name) for name in names}
    for trace in traces:
        _check_trace(trace, workload)
        for name, outcome in outcomes.items():
            hits, misses = context.step_times.hits, context.step_times.misses
            outcome.runs.append(simulate_trace(context, name, trace, price))
            outcome.plan_hits += context.step_times.hits - hits
            outcome.plan_misses += context.step_times.misses - misses
    return outcomes


def simulate_trace(context: SimulationContext, name: str, trace: MarketTrace, price: NodePrice) -> StrategyRun:
    """Run one strategy over one trace."""
    strategy = find_simulated_strategy(name)(context)
    if name == ON_DEMAND:
        trace, usd = steady_trace(context.workload.nodes, trace.span_s), PriceSeries.constant(price.on_demand)
    else:
        usd = price.series or PriceSeries.constant(price.spot)
    w = context.workload
    return Engine(trace, strategy, context.cluster_costs, usd, w.samples, w.workers_per_node).simulate()


def steady_trace(nodes: int, span_s: float) -> MarketTrace:
    """A trace of nodes that are present from the start and are never lost."""
    return MarketTrace(tuple(NodeEvent(0.0, "add", f"node{n + 1}") for n in range(nodes)), span_s, "steady")


def _check_trace(trace: MarketTrace, workload: Workload) -> None:
    if not trace.span_s > 0:
        raise UsageError(f"{trace.source} spans no time: use --hours")
    workers = trace.peak * workload.workers_per_node
    if workers < workload.min_stages:
        raise UsageError(
            f"{trace.source} never has more than {count_noun(trace.peak, 'node')} with "
            f"{count_noun(workers, 'worker')}, and a pipeline of {workload.name} takes {workload.min_stages}: "
            f"use a plan with at most {workers} stages"
        )
