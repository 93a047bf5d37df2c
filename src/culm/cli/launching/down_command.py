"""`culm down`: end the run and every machine of a launch."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.errors import UsageError
from culm.machines.launch_end import end_launches
from culm.machines.remote_head import show_on_head


def down(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Name of the job or of the launch.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything that was launched from this machine.")] = False,
    now: Annotated[bool, typer.Option("--now", help="End a run at once, without a checkpoint.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Leave the list, also if the engine does not confirm that nothing is left.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """End a launch: its run, with a checkpoint, and everything that was started for it. May be repeated."""
    with report_errors(debug=debug):
        if (job is None) == (not all_):
            raise UsageError("name a job, or give --all: culm list shows what is launched")
        ending = end_launches(job, at_once=now, forget=forget, on_line=_print_line, run_on_head=show_on_head)
        asyncio.run(ending)


def _print_line(text: str) -> None:
    print(f"culm: {text}", flush=True)
