"""`culm verify`: prove a finished run by retraining it between its checkpoints."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing, redirect_stdout
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import make_console, make_display
from culm.errors import UsageError
from culm.verification import verify_run


def verify(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run that has ended.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Retrain from checkpoint A (0: initial weights) to checkpoint B.")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="FILE[:function]", help="The job; default: as recorded in RUN.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Retrain a run between its checkpoints in one process and compare all weights and optimizer states.

    Exit code 0: equal to the last bit; 1: different; 2: the run cannot be verified.
    """
    with report_errors(debug=debug):
        interval = None if steps is None else _parse_steps(steps)
        with (
            closing(make_display(make_console(stderr=True), quiet=False)) as display,
            redirect_stdout(sys.stderr),  # stdout is only for the result
        ):
            found = verify_run.verify(folder, interval, job=job, progress=display.show_progress)
        print(json.dumps(found.to_fields()) if json_ else found)
        if found.difference is not None:
            raise typer.Exit(1)


def _parse_steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"--steps {text!r} is not a range: write the first and the last checkpoint, as in 100:200")
    return int(match[1]), int(match[2])
