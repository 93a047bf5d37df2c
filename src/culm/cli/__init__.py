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

A subcommand is imported when it is used, and imports torch when it needs it, so that help and pictures appear at once.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperGroup

import culm
from culm.cli.error_reporting import print_error
from culm.providers.process_title import hide_secret_arguments


class _CommandEntry(NamedTuple):
    """A subcommand that is imported when it is used."""

    module: str
    """Below culm.cli."""
    attribute: str
    """The function of the command, or the Typer app of its own subcommands."""
    summary: str
    """What `culm --help` says: fits on a line of 80 columns."""


_SECTIONS: Mapping[str, Mapping[str, _CommandEntry]] = {
    "Train": {
        "run": _CommandEntry("running.run_command", "run", "Train a job on this machine, or on several machines."),
        "attach": _CommandEntry("window.attach_command", "attach", "Show a running job as culm run does."),
        "logs": _CommandEntry("window.logs_command", "logs", "Print events, steps and output of a job as text."),
        "stop": _CommandEntry("window.stop_command", "stop", "End a running job, with a checkpoint."),
        "data": _CommandEntry("running.data_command", "app", "Prepare data: token files."),
    },
    "Several machines": {
        "launch": _CommandEntry("launching.launch_command", "launch", "Train on machines that culm starts and ends."),
        "list": _CommandEntry("launching.list_command", "list_launches", "List running jobs and launches."),
        "down": _CommandEntry("launching.down_command", "down", "End a launch and everything that it started."),
        "head": _CommandEntry("running.head_command", "app", "Start a store for a run, and print its token."),
        "agent": _CommandEntry("running.agent_command", "agent", "Join a run from this machine."),
    },
    "Before a run": {
        "profile": _CommandEntry("planning.profile_command", "profile", "Measure time and memory of each layer."),
        "plan": _CommandEntry("planning.plan_command", "plan", "Choose what to rent, or plan a step with lost nodes."),
        "schedule": _CommandEntry("planning.schedule_command", "schedule", "Draw a schedule."),
        "prices": _CommandEntry("planning.prices_command", "app", "List and compare prices of instances."),
        "simulate": _CommandEntry("simulating.simulate_command", "simulate", "Compare strategies on a spot market."),
        "trace": _CommandEntry("simulating.trace_command", "app", "Show, convert, generate and fit market traces."),
    },
    "Look at runs": {
        "report": _CommandEntry("inspection.report_command", "report", "Write a report of one or several runs."),
        "dash": _CommandEntry("inspection.dash_command", "dash", "Serve a live page of a run, and its metrics."),
        "cost": _CommandEntry("inspection.cost_command", "cost", "Show what a run has cost, by node."),
        "export": _CommandEntry("inspection.export_command", "export", "Write the weights of a checkpoint to a file."),
        "verify": _CommandEntry("inspection.verify_command", "verify", "Retrain a run and compare every bit."),
        "replay": _CommandEntry("inspection.replay_command", "replay", "Repeat the recorded decisions of the leaders."),
    },
    "Test": {
        "doctor": _CommandEntry("checks.doctor_command", "doctor", "Check this machine with a small run."),
        "bench": _CommandEntry("checks.bench_command", "bench", "Measure culm on this machine."),
        "chaos": _CommandEntry("checks.chaos_command", "chaos", "Inject random faults into simulated clusters."),
        "soak": _CommandEntry("checks.soak_command", "soak", "Inject faults into the processes of real runs."),
    },
    "Graph networks": {
        "gnn": _CommandEntry("gnn.gnn_command", "app", "Train on whole graphs, with elastic workers."),
    },
}
"""The subcommands, by section of `culm --help`."""
_ENTRIES = {name: entry for section in _SECTIONS.values() for name, entry in section.items()}


class _LazyCommands(MutableMapping[str, Any]):
    """Click's commands by name. The module of a command is imported when the command is looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load_command(name, _ENTRIES[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the command {name} cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(_ENTRIES)

    def __len__(self) -> int:
        return len(_ENTRIES)


def _load_command(name: str, entry: _CommandEntry) -> Any:
    target = getattr(importlib.import_module(f"culm.cli.{entry.module}"), entry.attribute)
    parent = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        parent.add_typer(target, name=name)
    else:
        parent.command(name)(target)
    return typer.main.get_group(parent).commands[name]


class _RootGroup(TyperGroup):
    """The `culm` command. Its help is printed without importing a subcommand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _LazyCommands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        width = max(map(len, _ENTRIES))
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), entry.summary) for name, entry in section.items()])


app = typer.Typer(
    cls=_RootGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
    """The `culm` command. Cached, with the subcommands that were used."""
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
