"""`culm launch --head HOST`, and windows of jobs that were launched so: the command runs on the head, by ssh."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from culm.cli.running.run_command import detached_words
from culm.errors import RunError, UsageError
from culm.machines.engines.ssh_hosts import parse_hosts
from culm.machines.head_registry import HeadLaunch, find_head_launch, forget_head_launch, note_head_launch
from culm.machines.job_archive import pack_job
from culm.machines.launch_registry import known_launches
from culm.machines.remote_head import check_head, head_command, list_on_head, show_on_head, start_on_head
from culm.providers.supervisor.run_registry import find_job

if TYPE_CHECKING:
    from culm.providers.supervisor.run_registry import FoundJob

_REFUSED = UsageError.exit_code
_STAYS_HERE = frozenset(["head", "head_ssh", "launch_name", "hosts", "yes", "dry_run", "detach", "json_", "quiet"])
"""Options of `culm launch` that the launching machine deals with."""


def open_head(address: str, ssh: str | None, program: Sequence[str], launch: str, job: str) -> HeadLaunch:
    """A launch on this head, which is not started yet. Raises UsageError if the head cannot be used."""
    head = HeadLaunch(
        launch=launch,
        job=job,
        head=address,
        ssh=head_command(address, ssh),
        program=tuple(program),
        started_at=time.time(),
    )
    check_head(head)
    return head


def arguments_for_head(context: typer.Context, hosts: str | None) -> list[str]:
    """The options of this command line as the head gets them. A file with hosts is read here."""
    words = [] if hosts is None else [f"--hosts={_spelled_out(hosts)}"]
    return words + given_options(context, _STAYS_HERE)


def given_options(context: typer.Context, left_out: Collection[str]) -> list[str]:
    """The options that were given on the command line, as arguments, without those of these parameters."""
    words = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if parameter.param_type_name != "option" or name in left_out or source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[name]
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, bool):
                words.append((parameter.opts if each else parameter.secondary_opts)[0])
            else:
                words.append(f"{parameter.opts[0]}={each}")
    return words


def print_dry_run(head: HeadLaunch, reference: str, arguments: Sequence[str]) -> None:
    """Print what the head would request."""
    status, output = start_on_head(head, pack_job(reference), [*arguments, "--dry-run"])
    print(output, end="")
    if status:
        raise typer.Exit(status)


def launch_on_head(head: HeadLaunch, reference: str, arguments: Sequence[str]) -> HeadLaunch:
    """Start a launch that goes on without this machine. Returns it with the name that the job got there."""
    note_head_launch(head)
    status, output = start_on_head(head, pack_job(reference), [*arguments, "--yes", "--detach", "--json"])
    if status:
        if status == _REFUSED:
            forget_head_launch(head)  # nothing was started
        raise typer.Exit(status)
    started = msgspec.structs.replace(head, job=json.loads(output.splitlines()[-1])["job"])
    note_head_launch(started)
    return started


def show_launched(head: HeadLaunch, *, detach: bool, quiet: bool, json_: bool) -> None:
    """Say how a launch is found again, or show it until it ends: this raises typer.Exit with its exit code."""
    if detach:
        print(json.dumps({"job": head.job}) if json_ else detached_words(head.job))
        return
    raise typer.Exit(show_on_head(head, ["attach", head.job, *["--quiet"] * quiet, *["--json"] * json_]))


def find_job_or_show_on_head(name: str, command: str, *flags: str) -> FoundJob:
    """The job of this name on this machine. If it was launched on a head, and no newer job has its name, the command
    runs there instead: this raises typer.Exit with its exit code. Raises UsageError if there is no such job."""
    head = find_head_launch(name)
    try:
        found = find_job(name)
    except UsageError:
        if head is None:
            _raise_if_abandoned(name)
            raise
    else:
        if head is None or found.running or found.entry.started_at > head.started_at:
            return found
    raise typer.Exit(show_on_head(head, [command, head.job, *flags]))


def _raise_if_abandoned(name: str) -> None:
    """Raise UsageError if a launch has this name whose supervisor was killed."""
    for launch in known_launches():
        if name in (launch.record.job, launch.record.order.launch) and not launch.is_supervised:
            raise UsageError(
                f"the supervisor of {name!r} was killed, and machines of it may be left: end them with culm down {name}"
            )


def end_on_head(head: HeadLaunch, *, at_once: bool) -> bool:
    """End a launch on its head. Returns whether nothing is left."""
    try:
        if list_on_head(head) is not None and show_on_head(head, ["down", head.launch, *["--now"] * at_once]) != 0:
            return False
    except RunError as error:
        print(f"culm: {head.job}: {error}", flush=True)
        return False
    forget_head_launch(head)
    print(f"culm: nothing of {head.job} ({head.launch}) is left on {head.head}", flush=True)
    return True


def _spelled_out(hosts: str) -> str:
    """The hosts of a list or file in one line."""
    return ",".join(f"{host.address} zone={host.zone}" if host.zone else host.address for host in parse_hosts(hosts))
