"""`culm.compare_strategies`: what a run on preemptible machines would cost, by strategy."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from culm.errors import PlanError, UsageError
from culm.estimates import plan_inputs
from culm.estimates.schedule_choice import default_schedule, parse_schedule
from culm.market.catalogue import PricedInstance, load_catalogue
from culm.market.market_trace import HOUR, MarketTrace
from culm.market.price_series import PriceSeries, PublishedPrices, price_series, published_prices
from culm.market.trace_generator import PRESETS, MarketModel, generate_trace
from culm.market.trace_limit import limit_nodes
from culm.market.trace_reader import read_trace
from culm.market.trace_window import trace_window
from culm.plan.rent.rental_options import RentalQuery
from culm.sim import compare_strategies as strategy_simulation
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, StrategyOutcome
from culm.sim.planned_workload import planned_workload
from culm.sim.published_workload import PUBLISHED_SPEEDS, published_workload
from culm.sim.workload import Workload, read_workload
from culm.text_format import count_noun

DEFAULT_MODEL, DEFAULT_NODES = "bert-large", 32
DEFAULT_SEEDS = 10
_MEASURED_ON = "p3.2xlarge"
"""The instance type of the published speeds: the default for these models."""


@dataclass(frozen=True)
class WorkloadRequest:
    """What is trained: a plan, or a model on nodes of an instance type."""

    plan: Path | None
    model: str
    instance: str | None
    nodes: int | None
    schedule: str | None
    prices: Path | None
    on: str | None

    def load(self) -> Workload:
        """The plan's workload; or that of a model: its published measurement if there is one and nothing else is
        requested, otherwise the shape that `culm plan` chooses."""
        if self.plan is not None:
            read = read_workload(self.plan, default_schedule())
            if self.nodes is not None and self.nodes != read.nodes:
                raise UsageError(
                    f"--nodes is {self.nodes}, but {self.plan.name} was planned for {count_noun(read.nodes, 'node')}: "
                    f"leave it out, or plan again with --nodes {self.nodes}"
                )
            return read if self.schedule is None else read.with_schedule(self.schedule)
        measured_on = _MEASURED_ON if self.model in PUBLISHED_SPEEDS else None
        if self.nodes is not None and (instance := self.instance or measured_on) is not None:
            return self._planned(instance, self.nodes)
        published = self.instance in (None, _MEASURED_ON)
        if published and (self.model in PUBLISHED_SPEEDS or not _is_known_model(self.model)):
            return published_workload(self.model).with_schedule(self.schedule or default_schedule())
        if self.instance is None:
            raise UsageError(f"{self.model} was not measured, so its speed depends on the instance: give --instance")
        return self._planned(self.instance, DEFAULT_NODES)

    def _planned(self, instance: str, nodes: int) -> Workload:
        """The best row of `culm plan --model --instance --nodes`, whichever strategies are compared."""
        machine = plan_inputs.find_machine(instance, self.prices, self.on)
        offer = plan_inputs.node_offer(machine, spot=True)
        inputs = plan_inputs.load_plan_inputs(
            plan_inputs.ModelSource(None, self.model, None),
            plan_inputs.BatchSizes(None, None, None),
            machine,
            precision=None,
            recompute=False,
            nodes=nodes,
        )
        query = RentalQuery(
            profiles=inputs.profiles,
            global_batch=inputs.batch,
            node_range=(nodes, nodes),
            strategies=plan_inputs.considered_strategies(None),
            schedule=self.schedule or default_schedule(),
        )
        options, used, _ = plan_inputs.find_options_or_recompute(inputs, query, offer)
        return planned_workload(options.table[0], inputs.name, used, offer)


def _is_known_model(name: str) -> bool:
    try:
        plan_inputs.load_model(name)
    except PlanError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class StrategyComparison:
    """Strategies in the same markets."""

    outcomes: dict[str, StrategyOutcome]
    """By name: `goodput`, `cost_per_h`, `value`, `usd_per_million`, `split`, ..."""
    workload: Workload
    market_traces: Sequence[MarketTrace]
    machine: PricedInstance
    """The instance type of a node."""
    price: NodePrice
    cluster_costs: ClusterCosts

    @property
    def best(self) -> StrategyOutcome:
        """The strategy with the lowest cost per sample, of those that do not change training."""
        return self.by_cost()[0]

    def by_cost(self) -> list[StrategyOutcome]:
        """Sorted by cost per sample. Strategies that change training, or make no progress, come last."""
        return sorted(
            self.outcomes.values(), key=lambda o: (o.changes_training, o.usd_per_million.value, -o.goodput.value)
        )


def compare_strategies(
    *,
    plan: str | os.PathLike[str] | None = None,
    model: str = DEFAULT_MODEL,
    instance: str | None = None,
    nodes: int | None = None,
    strategies: Sequence[str] = (),
    schedule: str | None = None,
    as_published: bool = False,
    reconfigure: str = "cost",
    trace: str | os.PathLike[str] | None = None,
    market: str | None = None,
    hours: float | None = None,
    seeds: int = DEFAULT_SEEDS,
    prices: str | os.PathLike[str] | None = None,
    on: str | None = None,
    price_history: str | None = None,
    cluster_costs: ClusterCosts | None = None,
    on_market: Callable[[int, int], None] = lambda *_: None,
) -> StrategyComparison:
    """Compare strategies in simulated markets, as `culm simulate` does: goodput, where the time goes and what it costs.

    What is trained: `plan`, a TOML file of `culm plan --out`, or a well-known `model` on `nodes` of an `instance` type,
    in the shape that `culm plan` chooses. `strategies`: names or module:Class; default: all, and published systems.
    `schedule` of all of them; `as_published`: published systems run 1F1B. `reconfigure`: when culm's own strategies
    change their shape (cost, bamboo or never).

    The market: a `trace` file, or `seeds` random ones of `hours` hours as `market` says ("rate=0.10,group=2.1,zones=3",
    p3 or g4dn). Prices: the newest, those of the day `on`, or `prices`, a CSV file; with `price_history` ("builtin" or
    a CSV file) spot prices move. `cluster_costs`: what detection, restarts, network and storage cost. `on_market` is
    called with the number of each market and of all. Raises UsageError and PlanError for a wrong request.
    """
    names = strategy_simulation.parse_strategy_names(",".join(strategies) or "all")
    chosen = parse_schedule(schedule)
    own_prices = None if prices is None else Path(prices)
    workload = WorkloadRequest(
        None if plan is None else Path(plan), model, instance, nodes, chosen, own_prices, on
    ).load()
    machine = find_node_type(workload, instance, on, own_prices)
    price = node_price(machine)
    history = None if price_history is None else read_price_history(price_history, machine.instance)
    traces = find_market_traces(workload, None if trace is None else Path(trace), market, hours, seeds)
    if history is not None:
        price = replace(price, series=spot_prices(history, price, traces[0].zones, traces[0].span_s, 0))
    costs = cluster_costs or ClusterCosts()

    def each_trace() -> Iterator[MarketTrace]:
        for number, one in enumerate(traces):
            on_market(number, len(traces))
            yield one

    outcomes = strategy_simulation.simulate(
        workload,
        each_trace(),
        names,
        cluster_costs=costs,
        price=price,
        reconfigure=reconfigure,
        as_published=as_published,
    )
    return StrategyComparison(
        outcomes=outcomes, workload=workload, market_traces=traces, machine=machine, price=price, cluster_costs=costs
    )


def find_market_traces(
    workload: Workload, path: Path | None, market: str | None, hours: float | None, seeds: int
) -> list[MarketTrace]:
    """The given trace, or one random trace for each seed."""
    if path is not None and market is not None:
        raise UsageError("--trace and --market are both given: use one of them")
    if hours is not None and not 0 < hours < 1e6:
        raise UsageError(f"--hours is {hours:g}: use a number above 0")
    if path is not None:
        read = read_trace(path)
        return [limit_nodes(read.cut_at(hours * HOUR) if hours else read, workload.nodes)]
    preset = PRESETS.get(market or "")
    model = MarketModel.parse(f"nodes={workload.nodes},{market or ''}") if preset is None else preset
    model = replace(model, nodes=workload.nodes, hours=hours or model.hours)
    return [generate_trace(model, seed) for seed in range(seeds)]


class MarketWindows:
    """Markets of a deadline estimate: windows of a trace, or generated ones, over a horizon."""

    def __init__(self, path: Path | None, market: str | None, horizon_s: float, nodes: int) -> None:
        if path is not None and market is not None:
            raise UsageError("--trace and --market are both given: use one of them")
        self._trace = None if path is None else read_trace(path)
        preset = PRESETS.get(market or "")
        model = MarketModel.parse(f"nodes={nodes},{market or ''}") if preset is None else preset
        self._model, self._horizon_s = replace(model, nodes=nodes, hours=horizon_s / HOUR), horizon_s
        self.source = self._trace.source if self._trace is not None else f"generated ({market or 'default'})"
        self.zones = self._trace.zones if self._trace is not None else tuple(f"zone{n + 1}" for n in range(model.zones))

    def market(self, seed: int) -> MarketTrace:
        if self._trace is None:
            return generate_trace(self._model, seed)
        return window_of(self._trace, seed, self._horizon_s)


def spot_prices(
    history: PublishedPrices | None, price: NodePrice, zones: Sequence[str], span_s: float, seed: int
) -> PriceSeries:
    """The spot prices of a run: constant, or from a random published day on."""
    return PriceSeries.constant(price.spot) if history is None else price_series(history, zones, span_s / HOUR, seed)


def read_price_history(name: str, instance: str) -> PublishedPrices:
    """Published spot prices of an instance over time, from a file or from those in the package."""
    if name == "builtin":
        text = (resources.files("culm.market") / "data" / "zones.csv").read_text("utf-8")
        return published_prices(text, "zones.csv", instance)
    try:
        return published_prices(Path(name).read_text("utf-8"), name, instance)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prices {name!r} cannot be read: {error}") from error


def find_node_type(workload: Workload, instance: str | None, on: str | None, prices: Path | None) -> PricedInstance:
    """The instance type of a node, with its prices."""
    name = instance or workload.instance
    if not name:
        raise UsageError("the plan names no instance: give --instance, as in --instance g5.xlarge")
    return load_catalogue(prices).find(name, on)


def node_price(machine: PricedInstance) -> NodePrice:
    """The price of a node. Raises UsageError if one of its prices is not known."""
    return NodePrice(machine.price(spot=True), machine.price(spot=False))


def window_of(trace: MarketTrace, seed: int, span_s: float) -> MarketTrace:
    """The market of a seed in a given trace: it begins at a random time."""
    return trace_window(trace, random.Random(seed).uniform(0.0, trace.span_s), span_s)
