"""Where nodes come from: three calls that a cloud, a scheduler or this machine can answer."""

from __future__ import annotations

import signal
from typing import NamedTuple, Protocol

REJOIN = 75
"""The exit status of a node that the others took for dead, or whose worker ended: its machine is still there."""


def ended(status: int) -> str:
    """For people: how a process came to its end."""
    if status >= 0:
        return f"ended with exit code {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"ended by {known.get(-status, f'signal {-status}')}"


class Gone(NamedTuple):
    """A node has ended."""

    node: int
    status: int
    """0: the run has a result. REJOIN: its machine could come back as a new node. Else it was taken away, or failed."""


class Provider(Protocol):
    """Starts and stops the nodes of one run. A node joins the run through the store; nobody waits for it here."""

    def start(self, node: int, zone: str = "") -> None:
        """Begin to bring up a node under a number that no node of the run has had. RunError: nothing can be started."""

    def stop(self, node: int, notice_s: float = 0.0) -> None:
        """Take a node away: at once and without a word, or after a notice of so many seconds. One that is gone already
        is no error."""

    async def gone(self) -> Gone:
        """The next node that has ended, whoever ended it."""
