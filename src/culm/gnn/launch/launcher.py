"""The Launcher protocol: a back end that starts and ends elastic workers.

A worker is stateless. It gets a ticket, connects with the run's token, pulls the inputs of its tasks, and may end at
any moment. So a launcher transfers no tensors and has no tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ticket:
    """What a worker needs to connect, and its maximum lifetime."""

    run: str
    token: str
    host: str
    port: int
    seconds: float
    store: str = ""
    """Servers only: access to the etcd of the run (culm.gnn.server.gnn_run_store)."""


class Launcher(Protocol):
    """Starts workers. It does not restart workers that end: the worker pool launches others."""

    name: str

    async def launch(self, ticket: Ticket, count: int) -> None:
        """Start `count` workers. Returns once they are requested, before they have connected.

        Raises RunError if the back end refuses.
        """

    async def close(self) -> None:
        """End all running workers. May be called twice; `launch` is not allowed afterwards."""
