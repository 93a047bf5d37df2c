"""The log of a job as lines of text: what it has shown so far, and the events of a run folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from culm.cluster.run_setup import setup_line
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


async def job_log_lines(job: FoundJob, *, follow: bool) -> AsyncGenerator[str, None]:
    """What a job has shown so far, a line each with its time. `follow`: and what it shows until its end. Then raises
    the error that ended it, or RunStopped."""
    async with contextlib.aclosing(attached_messages(job)) as messages:
        async for message in messages:
            if isinstance(message, RunEnded):
                yield _end_line(message)
                if follow:
                    summary_or_raise(message)
                return
            if isinstance(message, HistoryEnded) and not follow:
                return
            if line := _line(message):
                yield line


def _line(message: ToWindow) -> str:
    """The message as a line; empty: it is not part of the log."""
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


def find_events_file(folder: str) -> Path | None:
    """The events of a run folder on this machine, if there are any."""
    path = local_path(folder)
    events = None if path is None else path / "events.jsonl"
    return events if events is not None and events.is_file() else None


def event_lines(events: Path) -> Iterator[str]:
    """The events of a run, a line each. In place of a line that cannot be read, a line says so."""
    for text in events.read_text(errors="replace").splitlines():
        try:
            event: dict[str, Any] = json.loads(text)
        except ValueError:
            yield f"(a line of {events} cannot be read)"
            continue
        fields = {name: value for name, value in event.items() if name not in ("t", "kind") and value is not None}
        words = " ".join(f"{name}={_plain(value)}" for name, value in fields.items() if _is_short(value))
        yield f"{event.get('t', 0.0):10.3f} s  {event.get('kind', '')}  {words}".rstrip()


def _is_short(value: object) -> bool:
    return not isinstance(value, dict | list) or len(str(value)) <= 80


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
