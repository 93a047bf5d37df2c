"""`culm simulate`: estimate what a run on preemptible machines would cost, before renting any."""

from __future__ import annotations

import difflib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table

from culm.cli import option_values
from culm.cli.error_reporting import print_error, report_errors
from culm.cli.planning.price_warnings import print_price_warnings
from culm.cli.progress_display import make_console
from culm.cli.simulating.deadline_output import print_study
from culm.cli.simulating.trace_command import write_file
from culm.errors import UsageError
from culm.estimates.deadline_estimate import make_deadline_study
from culm.estimates.strategy_estimate import DEFAULT_MODEL, DEFAULT_SEEDS, StrategyComparison, compare_strategies
from culm.market.catalogue import PricedInstance
from culm.market.market_trace import HOUR, MarketTrace
from culm.market.trace_statistics import mean_node_count
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, StrategyOutcome, parse_strategy_names
from culm.sim.run_charts import chart_outcomes
from culm.sim.workload import Workload
from culm.text_format import count_noun


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
        workload_options: dict[str, Any] = {
            "plan": plan,
            "model": model,
            "instance": instance,
            "nodes": nodes,
            "schedule": schedule,
            "reconfigure": reconfigure,
            "trace": trace,
            "market": market,
            "prices": prices,
            "on": on,
            "price_history": price_history,
            "cluster_costs": parse_charges(set_ or []),
        }
        if deadline is not None:
            study = make_deadline_study(
                deadline_s=option_values.parse_duration(deadline),
                budget_usd=option_values.parse_usd(budget) if budget is not None else None,
                samples=option_values.parse_count(samples) if samples is not None else None,
                strategy=parse_strategy_names("auto" if strategy == "all" else strategy)[0],
                seeds=seeds or 100,
                **workload_options,
            )
            print_price_warnings(study.machine, on, spot=True)
            print_study(study, study.run(_report_markets(study.markets)), as_json=json_)
            return
        found = compare_strategies(
            strategies=parse_strategy_names(strategy),
            as_published=as_published,
            hours=hours,
            seeds=seeds or DEFAULT_SEEDS,
            on_market=_show_progress(),
            **workload_options,
        )
        priced = _price_json(found.machine)
        priced["warnings"] = [*print_price_warnings(found.machine, on, spot=True), *_supply_warnings(found)]
        first = found.market_traces[0]
        if picture_ is not None:
            write_file(picture_, chart_outcomes(f"{found.workload.name}: {first.source}", found.outcomes))
        if json_:
            about = {"hours": first.span_s / HOUR, "runs": len(found.market_traces), "trace": first.source}
            about |= {"price": priced, "reconfigure": reconfigure, "as_published": as_published}
            print(json.dumps(_outcomes_json(found, about | _fleet_json(found.workload, found.price))))
        else:
            _print_outcomes(found, priced)


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


def _report_markets(markets: int) -> Callable[[int], None]:
    """Print the progress on stderr every ten seconds."""
    begin, shown = time.monotonic(), [0]

    def report(number: int) -> None:
        tens = int((time.monotonic() - begin) / 10)
        if tens > shown[0]:
            shown[0] = tens
            _progress(f"market {number + 1} of {markets}")

    return report


def _supply_warnings(found: StrategyComparison) -> list[str]:
    """A sentence, also printed on stderr, if the market has fewer nodes on average than are wanted."""
    workload, traces = found.workload, found.market_traces
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


def _show_progress() -> Callable[[int, int], None]:
    """Print a line on stderr for each market that begins more than two seconds after the first."""
    begin = time.monotonic()

    def show(number: int, markets: int) -> None:
        if time.monotonic() - begin > _PROGRESS_AFTER_S:
            _progress(f"market {number + 1} of {markets}")

    return show


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


def _price_json(machine: PricedInstance) -> dict[str, Any]:
    about = {"instance": machine.instance, "spot": machine.spot_usd_h, "on_demand": machine.on_demand_usd_h}
    return {**about, "as_of": str(machine.as_of or "undated"), "source": machine.source}


def _outcomes_json(found: StrategyComparison, about: dict[str, Any]) -> dict[str, Any]:
    workload = found.workload
    shape = {"pipelines": workload.pipelines, "stages": workload.stages, "micro_batches": workload.micro_batches}
    return {
        "strategies": {
            name: {**outcome.as_json(), **_shares(outcome, workload)} for name, outcome in found.outcomes.items()
        },
        "best": found.best.name,
        "workload": {"name": workload.name, **shape, "samples": workload.samples},
        "charges": asdict(found.cluster_costs),
        **about,
    }


def _print_outcomes(found: StrategyComparison, priced: dict[str, Any]) -> None:
    outcomes, workload, market_traces = found.outcomes, found.workload, found.market_traces
    names = Column("strategy", min_width=max(map(len, outcomes)))
    table = Table(
        names, "samples/s", "loss-free", "of ideal", "$/h", "value", "$ per million", "training", "lost work",
        "rollbacks", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for outcome in found.by_cost():
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
