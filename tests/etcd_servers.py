"""etcd servers for tests, and a proxy with network faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from culm.providers import die_with_parent
from culm.providers.private_etcd import etcd_binary, free_port


@contextmanager
def etcd_with(folder: Path, *options: str, scheme: str = "http", port: int = 0) -> Iterator[str]:
    """An etcd with the given options; yields its URL. It may not answer at once."""
    url, peers = f"{scheme}://127.0.0.1:{port or free_port()}", "http://127.0.0.1:0"
    basic = [f"--data-dir={folder}", f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    alone = [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
    if not any(option.startswith("--initial-cluster") for option in options):
        basic += [*alone, f"--initial-cluster=default={peers}", "--heartbeat-interval=10", "--election-timeout=100"]
    with started(*basic, *options):
        yield url


@contextmanager
def started(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    """An etcd process, ended afterwards."""
    command = [
        sys.executable,
        "-I",
        "-S",
        die_with_parent.__file__,
        str(os.getpid()),
        etcd_binary(),
        "--log-level=error",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class BadLine:
    """A TCP proxy to a server that can be cut or fall silent."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition("//")[2].rpartition(":")
        self._port = int(port)
        self.url = ""
        self._open = asyncio.Event()
        self._open.set()
        self.delay_s = 0.0
        """Delay of each chunk, in both directions."""
        self.keep_answer: Callable[[bytes], bool] = lambda _: True
        """Called for each chunk of an answer; False: cut the connection instead."""
        self._writers: set[asyncio.StreamWriter] = set()

    def fall_silent(self) -> None:
        """Drop everything without closing connections."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(
                    self._carry(reader, far_writer, lambda _: True), self._carry(far_reader, writer, self._kept)
                )
        finally:
            self._writers -= {writer, far_writer}
            writer.transport.abort()
            far_writer.transport.abort()

    def _kept(self, piece: bytes) -> bool:
        return self.keep_answer(piece)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Callable[[bytes], bool]
    ) -> None:
        while piece := await reader.read(65536):
            await self._open.wait()
            await asyncio.sleep(self.delay_s)
            if not keep(piece):
                raise ConnectionResetError
            writer.write(piece)
        raise ConnectionResetError


@asynccontextmanager
async def bad_line(target: str) -> AsyncIterator[BadLine]:
    line = BadLine(target)
    server = await asyncio.start_server(line._serve, "127.0.0.1", 0)
    line.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.heal()
        line.cut()


def patiently(main: Any, seconds: float = 60.0) -> None:
    """Run a coroutine; fails if it hangs."""

    async def bounded() -> None:
        await asyncio.wait_for(main, seconds)

    asyncio.run(bounded())
