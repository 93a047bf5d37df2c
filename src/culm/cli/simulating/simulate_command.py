"""`culm simulate`: estimate what a run on preemptible machines would cost, before renting any."""

from __future__ import annotations

import difflib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table

from culm.cli import option_values
from culm.cli.error_reporting import print_error, report_errors
from culm.cli.planning import plan_inputs
from culm.cli.planning.price_warnings import print_price_warnings
from culm.cli.planning.schedule_choice import default_schedule, parse_schedule
from culm.cli.progress_display import make_console
from culm.cli.simulating.deadline_output import DeadlineStudy, goal_of, print_study, window_of
from culm.cli.simulating.trace_command import write_file
from culm.errors import PlanError, UsageError
from culm.market.catalogue import PricedInstance, load_catalogue
from culm.market.market_trace import HOUR, MarketTrace
from culm.market.price_series import PriceSeries, PublishedPrices, price_series, published_prices
from culm.market.trace_generator import PRESETS, MarketModel, generate_trace
from culm.market.trace_limit import limit_nodes
from culm.market.trace_reader import read_trace
from culm.market.trace_statistics import mean_node_count
from culm.plan.rent.fleet_decision import FleetLimits
from culm.plan.rent.rental_options import RentalQuery
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, StrategyOutcome, parse_strategy_names
from culm.sim.compare_strategies import simulate as study
from culm.sim.planned_workload import planned_workload
from culm.sim.published_workload import PUBLISHED_SPEEDS, published_workload
from culm.sim.run_charts import chart_outcomes
from culm.sim.simulated_strategy import SimulationContext
from culm.sim.workload import Workload, read_workload
from culm.text_format import count_noun

DEFAULT_MODEL, DEFAULT_NODES = "bert-large", 32


