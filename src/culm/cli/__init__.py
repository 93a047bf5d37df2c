"""The `culm` command: one module for each subcommand, in packages by what it is for.

    running           run, agent, head, data: train a job
    window            attach, logs, stop: running jobs of this machine
    launching         launch, list, down: runs on machines of a provider; on a head by ssh
    planning          profile, plan, schedule, prices: before a run
    simulating        simulate, trace: runs that do not take place
    inspection        report, dash, cost, replay, verify, export: what a run did
    checks            doctor, bench, chaos, soak: test this machine, and culm on it
    gnn               graph networks: run, plan

    config_options    options made from the fields of `RunConfig`
    etcd_options      options of a job that several machines share
    option_values     options with structured values
    error_reporting   errors as one sentence and an exit code
    signal_handling   signals that end a command and everything it started
    progress_display  progress on a terminal, in a log, or not at all
    run_tables        tables of a run's setup and its ledger

Nothing here imports torch until a subcommand needs it, so that help and pictures appear at once.
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
from culm.cli.checks import bench_command, chaos_command, doctor_command, soak_command
from culm.cli.error_reporting import print_error
from culm.cli.gnn import gnn_command
from culm.cli.inspection import (
    cost_command,
    dash_command,
    export_command,
    replay_command,
    report_command,
    verify_command,
)
from culm.cli.launching import down_command, launch_command, list_command
from culm.cli.planning import plan_command, prices_command, profile_command, schedule_command
from culm.cli.running import agent_command, data_command, head_command, run_command
from culm.cli.simulating import simulate_command, trace_command
from culm.cli.window import attach_command, logs_command, stop_command
from culm.providers.process_title import hide_secret_arguments

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run_command.run)
app.command("attach")(attach_command.attach)
app.command("logs")(logs_command.logs)
app.command("stop")(stop_command.stop)
app.command("launch")(launch_command.launch)
app.command("list")(list_command.list_launches)
app.command("down")(down_command.down)
app.command("agent")(agent_command.agent)
app.add_typer(head_command.app, name="head")
app.command("profile")(profile_command.profile)
app.command("plan")(plan_command.plan)
app.command("schedule")(schedule_command.schedule)
app.command("simulate")(simulate_command.simulate)
app.add_typer(prices_command.app, name="prices")
app.add_typer(trace_command.app, name="trace")
app.add_typer(data_command.app, name="data")
app.command("report")(report_command.report)
app.command("cost")(cost_command.cost)
app.command("replay")(replay_command.replay)
app.command("dash")(dash_command.dash)
app.command("export")(export_command.export)
app.command("verify")(verify_command.verify)
app.command("bench")(bench_command.bench)
app.command("chaos")(chaos_command.chaos)
app.command("soak")(soak_command.soak)
app.command("doctor")(doctor_command.doctor)
app.add_typer(gnn_command.app, name="gnn")

_OptionError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Base class of all option errors. Where Typer defines it depends on its version."""


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train large models on preemptible machines: a preemption never changes what is learned."""
    if version:
        print(f"culm {culm.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@functools.cache
def root_click_command() -> Any:
    """All subcommands with their options. Cached, because building them takes as long as drawing a picture."""
    return typer.main.get_command(app)


def _option_error_sentence(error: Any, arguments: Sequence[str]) -> str:
    """The message for a wrong option, with the given value, which Typer omits."""
    sentence: str = error.format_message()
    names = getattr(getattr(error, "param", None), "opts", None) or ()
    given = [b for a, b in pairwise(arguments) if a in names]
    given += [value for name, equals, value in (a.partition("=") for a in arguments) if equals and name in names]
    wrong = isinstance(error, typer.BadParameter) and sentence.startswith("Invalid value") and len(given) == 1
    return f"{sentence} (it is {given[0]!r})" if wrong else sentence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 128 + n ended by signal n."""
    for stream in (sys.stdout, sys.stderr):  # replace characters that the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    hide_secret_arguments(sys.argv[1:])
    try:
        code = root_click_command()(args=arguments, prog_name="culm", standalone_mode=False)
    except _OptionError as error:
        print_error(_option_error_sentence(error, sys.argv[1:] if arguments is None else arguments))
        code = 2
    except KeyboardInterrupt:  # before a subcommand could handle it
        print_error("interrupted")
        code = 130
    sys.exit(code or 0)
