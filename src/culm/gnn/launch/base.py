"""What a back end of elastic workers has to do: start them, and end them.

A worker is stateless. It gets a ticket, dials back with the run's token, pulls what a task names, and may vanish at any
moment. So a back end neither carries tensors nor knows tasks: it is a launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ticket:
    """What a worker needs to dial back, and how long it may live."""

    run: str
    token: str
    host: str
    port: int
    seconds: float
    store: str = ""
    """Servers only: how to reach the etcd where they meet (culm.gnn.meeting)."""


class Launcher(Protocol):
    """Starts workers. One that dies is not restarted here: whoever hands out the tasks asks for another."""

    name: str

    async def launch(self, ticket: Ticket, count: int) -> None:
        """Start `count` workers; returns once they are asked for, before they have dialled back.

        Raises RunError when the back end refuses.
        """

    async def close(self) -> None:
        """End all that still run. May be called twice; nothing can be launched afterwards."""
