"""`culm simulate`: what a run on machines that come and go would cost, before any is rented."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from culm.cli import values
from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.cli.trace import write
from culm.errors import UsageError
from culm.market.catalogue import catalogue
from culm.market.generate import Market, generate
from culm.market.presets import PRESETS
from culm.market.reading import read_trace
from culm.market.trace import HOUR, Trace
from culm.plan.models import MODELS
from culm.sim.costs import Charges
from culm.sim.known import MEASURED, known
from culm.sim.modelled import modelled
from culm.sim.pictures import picture
from culm.sim.study import Outcome, Price, names_of
from culm.sim.study import simulate as study
from culm.sim.workload import Workload, read_workload

DEFAULT_MODEL, DEFAULT_NODES = "bert-large", 32


def simulate(
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="What is trained: a plan in TOML.")] = None,
    model: Annotated[str, typer.Option(help="A well-known model, where there is no plan.")] = DEFAULT_MODEL,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes for --model, at its least depth.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Machines come and go as in this trace.")] = None,
    market: Annotated[
        str | None, typer.Option(help="... or by chance: rate=0.10,group=2.1,zones=3; or p3, g4dn.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="How long; by default as long as the trace, or 24.")] = None,
    strategy: Annotated[str, typer.Option(help="A name, several with commas, or all.")] = "all",
    reconfigure: Annotated[
        str, typer.Option(help="By which policy culm's own change their shape: cost, bamboo or never.")
    ] = "cost",
    seeds: Annotated[int | None, typer.Option(min=1, help="So many markets; by default 10.")] = None,
    instance: Annotated[str | None, typer.Option(help="What a node is, for its price.")] = None,
    on: Annotated[str | None, typer.Option(metavar="DATE", help="Prices of a day, as in 2022-06-30.")] = None,
    prices: Annotated[Path | None, typer.Option(metavar="CSV", help="Your own prices.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="What a disturbance costs; repeatable.")
    ] = None,
    picture_: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the first run.")] = None,
    paper: Annotated[str | None, typer.Option(help="A published table, ours beside it.")] = None,
    traces: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Published traces, for the papers' tables.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Simulate strategies side by side: goodput, where the time goes, and what it costs."""
    with failing(debug=debug):
        if paper is not None:
            _paper(paper, seeds, traces, json_)
            return
        workload = read_workload(plan) if plan else _model(model, instance, nodes)
        charges = charges_of(set_ or [])
        lived = _traces(workload, trace, market, hours, seeds or 10)
        price, priced = _price(workload, instance, on, prices)
        names = names_of(strategy)
        outcomes = study(workload, lived, names, charges=charges, price=price, reconfigure=reconfigure)
        if picture_ is not None:
            write(picture_, picture(f"{workload.name}: {lived[0].source}", outcomes))
        if json_:
            about = {"hours": lived[0].span_s / HOUR, "runs": len(lived), "trace": lived[0].source, "price": priced}
            print(json.dumps(_json(outcomes, workload, charges, {**about, "reconfigure": reconfigure})))
        else:
            _show(outcomes, workload, lived, priced)


def _model(name: str, instance: str | None, nodes: int | None) -> Workload:
    """As it was measured, if it was and nothing else is asked for; otherwise by its counted FLOP and bytes."""
    if nodes is None and instance in (None, "p3.2xlarge") and (name in MEASURED or name not in MODELS):
        return known(name)
    if instance is None:
        raise UsageError(f"{name} was not measured, so its speed depends on the instance: give --instance")
    return modelled(name, instance, nodes=nodes or DEFAULT_NODES)


def charges_of(given: Sequence[str]) -> Charges:
    """`--set detect_s=1`. Raises UsageError for a name that is not there."""
    known_names = [f.name for f in fields(Charges)]
    found: dict[str, float] = {}
    for name, value in values.assignments(given).items():
        if name not in known_names:
            close = difflib.get_close_matches(name, known_names, n=1)
            raise UsageError(
                f"--set has {name!r}: " + (f"did you mean {close[0]}?" if close else ", ".join(known_names))
            )
        try:
            found[name] = float(value)
        except ValueError:
            raise UsageError(f"--set {name} is {value!r}: use a number") from None
    return Charges(**found)


