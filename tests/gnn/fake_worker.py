"""A worker that does no work: it connects, sends the contents of its ticket, and stays until the pool closes the
connection."""

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

    from culm.gnn.launch.launcher import Ticket


def serve(ticket: Ticket) -> None:
    """Worker entry for tests of launchers."""
    introduction = {"run": ticket.run, "token": ticket.token, "seconds": ticket.seconds, "pid": os.getpid()}
    with socket.create_connection((ticket.host, ticket.port)) as connection:
        connection.sendall(json.dumps(introduction).encode() + b"\n")
        connection.recv(1)


def hang(ticket: Ticket) -> None:
    """Worker entry that connects and never returns."""
    introduction = {"pid": os.getpid()}
    with socket.create_connection((ticket.host, ticket.port)) as connection:
        connection.sendall(json.dumps(introduction).encode() + b"\n")
        while True:
            time.sleep(3600)


def crash(ticket: Ticket) -> None:
    raise OSError(f"worker of {ticket.run} could not start")


def entry_name(function: Any) -> str:
    return f"{function.__module__}:{function.__name__}"


def process_ends(pid: int) -> bool:
    """Whether a process has ended or ends within some seconds: a killed process takes a moment to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)


class FakeWorkerPool:
    """The server that fake workers connect to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._introductions: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._handlers: list[asyncio.Task[Any] | None] = []
        self.ended_pids = asyncio.Queue[int]()
        """Process ids of workers whose connection has ended."""

    async def next_worker(self) -> dict[str, Any]:
        """Return the introduction of the next worker that connects."""
        return await asyncio.wait_for(self._introductions.get(), 60)

    async def next_workers(self, count: int) -> list[dict[str, Any]]:
        return [await self.next_worker() for _ in range(count)]

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._handlers.append(asyncio.current_task())
        line = await reader.readline()
        if not line:
            return  # ended before it sent its introduction
        introduction = json.loads(line)
        self._introductions.put_nowait(introduction)
        await reader.read()
        self.ended_pids.put_nowait(introduction["pid"])

    async def close_connections(self) -> None:
        for connection in self._writers:
            connection.close()
        await asyncio.gather(*filter(None, self._handlers))


@asynccontextmanager
async def open_pool() -> AsyncIterator[FakeWorkerPool]:
    pool = FakeWorkerPool(0)
    server = await asyncio.start_server(pool.handle_connection, "127.0.0.1", 0)
    pool.port = server.sockets[0].getsockname()[1]
    try:
        yield pool
    finally:
        server.close()
        await pool.close_connections()
