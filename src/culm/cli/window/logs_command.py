"""`culm logs`: print what a job has shown so far."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.launching.head_launch import find_job_or_show_on_head
from culm.cli.run_tables import setup_line
from culm.cli.signal_handling import run_until_signal
from culm.cli.window.attach_command import JobArgument
from culm.errors import UsageError
from culm.observe.writers.run_folder import local_path
from culm.providers.supervisor.run_window import attached_messages, summary_or_raise
from culm.providers.supervisor.window_messages import (
    EventShown,
    HistoryEnded,
    OutputShown,
    RunEnded,
    SetupShown,
    StepShown,
    ToWindow,
)

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
            if (events := _events_file(job)) is None:
                raise
            for line in _event_lines(events):
                print(line)
            return
        ended = run_until_signal(_print_job(found, follow=follow), lambda _: "the job goes on")
        if follow and ended is not None:
            summary_or_raise(ended)


async def _print_job(job: FoundJob, *, follow: bool) -> RunEnded | None:
    """Print lines until the end of the job, or of what happened so far. Returns its end, if it has ended."""
    async with contextlib.aclosing(attached_messages(job)) as messages:
        async for message in messages:
            if isinstance(message, RunEnded):
                print(_end_line(message), flush=True)
                return message
            if isinstance(message, HistoryEnded) and not follow:
                break
            if line := _line(message):
                print(line, flush=True)
    return None


def _line(message: ToWindow) -> str:
    """The message as a line; empty: it is not printed."""
    match message:
        case SetupShown(setup):
            return setup_line(setup)
        case StepShown(metrics, at):
            loss = "" if metrics.loss is None else f": loss {metrics.loss:.4f}"
            return f"{_clock(at)} step {metrics.step}{loss}"
        case EventShown(text, at) | OutputShown(text, at):
            return f"{_clock(at)} {text}"
        case _:
            return ""


def _end_line(ended: RunEnded) -> str:
    if ended.stopped or ended.result.summary is None:
        return ended.stopped or f"failed: {ended.result.message}"
    return f"finished: {ended.result.summary['steps']} steps"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _events_file(folder: str) -> Path | None:
    """The events of a run folder on this machine, if there are any."""
    path = local_path(folder)
    events = None if path is None else path / "events.jsonl"
    return events if events is not None and events.is_file() else None


def _event_lines(events: Path) -> Iterator[str]:
    """The events of a run as text. A last line that was cut off is left out."""
    for text in events.read_text(errors="replace").splitlines():
        try:
            event: dict[str, Any] = json.loads(text)
        except ValueError:
            print(f"culm: a line of {events} cannot be read", file=sys.stderr)
            continue
        fields = {name: value for name, value in event.items() if name not in ("t", "kind") and value is not None}
        words = " ".join(f"{name}={_plain(value)}" for name, value in fields.items() if _is_short(value))
        yield f"{event.get('t', 0.0):10.3f} s  {event.get('kind', '')}  {words}".rstrip()


def _is_short(value: object) -> bool:
    return not isinstance(value, dict | list) or len(str(value)) <= 80


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
