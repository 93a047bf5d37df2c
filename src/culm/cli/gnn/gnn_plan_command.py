"""`culm gnn plan`: time and cost of graph training, before anything is rented."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.table import Table

from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import make_console
from culm.cli.run_tables import key_value_table
from culm.errors import UsageError
from culm.gnn.plan import Forecast, ForecastInputs, GnnPlan, choose_plan, rates_by_name, workload_for_graph
from culm.gnn.plan.dorylus_table import DORYLUS_TABLE, DorylusRow, agrees_with_row, forecast_row
from culm.gnn.plan.epoch_forecast import Mode
from culm.gnn.plan.gnn_prices import prices_for_year
from culm.gnn.plan.training_plan import with_instance_workers

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
    instance: Annotated[str, typer.Option(help="Instance type of graph servers.")] = "c5n.2xlarge",
    servers: Annotated[int | None, typer.Option(help="Graph servers; default: the fewest that hold the graph.")] = None,
    workers: Annotated[str, typer.Option(metavar="N|auto", help="Total elastic workers.")] = "auto",
    launcher: Annotated[str, typer.Option(help="lambda, or ray: vCPUs of further instances.")] = "lambda",
    mode: Annotated[str, typer.Option(help="sync, pipe or async.")] = "async",
    staleness: Annotated[int, typer.Option(help="Staleness of async.")] = 0,
    gpu: Annotated[str | None, typer.Option(help="GPU machine to compare with; default: the best value.")] = None,
    prices: Annotated[str, typer.Option(help="Year of the prices: 2021 (the paper's) or 2026.")] = "2026",
    rates: Annotated[str | None, typer.Option(help="paper or measured; default: those of the year.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Servers at spot prices.")] = False,
    paper: Annotated[str | None, typer.Option(help=f"{PAPER}: the published table with the forecast.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Plan servers, intervals and workers; forecast time and cost of an epoch, and the value against CPUs alone,
    GPUs and sampling."""
    with report_errors(debug=debug):
        if paper is not None:
            _print_paper_table(paper, json_=json_)
            return
        inputs = ForecastInputs(
            shape=workload_for_graph(
                _check_graph_given(graph),
                model=_check_choice("--model", model, ("gcn", "gat")),
                layers=layers,
                hidden=hidden,
                heads=heads,
            ),
            rates=rates_by_name(rates or ("paper" if prices == "2021" else "measured")),
            prices=prices_for_year(prices),
            mode=cast(Mode, _check_choice("--mode", mode, ("sync", "pipe", "async"))),
            staleness=_check_staleness(staleness),
            spot=spot,
        )
        if _check_choice("--launcher", launcher, ("lambda", "ray", "local")) != "lambda":
            inputs = with_instance_workers(inputs, inputs.prices.machine(instance))
        plan = choose_plan(
            inputs, instance=instance, servers=servers, workers=_parse_workers(workers), gpu_instance=gpu
        )
        if json_:
            print(json.dumps(_plan_json(plan)))
        else:
            _print_plan(plan)


def _check_graph_given(graph: str) -> str:
    if not graph:
        raise UsageError("--graph is missing: name one, as in --graph amazon, or ask for --paper " + PAPER)
    return graph


def _check_choice(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"there is no {option} {value!r}: use {', '.join(known)}")
    return value


def _check_staleness(staleness: int) -> int:
    if staleness < 0:
        raise UsageError(f"--staleness is {staleness}: give the passes that an interval may run ahead, 0 or more")
    return staleness


def _parse_workers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--workers is {text!r}: give a number, or auto")
    return int(text)


def _plan_json(plan: GnnPlan) -> dict[str, Any]:
    inputs, work, elastic = plan.inputs, plan.inputs.work, plan.elastic
    return {
        "graph": asdict(inputs.shape),
        "instance": elastic.instance,
        "servers": elastic.servers,
        "intervals": elastic.intervals,
        "workers": elastic.workers,
        "time_per_epoch_s": elastic.epoch_s,
        "cost_per_epoch_usd": elastic.epoch_usd,
        "value": elastic.value,
        "value_against": {name: plan.value_gain(name) for name in plan.systems if name != elastic.system},
        "best": plan.best.system,
        "why": list(plan.reasons),
        "systems": {name: _forecast_json(forecast) for name, forecast in plan.systems.items()},
        "work": asdict(work) | {"ratio": work.ratio},
        "prices": {"as_of": inputs.prices.as_of, "source": inputs.prices.source, "spot": inputs.spot},
        "rates": _without_infinity(asdict(inputs.rates)),
        "mode": inputs.mode,
        "staleness": inputs.staleness,
    }


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    return {
        "instance": forecast.instance,
        "servers": forecast.servers,
        "workers": forecast.workers,
        "time_per_epoch_s": forecast.epoch_s,
        "cost_per_epoch_usd": forecast.epoch_usd,
        "epochs": forecast.epochs,
        "value": forecast.value,
        "split_s": forecast.split,
    }


