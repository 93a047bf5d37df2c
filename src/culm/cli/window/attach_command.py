"""`culm attach`: show a running job in another window."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.launching.head_launch import find_job_or_show_on_head
from culm.cli.progress_display import make_console, make_display
from culm.cli.run_tables import summary_table
from culm.cli.signal_handling import run_until_signal
from culm.observe.writers.run_folder import to_plain_json
from culm.providers.supervisor.run_window import show_until_end, summary_or_raise

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name or run folder of a job of this machine.")]


def attach(
    job: JobArgument,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only errors and the output of the job.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show a running job as culm run does. Ctrl-C closes the window; the job goes on. The exit code is the job's."""
    with report_errors(debug=debug):
        found = find_job_or_show_on_head(job, "attach", *["--quiet"] * quiet, *["--json"] * json_)
        console = make_console(stderr=json_)
        with closing(make_display(console, quiet=quiet)) as display:
            showing = show_until_end(found, display, display.show_event, display.print_line)
            ended = run_until_signal(showing, lambda _: _left_message(found.entry.name))
        summary = summary_or_raise(ended)
        if not quiet:
            console.print(summary_table(summary, found.entry.out))
        if json_:
            print(json.dumps(to_plain_json(summary)))


def _left_message(name: str) -> str:
    return f"job {name!r} goes on: end it with culm stop {name}, show it again with culm attach {name}"