def _traces(workload: Workload, path: Path | None, market: str | None, hours: float | None, seeds: int) -> list[Trace]:
    """The trace given, or as many as there are seeds."""
    if path is not None and market is not None:
        raise UsageError("--trace and --market are both given: use one of them")
    if hours is not None and not 0 < hours < 1e6:
        raise UsageError(f"--hours is {hours:g}: use a number above 0")
    if path is not None:
        read = read_trace(path)
        return [read.until(hours * HOUR) if hours else read]
    made = PRESETS.get(market or "") or Market.parse(f"nodes={workload.nodes},{market or ''}")
    made = replace(made, hours=hours) if hours else made
    return [generate(made, seed) for seed in range(seeds)]


def _price(
    workload: Workload, instance: str | None, on: str | None, prices: Path | None
) -> tuple[Price, dict[str, Any]]:
    """What a node costs, and where that is from."""
    name = instance or workload.instance
    if not name:
        raise UsageError("the plan names no instance: give --instance, as in --instance g5.xlarge")
    machine = catalogue(prices).find(name, on)
    about = {"instance": machine.instance, "spot": machine.spot_usd_h, "on_demand": machine.on_demand_usd_h}
    return Price(machine.spot_usd_h, machine.on_demand_usd_h), {**about, "as_of": str(machine.as_of or "undated")}


def _json(outcomes: dict[str, Outcome], workload: Workload, charges: Charges, about: dict[str, Any]) -> dict[str, Any]:
    shape = {"pipelines": workload.pipelines, "stages": workload.stages, "micro_batches": workload.micro_batches}
    return {
        "strategies": {name: outcome.as_json() for name, outcome in outcomes.items()},
        "best": _ranked(outcomes.values())[0].name,
        "workload": {"name": workload.name, **shape, "samples": workload.samples},
        "charges": asdict(charges),
        **about,
    }


def _ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The cheapest per sample first. What changes training, or gets nowhere, comes last."""
    return sorted(outcomes, key=lambda o: (o.name == "drop", o.usd_per_million.value, -o.goodput.value))


def _show(outcomes: dict[str, Outcome], workload: Workload, lived: list[Trace], priced: dict[str, Any]) -> None:
    table = Table(
        "strategy", "samples/s", "$/h", "value", "$ per million", "training", "lost work", "rollbacks",
        box=box.SIMPLE, pad_edge=False,
    )  # fmt: skip
    for outcome in _ranked(outcomes.values()):
        table.add_row(*_row(outcome))
    console_on(stderr=False).print(table)
    first = lived[0]
    print(
        f"{workload.name}, {workload.pipelines} x {workload.stages}, {first.span_s / HOUR:.1f} h of {first.source}"
        f"{f' ({len(lived)} seeds)' if len(lived) > 1 else ''}; {priced['instance']} at ${priced['spot']:g}/h spot, "
        f"${priced['on_demand']:g}/h on demand, as of {priced['as_of']}"
    )
    if "drop" in outcomes:
        print("drop loses samples: it changes what is learned")


def _row(outcome: Outcome) -> tuple[str, ...]:
    goodput, million, split = outcome.goodput, outcome.usd_per_million, outcome.split
    sure = f" ± {goodput.high - goodput.value:.1f}" if len(outcome.runs) > 1 else ""
    return (
        outcome.name,
        f"{goodput.value:.1f}{sure}",
        f"{outcome.cost_per_h.value:.2f}",
        f"{outcome.value.value:.2f}",
        f"{million.value:.2f}" if million.value < 1e6 else "-",
        f"{split.get('train', 0.0):.1%}",
        f"{split.get('undone', 0.0) + split.get('redo', 0.0):.1%}",
        f"{outcome.mean(lambda run: run.rollbacks):.3g}",
    )


def _paper(name: str, seeds: int | None, traces: Path | None, json_: bool) -> None:
    from culm.sim import papers

    if name not in papers.PAPERS:
        close = difflib.get_close_matches(name, papers.PAPERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(papers.PAPERS)}"
        raise UsageError(f"there is no --paper {name!r}: {hint}")
    found = papers.PAPERS[name](papers.Request(seeds, traces, _progress))
    print(json.dumps(found.as_json())) if json_ else print(found.text(), end="")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