def _without_infinity(tree: Any) -> Any:
    """Replace infinite rates by None: JSON has no infinity."""
    if isinstance(tree, dict):
        return {name: _without_infinity(value) for name, value in tree.items()}
    return None if tree == float("inf") else tree


def _print_plan(plan: GnnPlan) -> None:
    console, elastic, shape = make_console(stderr=False), plan.elastic, plan.inputs.shape
    rows = {
        "graph": f"{shape.name}: {shape.vertices:,} vertices, {shape.edges:,} edges, widths "
        + " ".join(map(str, shape.widths))
        + f", {shape.model}",
        "servers": f"{elastic.servers} x {elastic.instance}, {elastic.intervals} intervals each",
        "workers": f"{elastic.workers}",
        "training epoch": f"{elastic.epoch_s:.3g} s, ${elastic.epoch_usd:.3g}",
        "prices": f"{plan.inputs.prices.as_of}: {plan.inputs.prices.source}",
        "rates": plan.inputs.rates.source,
    }
    console.print(key_value_table(rows | {f"why {n}": line for n, line in enumerate(plan.reasons, 1)}))
    console.print(_systems_table(plan))


def _systems_table(plan: GnnPlan) -> Table:
    table = Table(box=box.SIMPLE, title="a training epoch, and the value for the progress of one synchronous epoch")
    for name in ("system", "machines", "workers", "s", "$", "epochs", "value of elastic"):
        table.add_column(name, justify="left" if name in ("system", "machines") else "right")
    for name, forecast in plan.systems.items():
        machines = f"{forecast.servers} x {forecast.instance}"
        cells = [
            f"{forecast.epoch_s:.3g}",
            f"{forecast.epoch_usd:.3g}",
            f"{forecast.epochs:g}",
            f"{plan.value_gain(name):.3g}x",
        ]
        table.add_row(name, machines, str(forecast.workers or ""), *cells)
    return table


def _print_paper_table(name: str, *, json_: bool) -> None:
    _check_choice("--paper", name, (PAPER,))
    rows = [(row, forecast_row(row)) for row in DORYLUS_TABLE]
    if json_:
        print(
            json.dumps(
                {"rows": [_paper_row(*pair) for pair in rows], "agree": all(agrees_with_row(*pair) for pair in rows)}
            )
        )
        return
    table = Table(box=box.SIMPLE, title="value of elastic workers, forecast (published)")
    for column in ("graph", "model", "servers", "against CPUs", "against GPUs", "same direction"):
        table.add_column(column)
    for row, plan in rows:
        gains = [f"{plan.value_gain(s):.2f}x ({row.value_gain(s):.2f}x)" for s in ("cpu", "gpu")]
        verdict = "yes" if agrees_with_row(row, plan) else "NO"
        table.add_row(row.graph, row.model, f"{row.servers} x {row.instance}", *gains, verdict)
    make_console(stderr=False).print(table)


def _paper_row(row: DorylusRow, plan: GnnPlan) -> dict[str, Any]:
    return {
        "graph": row.graph,
        "model": row.model,
        "instance": row.instance,
        "servers": row.servers,
        "value_against": {system: plan.value_gain(system) for system in ("cpu", "gpu", "sampling")},
        "systems": {name: _forecast_json(forecast) for name, forecast in plan.systems.items()},
        "paper": {
            "value_against": {system: row.value_gain(system) for system in ("cpu", "gpu")},
            **{
                system: dict(zip(("s", "usd"), getattr(row, system), strict=True))
                for system in ("elastic", "cpu", "gpu")
            },
        },
        "agree": agrees_with_row(row, plan),
    }
