"""The function that AWS Lambda calls: a worker for as long as the invocation has time left."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from culm.errors import UsageError
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.entry import WORKER, resolve

ENTRY = "CULM_WORKER_ENTRY"
"""The environment variable of the function that names its worker. Not part of the event: an event is data."""
HANDLER_NAME = "culm.gnn.launch.handler.handler"
"""As Lambda calls it."""
GRACE_S = 2.0
"""Left at the end of an invocation: a worker that returns by itself is not billed as a failure."""


class Context(Protocol):
    """What is needed of the context that Lambda passes."""

    def get_remaining_time_in_millis(self) -> int: ...


def handler(event: Any, context: Context) -> dict[str, str]:
    """Dial back with the ticket in the event, and work. Raises UsageError for an event that is no ticket."""
    try:
        ticket = msgspec.convert(event, Ticket)
    except msgspec.ValidationError as error:
        raise UsageError(f"the event is no ticket of a worker: {error}") from None
    left = context.get_remaining_time_in_millis() / 1000 - GRACE_S
    resolve(os.environ.get(ENTRY, WORKER))(replace(ticket, seconds=min(ticket.seconds, left)))
    return {"run": ticket.run}
