"""The entry of a started process: a function found by name, run with a time limit."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from typing import TypeAlias

from culm.errors import UsageError
from culm.gnn.launch.launcher import Ticket

WORKER_ENTRY = "culm.gnn.worker.elastic_worker:serve"
"""Default entry of all launchers. A name instead of an import: a launcher must not import what only workers need."""

Entry: TypeAlias = Callable[[Ticket], None]


def resolve_entry(entry: str) -> Entry:
    """Return the function of `module:function`. Raises UsageError if there is none."""
    module, colon, name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise UsageError(f"entry is {entry!r}, which cannot be imported: {error}") from error
    if not callable(function):
        raise UsageError(f"entry is {entry!r}: write module:function, as in {WORKER_ENTRY}")
    return function  # type: ignore[no-any-return]


def run_with_time_limit(entry: Entry, ticket: Ticket) -> None:
    """Run a worker in this process for at most `ticket.seconds`.

    The entry should return by itself in time. The alarm ends the process if the entry hangs in native code or on a dead
    connection. Main thread only.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, ticket.seconds)
    try:
        entry(ticket)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
