"""The page of a run while it goes: over HTTP on loopback, and as a file in the run's folder that is written anew.

Whoever looks can change nothing. Pages carry no scripts: the browser is told to load them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.checkpoint.storage import Storage

_EVERY_S = 2.0
_PATIENCE_S = 10.0
_HOSTS = ("127.0.0.1", "localhost")
_LONGEST = 1 << 13
_ADMISSION = 3
"""Turns of the loop from a connection being accepted to its being known here. A server that is closed in between leaves
it open, and who came waits in vain."""

Render = Callable[[], str]


@contextlib.asynccontextmanager
async def served(render: Render) -> AsyncIterator[str]:
    """Serve the page on loopback; yields its address. Afterwards nobody is left waiting for an answer."""
    visits: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits[writer] = asyncio.create_task(_answer(render, reader, writer))
        visits[writer].add_done_callback(lambda _: visits.pop(writer))

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    listening = server.sockets[0]
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        asyncio.get_running_loop().remove_reader(listening)
        for _ in range(_ADMISSION):
            await asyncio.sleep(0)
        server.close()
        for writer, visit in visits.items():
            visit.cancel()
            writer.transport.abort()


async def kept_fresh(render: Render, storage: Storage, name: str) -> None:
    """Write the page now and then, until cancelled. Not in a thread: that might outlive this, and the last page."""
    while True:
        storage.write(name, render().encode())
        await asyncio.sleep(_EVERY_S)


async def _answer(render: Render, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one answer."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_PATIENCE_S):
            asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(response(asked[:_LONGEST].decode("latin-1"), render))
        await writer.drain()
    writer.close()


def response(asked: str, render: Render) -> bytes:
    """The answer to a request. A host that is not this machine is refused: a web page elsewhere must not read here."""
    first, *headers = asked.split("\r\n")
    hosts = [line.partition(":")[2].strip() for line in headers if line.lower().startswith("host:")]
    if not hosts or hosts[0].rpartition(":")[0] not in _HOSTS:
        return _framed("403 Forbidden", "this page is for this machine alone")
    if first.split(" ")[:2] != ["GET", "/"]:
        return _framed("404 Not Found", "there is one page here: /")
    return _framed("200 OK", render())


def _framed(status: str, body: str) -> bytes:
    data = body.encode()
    kind = "text/html" if status.startswith("200") else "text/plain"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + data
