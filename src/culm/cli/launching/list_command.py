"""`culm list`: the jobs that run on this machine, and its launches: whether they still run, and what they cost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from culm.cli.error_reporting import report_errors
from culm.cli.launching.offer_table import price_words
from culm.cli.progress_display import format_whole_seconds, make_console
from culm.machines.job_list import JobStatus, find_jobs


def list_launches(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """List the jobs that run on this machine, and what was launched from it and may still have machines."""
    with report_errors(debug=debug):
        rows = asyncio.run(find_jobs())
        if json_:
            print(json.dumps([dataclasses.asdict(row) for row in rows]))
        elif not rows:
            print("nothing runs on this machine, and nothing is launched from it")
        else:
            make_console(stderr=False).print(_table(rows))


def _table(rows: list[JobStatus]) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("job", "launch", "on", "head", "machines", "price", "since", ""):
        table.add_column(heading)
    for row in rows:
        pending = f", {row.pending} pending" if row.pending else ""
        machines = f"{row.running} of {row.wanted}{pending}"
        since = format_whole_seconds(row.seconds)
        price = price_words(row.usd_per_h)
        table.add_row(row.job, row.launch, row.on, row.head, machines, price, since, row.problem)
    return table
