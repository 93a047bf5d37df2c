"""`culm replay`: feed the recorded events of a run's leaders to new state machines, and compare their instructions."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors


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

        results = input_log.replay_run(folder)
    if json_:
        rows = {
            found.log: {
                "events": found.events,
                "same": found.equal,
                "first_difference": None if found.difference is None else found.difference.number,
            }
            for found in results
        }
        print(json.dumps(rows))
    else:
        for found in results:
            print(found)
    if not all(found.equal for found in results):
        raise typer.Exit(1)
