"""`culm stop`: end a running job with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.launching.head_launch import find_job_or_show_on_head
from culm.cli.signal_handling import run_until_signal
from culm.cli.window.attach_command import JobArgument
from culm.providers.supervisor.run_window import stop_job


def stop(
    job: JobArgument,
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """End a running job at the next step boundary, with a checkpoint if it has a folder, and wait for its end."""
    with report_errors(debug=debug):
        found = find_job_or_show_on_head(job, "stop", *["--now"] * now)
        stopping = stop_job(found, at_once=now, on_line=_print_line)
        ended = run_until_signal(stopping, lambda _: f"job {found.entry.name!r} ends without this command")
        print(ended.stopped or "the job has ended")


def _print_line(text: str) -> None:
    print(text, flush=True)
