"""Provider: starts and stops nodes, on this machine, in a cloud or through a scheduler."""

from __future__ import annotations

import signal
from typing import NamedTuple, Protocol

EXIT_REJOIN = 75
"""Exit status of a node that was removed from the run or whose worker ended, while its machine is still there."""


def describe_exit(status: int) -> str:
    """How a process ended, as text, from its exit status."""
    if status >= 0:
        return f"ended with exit code {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"ended by {known.get(-status, f'signal {-status}')}"


class NodeExit(NamedTuple):
    """A node has ended."""

    node: int
    status: int
    """0: the run has a result. EXIT_REJOIN: its machine can rejoin as a new node. Else it was stopped or failed."""


class Provider(Protocol):
    """Starts and stops the nodes of one run. A node joins the run through the store."""

    def start(self, node: int, zone: str = "") -> None:
        """Begin to start a node with a number that no node of the run has had. Raises RunError if that fails."""

    def stop(self, node: int, notice_s: float = 0.0) -> None:
        """Stop a node: at once, or with a notice of `notice_s` seconds. A node that has ended is no error."""

    async def wait_for_exit(self) -> NodeExit:
        """Wait for the next node that has ended, for any reason."""
