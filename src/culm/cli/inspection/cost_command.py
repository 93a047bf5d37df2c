"""`culm cost`: what the nodes of a run have cost, by node and by kind of node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from culm import run_results
from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import make_console
from culm.cli.run_tables import key_value_table
from culm.market.rental_cost import MINIMUM_S
from culm.observe.writers.run_folder import to_plain_json

if TYPE_CHECKING:
    from culm.market.cost_record import CostRecord

_MANY_NODES = 40
"""From this number of rentals on, the table by node shows only the most expensive ones."""


def cost(
    run: Annotated[str, typer.Argument(metavar="DIR|URL", help="The folder of a run.")],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show what a run has cost: hours and dollars of each node, and what was spent on waiting and repeated work."""
    with report_errors(debug=debug):
        record = run_results.cost(run)
        if json_:
            print(json.dumps(to_plain_json({"cost_usd": 0.0} if record is None else record.as_json())))
        elif record is None:
            print(f"no node of {run} had a price: give it with --price or --instance")
        else:
            _print_record(record)


def _print_record(record: CostRecord) -> None:
    console = make_console(stderr=False)
    figures = record.as_json()
    console.print(_node_table(figures["nodes"]))
    console.print(_kind_table(figures["kinds"]))
    console.print(key_value_table(_total_rows(record, figures)))


def _node_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "node", "instance", "market", "zone", "from", "time", "$/h", "$", "waiting $", "recovery $",
        box=box.SIMPLE, pad_edge=False,
    )  # fmt: skip
    shown = sorted(rows, key=lambda row: -row["usd"])[:_MANY_NODES] if len(rows) > _MANY_NODES else rows
    for row in shown:
        prices = [change["usd_per_h"] for change in row["usd_per_h"]]
        table.add_row(
            row["node"] + (" (before the resume)" if row["before_resume"] else ""),
            row["instance"] or "-",
            row["market"],
            row["zone"] or "-",
            "-" if row["before_resume"] else _time(max(0.0, row["from_h"])),
            _time(row["hours"]) + ("" if row["to_h"] is not None else " so far"),
            f"{prices[-1]:g}" if len(prices) == 1 else f"{min(prices):g}-{max(prices):g}",
            _usd(row["usd"]),
            _usd(row["waiting_usd"]),
            _usd(row["recovery_usd"]),
        )
    if len(shown) < len(rows):
        table.add_row(f"... and {len(rows) - len(shown)} cheaper ones")
    return table


def _kind_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("instance", "market", "zone", "nodes", "time", "mean $/h", "$", box=box.SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(
            row["instance"] or "-",
            row["market"],
            row["zone"] or "-",
            str(row["nodes"]),
            _time(row["hours"]),
            f"{row['mean_usd_h']:.4g}",
            _usd(row["usd"]),
        )
    return table


def _total_rows(record: CostRecord, figures: dict[str, Any]) -> dict[str, str]:
    usd, on_demand, million = figures["cost_usd"], figures["cost_on_demand_usd"], figures["usd_per_million"]
    share = {name: f"{figures[name] / usd:.1%}" if usd else "0 %" for name in _LOST}
    rows = {
        "total": _usd(usd) + (f", {_usd(figures['earlier_usd'])} of it before the resume" if record.earlier else ""),
        **{
            label: f"{_usd(figures[name])} ({share[name]})"
            for name, label in _LOST.items()
            if name != "redone_usd" or figures[name]
        },
        "same steps on demand": "not known"
        if on_demand is None
        else f"{_usd(on_demand)}: this run cost {usd / on_demand - 1:+.0%}",
        "per million samples": "not known" if million is None else _usd(million),
        "billing": f"by the second, at least {MINIMUM_S:g} s for each node",
    }
    if not record.ended:
        rows["now"] = f"{figures['usd_per_h']:.4g} $/h"
    return rows


_LOST = {"waiting_usd": "waiting", "recovery_usd": "recoveries", "redone_usd": "repeated steps"}


def _time(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 0.1 else f"{hours * 3600:.0f} s"


def _usd(value: float) -> str:
    """Dollars with cents, or with four digits below a dollar."""
    return f"${value:,.2f}" if abs(value) >= 1 or not value else f"${value:.4f}"
