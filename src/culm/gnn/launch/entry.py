"""What a started process runs: the worker's entry, found by name, with a hard limit to its life."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from typing import TypeAlias

from culm.errors import UsageError
from culm.gnn.launch.base import Ticket

WORKER = "culm.gnn.worker:serve"
"""The entry of every back end. Named, not imported: a launcher must not bring along what only its workers need."""

Entry: TypeAlias = Callable[[Ticket], None]


def resolve(entry: str) -> Entry:
    """The function behind `module:function`. Raises UsageError when there is none."""
    module, colon, name = entry.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise UsageError(f"entry is {entry!r}, which can not be imported: {error}") from error
    if not callable(found):
        raise UsageError(f"entry is {entry!r}: write module:function, as in {WORKER}")
    return found  # type: ignore[no-any-return]


def live(entry: Entry, ticket: Ticket) -> None:
    """Run a worker in this process, for at most `ticket.seconds`.

    The entry is expected to end by itself in time; the alarm ends the process where it hangs in native code or a dead
    connection. Main thread only.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, ticket.seconds)
    try:
        entry(ticket)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
