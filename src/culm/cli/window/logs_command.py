"""`culm logs`: print what a job has shown so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.launching.head_launch import find_job_or_show_on_head
from culm.cli.signal_handling import run_until_signal
from culm.cli.window.attach_command import JobArgument
from culm.errors import UsageError
from culm.providers.supervisor.job_log import event_lines, find_events_file, job_log_lines

if TYPE_CHECKING:
    from culm.providers.supervisor.run_registry import FoundJob


def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Print the events, steps and output of a job so far, a line each with its time. Of a run folder whose run has
    ended: its events."""
    with report_errors(debug=debug):
        try:
            found = find_job_or_show_on_head(job, "logs", *["--follow"] * follow)
        except UsageError:
            if (events := find_events_file(job)) is None:
                raise
            for line in event_lines(events):
                print(line)
            return
        run_until_signal(_print_job(found, follow=follow), lambda _: "the job goes on")


async def _print_job(job: FoundJob, *, follow: bool) -> None:
    async for line in job_log_lines(job, follow=follow):
        print(line, flush=True)