def simulate(
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="The workload: a plan in TOML.")] = None,
    model: Annotated[str, typer.Option(help="A well-known model, if there is no plan.")] = DEFAULT_MODEL,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes (instances) to train on, in the shape that culm plan chooses.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedule of all strategies: planned, 1f1b, zb, gpipe or auto; default: as culm run."),
    ] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Published systems run 1F1B, as in their papers.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="A market trace: when machines exist.")] = None,
    market: Annotated[
        str | None, typer.Option(help="A random market instead of a trace: rate=0.10,group=2.1,zones=3; or p3, g4dn.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Duration; default: that of the trace, or 24.")] = None,
    strategy: Annotated[str, typer.Option(help="A strategy, several separated by commas, or all.")] = "all",
    reconfigure: Annotated[
        str, typer.Option(help="When culm's own strategies change their shape: cost, bamboo or never.")
    ] = "cost",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of random markets; default: 10.")] = None,
    instance: Annotated[str | None, typer.Option(help="Instance type of a node, for its price.")] = None,
    on: Annotated[str | None, typer.Option(metavar="DATE", help="Prices of a day, such as 2022-06-30.")] = None,
    prices: Annotated[Path | None, typer.Option(metavar="CSV", help="Your own prices.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Cost of a disturbance; repeatable.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Show how often this deadline is kept, and at what cost; as 48h or 3d."),
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="USD", help="Show how often this budget is kept, too.")] = None,
    samples: Annotated[
        str | None, typer.Option(help="Work for --deadline, as 20M; default: 2/3 of what fits into it.")
    ] = None,
    price_history: Annotated[
        str | None, typer.Option(metavar="CSV|builtin", help="Spot prices move as published; default: they do not.")
    ] = None,
    picture_: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the first run.")] = None,
    paper: Annotated[str | None, typer.Option(help="Reproduce a published table.")] = None,
    traces: Annotated[Path | None, typer.Option(metavar="DIR", help="Published traces, for --paper.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare strategies in simulation: goodput, where the time goes, and what it costs."""
    with report_errors(debug=debug):
        if paper is not None:
            _print_paper_table(paper, seeds, traces, json_)
            return
        if deadline is None and (budget is not None or samples is not None):
            raise UsageError("--budget and --samples need --deadline TIME: add it, as in --deadline 48h")
        names = parse_strategy_names(strategy if deadline is None or strategy != "all" else "auto")
        request = _WorkloadRequest(plan, model, instance, nodes, parse_schedule(schedule), prices, on)
        workload = request.load()
        cluster_costs = parse_charges(set_ or [])
        machine = _find_machine(workload, instance, on, prices)
        price, priced = _price(machine)
        history = None if price_history is None else _read_price_history(price_history, machine.instance)
        if deadline is not None:
            context = SimulationContext.create(workload, cluster_costs, reconfigure)
            limits = FleetLimits(
                deadline_s=option_values.parse_duration(deadline),
                budget_usd=option_values.parse_usd(budget) if budget is not None else math.inf,
            )
            goal = goal_of(context, limits, option_values.parse_count(samples) if samples is not None else None)
            span = _Span(trace, market, goal.horizon_s, workload.nodes)
            compared = DeadlineStudy(
                context=context,
                strategy=names[0],
                goal=goal,
                markets=seeds or 100,
                market=span.market,
                prices=lambda seed: _prices(history, price, span.zones, goal.horizon_s, seed),
                on_demand_usd_h=price.on_demand,
                source=span.source,
            )
            print_price_warnings(machine, on, spot=True)
            print_study(compared, compared.run(_report_markets(compared.markets)), as_json=json_)
            return
        market_traces = _traces(workload, trace, market, hours, seeds or 10)
        price = replace(
            price,
            series=None
            if history is None
            else _prices(history, price, market_traces[0].zones, market_traces[0].span_s, 0),
        )
        outcomes = study(
            workload,
            _show_progress(market_traces),
            names,
            cluster_costs=cluster_costs,
            price=price,
            reconfigure=reconfigure,
            as_published=as_published,
        )
        warnings = [*print_price_warnings(machine, on, spot=True), *_supply_warnings(workload, market_traces)]
        priced["warnings"] = warnings
        if picture_ is not None:
            write_file(picture_, chart_outcomes(f"{workload.name}: {market_traces[0].source}", outcomes))
        if json_:
            about = {
                "hours": market_traces[0].span_s / HOUR,
                "runs": len(market_traces),
                "trace": market_traces[0].source,
                "price": priced,
            }
            about |= {"reconfigure": reconfigure, "as_published": as_published, **_fleet_json(workload, price)}
            print(json.dumps(_outcomes_json(outcomes, workload, cluster_costs, about)))
        else:
            _print_outcomes(outcomes, workload, market_traces, priced)


_MEASURED_ON = "p3.2xlarge"
"""The instance type of the published speeds: the default for these models."""


@dataclass(frozen=True)
class _WorkloadRequest:
    """The options that say what is trained."""

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


def parse_charges(given: Sequence[str]) -> ClusterCosts:
    """Parse `--set detect_s=1`. Raises UsageError for an unknown name."""
    known_names = [f.name for f in fields(ClusterCosts)]
    costs: dict[str, float] = {}
    for name, value in option_values.parse_assignments(given).items():
        if name not in known_names:
            close = difflib.get_close_matches(name, known_names, n=1)
            raise UsageError(
                f"--set has {name!r}: " + (f"did you mean {close[0]}?" if close else ", ".join(known_names))
            )
        try:
            costs[name] = float(value)
        except ValueError:
            raise UsageError(f"--set {name} is {value!r}: use a number") from None
    return ClusterCosts(**costs)


def _traces(
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


class _Span:
    """Markets of `culm simulate --deadline`: windows of a trace, or generated ones, over a horizon."""

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


def _prices(
    history: PublishedPrices | None, price: NodePrice, zones: Sequence[str], span_s: float, seed: int
) -> PriceSeries:
    """The spot prices of a run: constant, or from a random published day on."""
    return PriceSeries.constant(price.spot) if history is None else price_series(history, zones, span_s / HOUR, seed)


def _read_price_history(name: str, instance: str) -> PublishedPrices:
    """Published spot prices of an instance over time, from a file or from those in the package."""
    if name == "builtin":
        text = (resources.files("culm.market") / "data" / "zones.csv").read_text("utf-8")
        return published_prices(text, "zones.csv", instance)
    try:
        return published_prices(Path(name).read_text("utf-8"), name, instance)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prices {name!r} cannot be read: {error}") from error


def _report_markets(markets: int) -> Callable[[int], None]:
    """Print the progress on stderr every ten seconds."""
    begin, shown = time.monotonic(), [0]

    def report(number: int) -> None:
        tens = int((time.monotonic() - begin) / 10)
        if tens > shown[0]:
            shown[0] = tens
            _progress(f"market {number + 1} of {markets}")

    return report


def _supply_warnings(workload: Workload, traces: Sequence[MarketTrace]) -> list[str]:
    """A sentence, also printed on stderr, if the market has fewer nodes on average than are wanted."""
    mean = fmean(mean_node_count(trace) for trace in traces)
    if mean >= (1 - _FULL_SUPPLY_TOLERANCE) * workload.nodes:
        return []
    most = max(trace.peak for trace in traces)
    sentence = (
        f"the market provides {mean:.1f} of {count_noun(workload.nodes, 'node')} on average, {most} at most: "
        "only those are trained on and paid for"
    )
    print_error(f"warning: {sentence}")
    return [sentence]


_FULL_SUPPLY_TOLERANCE = 0.02
_PROGRESS_AFTER_S = 2.0


def _show_progress(traces: Sequence[MarketTrace]) -> Iterator[MarketTrace]:
    """The traces, with a line on stderr for each that begins more than two seconds after the first."""
    begin = time.monotonic()
    for number, trace in enumerate(traces):
        if time.monotonic() - begin > _PROGRESS_AFTER_S:
            _progress(f"market {number + 1} of {len(traces)}")
        yield trace


def _fleet_json(workload: Workload, price: NodePrice) -> dict[str, Any]:
    """The size and the price of the fleet, under the keys that `culm plan --json` has, too."""
    return {
        "nodes": workload.nodes,
        "workers": workload.workers,
        "cost_per_h": workload.nodes * price.spot,
        "schedule_name": workload.schedule,
        "step_s": workload.failure_free_step_s(),
        "step_s_by_schedule": {name: workload.failure_free_step_s(name) for name in _COMPARED_SCHEDULES},
        "ideal_goodput": workload.ideal_samples_per_s,
    }


_COMPARED_SCHEDULES = ("planned", "zb", "1f1b")


def _find_machine(workload: Workload, instance: str | None, on: str | None, prices: Path | None) -> PricedInstance:
    """The instance type of a node, with its prices."""
    name = instance or workload.instance
    if not name:
        raise UsageError("the plan names no instance: give --instance, as in --instance g5.xlarge")
    return load_catalogue(prices).find(name, on)


def _price(machine: PricedInstance) -> tuple[NodePrice, dict[str, Any]]:
    """The price of a node, and its origin as JSON. Raises UsageError if one of the prices is not known."""
    price = NodePrice(machine.price(spot=True), machine.price(spot=False))
    about = {"instance": machine.instance, "spot": machine.spot_usd_h, "on_demand": machine.on_demand_usd_h}
    return price, {**about, "as_of": str(machine.as_of or "undated"), "source": machine.source}


def _outcomes_json(
    outcomes: dict[str, StrategyOutcome], workload: Workload, cluster_costs: ClusterCosts, about: dict[str, Any]
) -> dict[str, Any]:
    shape = {"pipelines": workload.pipelines, "stages": workload.stages, "micro_batches": workload.micro_batches}
    return {
        "strategies": {name: {**outcome.as_json(), **_shares(outcome, workload)} for name, outcome in outcomes.items()},
        "best": _by_cost(outcomes.values())[0].name,
        "workload": {"name": workload.name, **shape, "samples": workload.samples},
        "charges": asdict(cluster_costs),
        **about,
    }


def _by_cost(outcomes: Iterable[StrategyOutcome]) -> list[StrategyOutcome]:
    """Sort by cost per sample. Strategies that change training, or make no progress, come last."""
    return sorted(outcomes, key=lambda o: (o.changes_training, o.usd_per_million.value, -o.goodput.value))


def _print_outcomes(
    outcomes: dict[str, StrategyOutcome], workload: Workload, market_traces: list[MarketTrace], priced: dict[str, Any]
) -> None:
    names = Column("strategy", min_width=max(map(len, outcomes)))
    table = Table(
        names, "samples/s", "loss-free", "of ideal", "$/h", "value", "$ per million", "training", "lost work",
        "rollbacks", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for outcome in _by_cost(outcomes.values()):
        table.add_row(*_outcome_row(outcome, workload))
    make_console(stderr=False).print(table)
    first, runs = market_traces[0], len(market_traces)
    print(_schedule_line(workload))
    print(
        f"{workload.name}, {workload.pipelines} x {workload.stages} on {count_noun(workload.nodes, 'node')} with "
        f"{count_noun(workload.workers_per_node, 'worker')} each, {first.span_s / HOUR:.1f} h of {_market_words(first)}"
        f"{f' ({runs} seeds)' if runs > 1 else ''}; {priced['instance']} at ${priced['spot']:g}/h spot, "
        f"${priced['on_demand']:g}/h on demand, as of {priced['as_of']} ({priced['source']})"
    )
    margin = "±: 95 % interval of the mean over the seeds; " if runs > 1 else ""
    print(
        f"{margin}loss-free: share of the samples/s without losses; of ideal: without losses, bubbles and messages; "
        "value: samples/s per $/h"
    )
    for outcome in outcomes.values():
        if outcome.changes_training:
            print(f"{outcome.name} leaves samples out, which changes training")


def _market_words(trace: MarketTrace) -> str:
    return "a generated market" if trace.source == "generated" else trace.source


def _schedule_line(workload: Workload) -> str:
    """What the schedule is worth without losses: the strategies differ only in how they respond to losses."""
    speeds = {name: workload.samples / workload.failure_free_step_s(name) for name in _COMPARED_SCHEDULES}
    calm = workload.samples / workload.failure_free_step_s()
    others = ", ".join(
        f"{name} {speed:.4g} ({speed / calm - 1:+.1%})" for name, speed in speeds.items() if name != workload.schedule
    )
    return f"without losses: {calm:.4g} samples/s under the schedule {workload.schedule}; {others}"


def _shares(outcome: StrategyOutcome, workload: Workload) -> dict[str, float]:
    """Goodput as a share of the same schedule without losses, and of the ideal: no bubble, no loss, no message."""
    goodput = outcome.goodput.value
    calm = workload.samples / workload.failure_free_step_s()
    return {"of_calm": goodput / calm, "of_ideal": goodput / workload.ideal_samples_per_s}


def _outcome_row(outcome: StrategyOutcome, workload: Workload) -> tuple[str, ...]:
    shares = _shares(outcome, workload)
    goodput, million, split = outcome.goodput, outcome.usd_per_million, outcome.split
    margin = f" ± {goodput.high - goodput.value:.1f}" if len(outcome.runs) > 1 else ""
    return (
        outcome.name,
        f"{goodput.value:.1f}{margin}",
        f"{shares['of_calm']:.1%}",
        f"{shares['of_ideal']:.1%}",
        f"{outcome.cost_per_h.value:.2f}",
        f"{outcome.value.value:.2f}",
        f"{million.value:.2f}" if million.value < 1e6 else "-",
        f"{split.get('train', 0.0):.1%}",
        f"{split.get('undone', 0.0) + split.get('redo', 0.0):.1%}",
        f"{outcome.mean(lambda run: run.rollbacks):.3g}",
    )


def _print_paper_table(name: str, seeds: int | None, traces: Path | None, json_: bool) -> None:
    from culm.sim import papers

    if name not in papers.PAPERS:
        close = difflib.get_close_matches(name, papers.PAPERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(papers.PAPERS)}"
        raise UsageError(f"there is no --paper {name!r}: {hint}")
    table = papers.PAPERS[name](papers.TableRequest(seeds, traces, _progress))
    print(json.dumps(table.as_json())) if json_ else print(table.to_markdown(), end="")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
