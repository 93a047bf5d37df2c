"""`culm`: one file a verb.

    run       train a job on local nodes, or lead one that other machines join
    agent     join a run from another machine
    profile   what each layer costs
    plan      a step in which slots have failed
    schedule  a schedule as a picture
    simulate  what a run would cost
    trace     how machines came and went
    report    what runs came to, as one HTML file
    dash      a run while it goes, in a browser
    export    the weights of a checkpoint as one file
    bench     how fast it is, beside others
    doctor    is this machine fit?
    chaos     random runs that go wrong in random ways
    gnn       graph networks: run, plan

    launch    a run from outside: nursery, page, and what user code prints
    interrupt signals that end a command, and all that it started first
    display   progress on a terminal, in a log, or not at all
    tables    what a run was set up as, and its ledger
    cluster   options of a job that several machines share
    values    options that are more than a number
    failing   errors as one sentence and an exit code

Nothing here imports torch until a verb needs it, so that help and pictures come in a blink.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, cast

import typer

import culm
from culm.cli import (
    agent,
    bench,
    chaos,
    dash,
    doctor,
    export,
    gnn,
    plan,
    profile,
    report,
    run,
    schedule,
    simulate,
    trace,
)
from culm.cli.failing import say

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("agent")(agent.agent)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("schedule")(schedule.schedule)
app.command("simulate")(simulate.simulate)
app.add_typer(trace.app, name="trace")
app.command("report")(report.report)
app.command("dash")(dash.dash)
app.command("export")(export.export)
app.command("bench")(bench.bench)
app.command("chaos")(chaos.chaos)
app.command("doctor")(doctor.doctor)
app.add_typer(gnn.app, name="gnn")

_Refused = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""The error behind every wrong option. Typer brings its class along in different places, depending on its version."""


@app.callback(invoke_without_command=True)
def culm_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Train large models on machines that vanish: a preemption never changes what is learned."""
    if version:
        print(f"culm {culm.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@functools.cache
def command() -> Any:
    """All verbs with their options, which takes as long to put together as a picture to draw: once in a process."""
    return typer.main.get_command(app)


def _refusal(error: Any, arguments: Sequence[str]) -> str:
    """The sentence about a wrong option, with the value that was given: typer leaves it out."""
    sentence: str = error.format_message()
    names = getattr(getattr(error, "param", None), "opts", None) or ()
    given = [b for a, b in pairwise(arguments) if a in names]
    given += [value for name, equals, value in (a.partition("=") for a in arguments) if equals and name in names]
    wrong = isinstance(error, typer.BadParameter) and sentence.startswith("Invalid value") and len(given) == 1
    return f"{sentence} (it is {given[0]!r})" if wrong else sentence


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 128 + n ended by signal n."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that can not draw a character gets another instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = command()(args=arguments, prog_name="culm", standalone_mode=False)
    except _Refused as error:
        say(_refusal(error, sys.argv[1:] if arguments is None else arguments))
        code = 2
    except KeyboardInterrupt:  # before a verb was there to heed it
        say("interrupted")
        code = 130
    sys.exit(code or 0)
