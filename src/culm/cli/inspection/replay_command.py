"""`culm replay`: feed the recorded events of a run's leaders to new state machines, and compare their instructions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.cluster.leader.output import input_log


def replay(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Repeat the decisions of a run's leaders from their recorded inputs, or show the first difference.

    Exits with 1 if a leader gives other instructions than recorded.
    """
    with report_errors(debug=debug):
        from culm.cluster.leader.output import input_log

        paths = sorted(Path(folder).glob(input_log.FILE_PATTERN))
        if not paths:
            raise UsageError(
                f"{folder} has no {input_log.FILE_PATTERN}: name the local folder of a run (culm run --out)"
            )
        results = {path.name: input_log.replay(path) for path in paths}
    if json_:
        rows = {
            name: {"events": count, "same": found is None, "first_difference": None if found is None else found.number}
            for name, (count, found) in results.items()
        }
        print(json.dumps(rows))
    else:
        for name, (count, found) in results.items():
            print(f"{name}: {count} events, " + ("the same instructions" if found is None else _describe(found)))
    if any(found is not None for _, found in results.values()):
        raise typer.Exit(1)


def _describe(found: input_log.ReplayDifference) -> str:
    event, recorded = type(found.entry.event).__name__, ", ".join(found.entry.names) or "none"
    return (
        f"first difference at event {found.number} ({event} at {found.entry.now:.6f}): recorded {recorded}; "
        f"now {', '.join(found.instructions) or 'none'}\n{found.entry.event}"
    )
