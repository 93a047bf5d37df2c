"""`culm list`: the jobs that run on this machine, and its launches: whether they still run, and what they cost."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from culm.cli.error_reporting import report_errors
from culm.cli.launching.offer_table import price_words
from culm.cli.progress_display import format_whole_seconds, make_console
from culm.errors import CulmError
from culm.machines.head_registry import KEPT_S, HeadLaunch, forget_head_launch, known_head_launches
from culm.machines.launch_registry import FoundLaunch, known_launches
from culm.machines.machine_provider import Machine
from culm.machines.remote_head import list_on_head
from culm.providers.supervisor.run_registry import FoundJob, known_jobs

_TIMEOUT_S = 20.0
"""Limit for an engine to list its machines."""


def list_launches(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """List the jobs that run on this machine, and what was launched from it and may still have machines."""
    with report_errors(debug=debug):
        rows = asyncio.run(_describe_all(known_launches(), known_head_launches()))
        launched = {row["job"] for row in rows}
        rows += [_describe_job(job) for job in known_jobs() if job.running and job.entry.name not in launched]
        if json_:
            print(json.dumps(rows))
        elif not rows:
            print("nothing runs on this machine, and nothing is launched from it")
        else:
            make_console(stderr=False).print(_table(rows))


async def _describe_all(launches: list[FoundLaunch], heads: list[HeadLaunch]) -> list[dict[str, Any]]:
    on_heads = [asyncio.to_thread(_describe_on_head, head) for head in heads]
    rows = await asyncio.gather(*map(_describe, launches), *on_heads)
    return [row for row in rows if row is not None]


def _describe_job(job: FoundJob) -> dict[str, Any]:
    """The row of a job of `culm run` on this machine."""
    entry = job.entry
    machines = {"wanted": 1, "running": 1, "pending": 0, "usd_per_h": 0.0}
    row = {"job": entry.name, "launch": "", "on": "this machine", **machines, "seconds": time.time() - entry.started_at}
    return row | {"supervised": True, "problem": "", "head": ""}


def _describe_on_head(head: HeadLaunch) -> dict[str, Any] | None:
    """The row of a launch whose store and supervisor are on another machine; None: it has ended."""
    try:
        row = list_on_head(head)
    except CulmError as error:
        nothing = dict.fromkeys(("wanted", "running", "pending"), 0)
        seconds = time.time() - head.started_at
        row = {"job": head.job, "launch": head.launch, "on": "", **nothing, "usd_per_h": None, "seconds": seconds}
        row |= {"supervised": None, "problem": str(error)}
    if row is None:
        if time.time() - head.started_at > KEPT_S:
            forget_head_launch(head)
        return None
    return row | {"head": head.head}


async def _describe(launch: FoundLaunch) -> dict[str, Any]:
    record = launch.record
    machines: list[Machine] = []
    problem = "" if launch.is_supervised else f"its supervisor has ended: culm down {record.job}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            machines = await launch.open_provider().machines()
    except (CulmError, TimeoutError) as error:
        problem = f"the machines cannot be listed: {error or 'no answer'}"
    living = [machine for machine in machines if machine.state != "ended"]
    prices = [machine.price_per_h for machine in living]
    return {
        "job": record.job,
        "launch": record.order.launch,
        "on": record.order.provider,
        "wanted": record.machines,
        "running": sum(machine.state == "running" for machine in living),
        "pending": sum(machine.state == "pending" for machine in living),
        "usd_per_h": None if None in prices else sum(price or 0.0 for price in prices),
        "seconds": time.time() - record.started_at,
        "supervised": launch.is_supervised,
        "problem": problem,
        "head": "",
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("job", "launch", "on", "head", "machines", "price", "since", ""):
        table.add_column(heading)
    for row in rows:
        pending = f", {row['pending']} pending" if row["pending"] else ""
        machines = f"{row['running']} of {row['wanted']}{pending}"
        since = format_whole_seconds(row["seconds"])
        price = price_words(row["usd_per_h"])
        table.add_row(row["job"], row["launch"], row["on"], row["head"], machines, price, since, row["problem"])
    return table
