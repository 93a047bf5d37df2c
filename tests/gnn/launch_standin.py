"""A worker without work: it dials back, shows its ticket, and stays until the desk hangs up."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from culm.gnn.launch.base import Ticket


def serve(ticket: Ticket) -> None:
    """The entry that launchers are tried with."""
    card = {"run": ticket.run, "token": ticket.token, "seconds": ticket.seconds, "pid": os.getpid()}
    with socket.create_connection((ticket.host, ticket.port)) as wire:
        wire.sendall(json.dumps(card).encode() + b"\n")
        wire.recv(1)


def hang(ticket: Ticket) -> None:
    """A worker that has dialled back and never ends."""
    card = {"pid": os.getpid()}
    with socket.create_connection((ticket.host, ticket.port)) as wire:
        wire.sendall(json.dumps(card).encode() + b"\n")
        while True:
            time.sleep(3600)


def crash(ticket: Ticket) -> None:
    raise OSError(f"worker of {ticket.run} could not start")


def named(function: Any) -> str:
    return f"{function.__module__}:{function.__name__}"


def ended(pid: int) -> bool:
    """Whether a process has ended, or does so in the next seconds: a killed one takes a moment to be dead."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)


class Desk:
    """Where workers dial back to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._cards: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._wires: list[asyncio.StreamWriter] = []
        self._talks: list[asyncio.Task[Any] | None] = []
        self.gone = asyncio.Queue[int]()
        """Process ids of workers whose connection has ended."""

    async def worker(self) -> dict[str, Any]:
        """The card of the next one that dials back."""
        return await asyncio.wait_for(self._cards.get(), 60)

    async def workers(self, count: int) -> list[dict[str, Any]]:
        return [await self.worker() for _ in range(count)]

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._wires.append(writer)
        self._talks.append(asyncio.current_task())
        line = await reader.readline()
        if not line:
            return  # ended before it could show its card
        card = json.loads(line)
        self._cards.put_nowait(card)
        await reader.read()
        self.gone.put_nowait(card["pid"])

    async def hang_up(self) -> None:
        for wire in self._wires:
            wire.close()
        await asyncio.gather(*filter(None, self._talks))


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    made = Desk(0)
    server = await asyncio.start_server(made.welcome, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.hang_up()
