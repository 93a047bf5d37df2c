"""Workers as processes on this machine, forked in milliseconds from a process that has imported everything."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from culm.errors import RunError, UsageError
from culm.gnn.launch import elastic_fork_server as fork_server
from culm.gnn.launch.elastic_fork_server import ForkRequest
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.worker_entry import WORKER_ENTRY
from culm.providers.child_environment import environment_without_secrets
from culm.providers.fork_server import wait_readable


class LocalLauncher:
    """The default launcher. The first launch waits about two seconds for imports, unless `preload` was called
    before.

    With `share_with`, two launchers use the same fork server, so that modules are imported once. Closing one of them
    closes both.
    """

    name = "local"

    def __init__(self, *, entry: str = WORKER_ENTRY, share_with: LocalLauncher | None = None) -> None:
        self._entry = entry
        self._fork_server: _SharedForkServer = _SharedForkServer() if share_with is None else share_with._fork_server
        self._fork_server.entries.append(entry)

    def preload(self) -> None:
        """Start importing in the background."""
        self._fork_server.start()

    async def launch(self, ticket: Ticket, count: int) -> None:
        await self._fork_server.request(self._entry, ticket, _check_count(count))

    async def worker_pids(self) -> tuple[int, ...]:
        """Return the process ids of living workers, the newest last."""
        return await self._fork_server.request(self._entry)

    async def close(self) -> None:
        await self._fork_server.close()


class _SharedForkServer:
    """A fork server that one or several launchers use."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._process: _ForkServerProcess | None = None
        self._closed = False
        self._lock, self._request_numbers = asyncio.Lock(), itertools.count()

    def start(self) -> None:
        if self._closed:
            raise RunError("the launcher is closed: create another one")
        self._process = self._process or _ForkServerProcess(self.entries)

    async def request(self, entry: str, ticket: Ticket | None = None, count: int = 0) -> tuple[int, ...]:
        async with self._lock:
            self.start()
            assert self._process is not None
            return await self._process.request(ForkRequest(next(self._request_numbers), entry, ticket, count))

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            closing, self._process = self._process, None
            await closing.close()


class _ForkServerProcess:
    """The launcher's side of a fork server process."""

    def __init__(self, entries: list[str]) -> None:
        self._pipe, child_end = Pipe()
        self._all_ended_fd, held_open = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "culm.gnn.launch.elastic_fork_server", str(child_end.fileno()), *entries],
            pass_fds=[child_end.fileno(), held_open],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=environment_without_secrets() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        child_end.close()
        os.close(held_open)

    async def request(self, fork_request: ForkRequest) -> tuple[int, ...]:
        try:
            self._pipe.send_bytes(fork_server.encode_frame(fork_request))
            while (
                answer := fork_server.response_decoder.decode(await _receive_bytes(self._pipe))
            ).number != fork_request.number:
                pass  # the response to a request whose caller was cancelled
            return answer.pids
        except (EOFError, OSError):
            raise RunError("the fork server of local workers has ended: is there enough memory?") from None

    async def close(self) -> None:
        """Kill the process group and wait until its last process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._pipe.close()
        await wait_readable(self._all_ended_fd)
        os.close(self._all_ended_fd)
        self._process.wait()


async def _receive_bytes(pipe: Connection) -> bytes:
    await wait_readable(pipe.fileno())
    return pipe.recv_bytes()


def _check_count(count: int) -> int:
    if count < 0:
        raise UsageError(f"count is {count}: give 0 or more workers to start")
    return count
