"""`culm gnn plan`: what training on a graph would take and cost, before anything is rented."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.table import Table

from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.cli.tables import facts
from culm.errors import UsageError
from culm.gnn.plan import Forecast, Plan, Setting, plan, rates_of, shape_of
from culm.gnn.plan.choose import on_instances
from culm.gnn.plan.forecast import Mode
from culm.gnn.plan.paper import TABLE, Published, agrees, replayed
from culm.gnn.price import prices_of

PAPER = "dorylus-table4"


def gnn_plan(
    graph: Annotated[
        str, typer.Option(help="FILE.npz, gen:..., stats:vertices=..,edges=..,features=..,classes=.., or a name.")
    ] = "",
    model: Annotated[str, typer.Option(help="gcn or gat.")] = "gcn",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    hidden: Annotated[
        int | None, typer.Option(help="Width of hidden layers; default: as published, or as `culm gnn run`.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a gat; default: as `culm gnn run`.")] = None,
    instance: Annotated[str, typer.Option(help="Graph servers.")] = "c5n.2xlarge",
    servers: Annotated[int | None, typer.Option(help="How many; default: as few as hold the graph.")] = None,
    workers: Annotated[str, typer.Option(metavar="N|auto", help="Elastic workers altogether.")] = "auto",
    launcher: Annotated[str, typer.Option(help="lambda, or ray: vCPUs of further instances.")] = "lambda",
    mode: Annotated[str, typer.Option(help="sync, pipe or async.")] = "async",
    staleness: Annotated[int, typer.Option(help="Of async.")] = 0,
    gpu: Annotated[str | None, typer.Option(help="GPU machine to compare with; default: the best value.")] = None,
    prices: Annotated[str, typer.Option(help="Year: 2021 (of the paper) or 2026.")] = "2026",
    rates: Annotated[str | None, typer.Option(help="paper or measured; default: those of the year.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Servers at spot prices.")] = False,
    paper: Annotated[str | None, typer.Option(help=f"{PAPER}: the published table beside the forecast.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Servers, intervals, workers, time and cost of an epoch; value against CPUs alone, GPUs and sampling."""
    with failing(debug=debug):
        if paper is not None:
            _show_paper(paper, json_=json_)
            return
        setting = Setting(
            shape=shape_of(
                _named(graph),
                model=_one_of("--model", model, ("gcn", "gat")),
                layers=layers,
                hidden=hidden,
                heads=heads,
            ),
            rates=rates_of(rates or ("paper" if prices == "2021" else "measured")),
            prices=prices_of(prices),
            mode=cast(Mode, _one_of("--mode", mode, ("sync", "pipe", "async"))),
            staleness=_staleness(staleness),
            spot=spot,
        )
        if _one_of("--launcher", launcher, ("lambda", "ray", "local")) != "lambda":
            setting = on_instances(setting, setting.prices.machine(instance))
        made = plan(setting, instance=instance, servers=servers, workers=_workers(workers), gpu_instance=gpu)
        if json_:
            print(json.dumps(_json(made)))
        else:
            _show(made)


def _named(graph: str) -> str:
    if not graph:
        raise UsageError("--graph is missing: name one, as in --graph amazon, or ask for --paper " + PAPER)
    return graph


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise UsageError(f"there is no {option} {given!r}: use {', '.join(known)}")
    return given


def _staleness(given: int) -> int:
    if given < 0:
        raise UsageError(f"--staleness is {given}: give the epochs that an interval may run ahead, 0 or more")
    return given


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--workers is {text!r}: give a number, or auto")
    return int(text)


