"""Workers as processes of this machine, forked in milliseconds out of one process that has all imported."""

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
from culm.gnn.launch import nursery as side
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.entry import WORKER
from culm.gnn.launch.nursery import Order
from culm.providers.nursery import readable


class LocalLauncher:
    """The default back end. The first launch waits about two seconds for imports, or call `warm` ahead of it.

    `beside`: another launcher, whose processes come out of the same one, so that what both need is imported once. Who
    closes one of the two closes both.
    """

    name = "local"

    def __init__(self, *, entry: str = WORKER, beside: LocalLauncher | None = None) -> None:
        self._entry = entry
        self._origin: _Origin = _Origin() if beside is None else beside._origin
        self._origin.entries.append(entry)

    def warm(self) -> None:
        """Start importing now; does not wait."""
        self._origin.warm()

    async def launch(self, ticket: Ticket, count: int) -> None:
        await self._origin.order(self._entry, ticket, _checked(count))

    async def pids(self) -> tuple[int, ...]:
        """Process ids of its workers that live, the newest last."""
        return await self._origin.order(self._entry)

    async def close(self) -> None:
        await self._origin.close()


class _Origin:
    """Where the processes of one or several launchers come from."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._nursery: _Nursery | None = None
        self._closed = False
        self._turn, self._numbers = asyncio.Lock(), itertools.count()

    def warm(self) -> None:
        if self._closed:
            raise RunError("the launcher is closed: make another one")
        self._nursery = self._nursery or _Nursery(self.entries)

    async def order(self, entry: str, ticket: Ticket | None = None, count: int = 0) -> tuple[int, ...]:
        async with self._turn:
            self.warm()
            assert self._nursery is not None
            return await self._nursery.order(Order(next(self._numbers), entry, ticket, count))

    async def close(self) -> None:
        self._closed = True
        if self._nursery is not None:
            closing, self._nursery = self._nursery, None
            await closing.close()


class _Nursery:
    """The launcher's side of a nursery process."""

    def __init__(self, entries: list[str]) -> None:
        self._pipe, theirs = Pipe()
        self._gone, holding = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "culm.gnn.launch.nursery", str(theirs.fileno()), *entries],
            pass_fds=[theirs.fileno(), holding],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        os.close(holding)

    async def order(self, order: Order) -> tuple[int, ...]:
        try:
            self._pipe.send_bytes(side.encode(order))
            while (answer := side.answers.decode(await _received(self._pipe))).number != order.number:
                pass  # the answer to an order whose sender was cancelled
            return answer.pids
        except (EOFError, OSError):
            raise RunError("the process that local workers come from has ended: is there enough memory?") from None

    async def close(self) -> None:
        """Kill the group, and wait until the last of it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._pipe.close()
        await readable(self._gone)
        os.close(self._gone)
        self._process.wait()


async def _received(pipe: Connection) -> bytes:
    await readable(pipe.fileno())
    return pipe.recv_bytes()


def _checked(count: int) -> int:
    if count < 0:
        raise UsageError(f"count is {count}: workers to start are 0 or more")
    return count
