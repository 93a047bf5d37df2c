"""The handler that AWS Lambda calls: runs a worker for the time that is left to the invocation."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from culm.errors import UsageError
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.worker_entry import WORKER_ENTRY, resolve_entry

ENTRY_VARIABLE = "CULM_WORKER_ENTRY"
"""Environment variable of the Lambda function with the worker's entry. It is not part of the event, which is only
data."""
HANDLER_NAME = "culm.gnn.launch.lambda_handler.handler"
"""Name of the handler in the configuration of the Lambda function."""
GRACE_S = 2.0
"""Time left at the end of an invocation: a worker that returns by itself is not counted as a failure."""


class LambdaContext(Protocol):
    """The part of Lambda's context that the handler uses."""

    def get_remaining_time_in_millis(self) -> int: ...


def handler(event: Any, context: LambdaContext) -> dict[str, str]:
    """Run a worker with the ticket in the event. Raises UsageError if the event is not a ticket."""
    try:
        ticket = msgspec.convert(event, Ticket)
    except msgspec.ValidationError as error:
        raise UsageError(f"the event is not a worker's ticket: {error}") from None
    remaining_s = context.get_remaining_time_in_millis() / 1000 - GRACE_S
    resolve_entry(os.environ.get(ENTRY_VARIABLE, WORKER_ENTRY))(
        replace(ticket, seconds=min(ticket.seconds, remaining_s))
    )
    return {"run": ticket.run}