def _json(made: Plan) -> dict[str, Any]:
    setting, work, found = made.setting, made.setting.work, made.elastic
    return {
        "graph": asdict(setting.shape),
        "instance": found.instance,
        "servers": found.servers,
        "intervals": found.intervals,
        "workers": found.workers,
        "time_per_epoch_s": found.epoch_s,
        "cost_per_epoch_usd": found.epoch_usd,
        "value": found.value,
        "value_against": {name: made.gain(name) for name in made.systems if name != found.system},
        "best": made.best.system,
        "why": list(made.why),
        "systems": {name: _forecast(one) for name, one in made.systems.items()},
        "work": asdict(work) | {"ratio": work.ratio},
        "prices": {"as_of": setting.prices.as_of, "source": setting.prices.source, "spot": setting.spot},
        "rates": _finite(asdict(setting.rates)),
        "mode": setting.mode,
        "staleness": setting.staleness,
    }


def _forecast(one: Forecast) -> dict[str, Any]:
    return {
        "instance": one.instance,
        "servers": one.servers,
        "workers": one.workers,
        "time_per_epoch_s": one.epoch_s,
        "cost_per_epoch_usd": one.epoch_usd,
        "epochs": one.epochs,
        "value": one.value,
        "split_s": one.split,
    }


def _finite(tree: Any) -> Any:
    """JSON knows no infinity: what takes no time has no rate."""
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    return None if tree == float("inf") else tree


def _show(made: Plan) -> None:
    console, found, shape = console_on(stderr=False), made.elastic, made.setting.shape
    rows = {
        "graph": f"{shape.name}: {shape.vertices:,} vertices, {shape.edges:,} edges, widths "
        + " ".join(map(str, shape.widths))
        + f", {shape.model}",
        "servers": f"{found.servers} x {found.instance}, {found.intervals} intervals each",
        "workers": f"{found.workers}",
        "an epoch": f"{found.epoch_s:.3g} s, ${found.epoch_usd:.3g}",
        "prices": f"{made.setting.prices.as_of}: {made.setting.prices.source}",
        "rates": made.setting.rates.source,
    }
    console.print(facts(rows | {f"why {n}": line for n, line in enumerate(made.why, 1)}))
    console.print(_table(made))


def _table(made: Plan) -> Table:
    table = Table(box=box.SIMPLE, title="an epoch, and the value of getting as far as a synchronous one")
    for name in ("system", "machines", "workers", "s", "$", "epochs", "elastic is worth"):
        table.add_column(name, justify="left" if name in ("system", "machines") else "right")
    for name, one in made.systems.items():
        machines = f"{one.servers} x {one.instance}"
        cells = [f"{one.epoch_s:.3g}", f"{one.epoch_usd:.3g}", f"{one.epochs:g}", f"{made.gain(name):.3g}x"]
        table.add_row(name, machines, str(one.workers or ""), *cells)
    return table


def _show_paper(name: str, *, json_: bool) -> None:
    _one_of("--paper", name, (PAPER,))
    rows = [(row, replayed(row)) for row in TABLE]
    if json_:
        print(json.dumps({"rows": [_paper_row(*pair) for pair in rows], "agree": all(agrees(*pair) for pair in rows)}))
        return
    table = Table(box=box.SIMPLE, title="value of elastic workers, forecast (published)")
    for column in ("graph", "model", "servers", "against CPUs", "against GPUs", "same direction"):
        table.add_column(column)
    for row, made in rows:
        gains = [f"{made.gain(s):.2f}x ({row.gain(s):.2f}x)" for s in ("cpu", "gpu")]
        verdict = "yes" if agrees(row, made) else "NO"
        table.add_row(row.graph, row.model, f"{row.servers} x {row.instance}", *gains, verdict)
    console_on(stderr=False).print(table)


def _paper_row(row: Published, made: Plan) -> dict[str, Any]:
    return {
        "graph": row.graph,
        "model": row.model,
        "instance": row.instance,
        "servers": row.servers,
        "value_against": {system: made.gain(system) for system in ("cpu", "gpu", "sampling")},
        "systems": {name: _forecast(one) for name, one in made.systems.items()},
        "paper": {
            "value_against": {system: row.gain(system) for system in ("cpu", "gpu")},
            **{
                system: dict(zip(("s", "usd"), getattr(row, system), strict=True))
                for system in ("elastic", "cpu", "gpu")
            },
        },
        "agree": agrees(row, made),
    }
