"""`culm report`: the results of runs as one self-contained HTML file."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.observe.report.write_report import report_runs
from culm.observe.writers.run_folder import to_plain_json


def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders of runs, or URLs.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Default: report.html in the folder; of several runs: here.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the facts as JSON; no file without --out.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a report of one run, or of several side by side: one HTML file with everything in it."""
    with report_errors(debug=debug):
        found = report_runs(folders, out=out, writes=out is not None or not json_)
        print(json.dumps(to_plain_json(found.to_fields())) if json_ else found.path)
