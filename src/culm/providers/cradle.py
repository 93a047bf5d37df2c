"""The cradle: for a node whose workers may be started anew. A process without threads that forks one at a time.

    agent ──pipe── cradle ──fork── worker

An agent can not fork safely once it runs: it has threads by then. Everything below it still ends with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from culm.providers.nursery import fork, readable

_PR_SET_PDEATHSIG = 1
Born = Callable[[str], None]
"""The life of a worker, in its own process, given its agent's address."""


class Cradle:
    """The agent's side. Made before the agent starts any thread."""

    def __init__(self, born: Born) -> None:
        agent = os.getpid()
        self._pipe, theirs = Pipe()

        def child() -> None:
            self._pipe.close()
            die_with(agent)
            _serve(theirs, born)

        fork(child)
        theirs.close()

    async def run(self, address: str) -> str | None:
        """A new worker, until it ends. Cancelled, the worker is killed, and gone when this returns."""
        self._pipe.send_bytes(address.encode())
        await readable(self._pipe.fileno())
        worker = os.pidfd_open(int(self._pipe.recv_bytes()))
        try:
            await readable(worker)
        except asyncio.CancelledError:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
            await readable(worker)
            raise
        finally:
            os.close(worker)
        return None  # it is no child of the agent's: how it has ended only the cradle could find out


def _serve(pipe: Connection, born: Born) -> None:
    """Fork a worker for each address that comes, until the agent is gone; the worker ends with this process."""
    own = os.getpid()

    def child(address: str) -> None:
        pipe.close()
        die_with(own)
        born(address)

    worker: int | None = None
    while True:
        try:
            address = pipe.recv_bytes().decode()
        except (EOFError, OSError):
            return
        if worker is not None:
            os.waitpid(worker, 0)  # it has ended, or the agent would not ask for another
        worker = fork(partial(child, address))
        pipe.send_bytes(str(worker).encode())


def die_with(parent: int) -> None:
    """The kernel ends this process when its parent ends, however that comes about."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
