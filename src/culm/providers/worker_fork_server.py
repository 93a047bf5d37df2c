"""Worker fork server of a node whose worker may be replaced: a process without threads that forks one worker at a time.

    agent ──pipe── worker fork server ──fork── worker

A running agent has threads and cannot fork safely. Both processes end with the agent.
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

from culm.providers.fork_server import fork, wait_readable

_PR_SET_PDEATHSIG = 1
WorkerMain = Callable[[str], None]
"""Runs a worker in its own process, given the address of its agent."""


class WorkerForkServer:
    """The agent's side. Create it before the agent starts any thread."""

    def __init__(self, worker_main: WorkerMain) -> None:
        agent = os.getpid()
        self._pipe, child_end = Pipe()

        def child() -> None:
            self._pipe.close()
            set_parent_death_signal(agent)
            _serve(child_end, worker_main)

        fork(child)
        child_end.close()

    async def run_worker(self, address: str) -> str | None:
        """Start a new worker and wait for its end. If cancelled, kill it and wait for its end."""
        self._pipe.send_bytes(address.encode())
        await wait_readable(self._pipe.fileno())
        worker = os.pidfd_open(int(self._pipe.recv_bytes()))
        try:
            await wait_readable(worker)
        except asyncio.CancelledError:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
            await wait_readable(worker)
            raise
        finally:
            os.close(worker)
        return None  # not a child of the agent: its exit status is not known here


def _serve(pipe: Connection, worker_main: WorkerMain) -> None:
    """Fork a worker for each address that is received, until the agent ends. The worker ends with this process."""
    own = os.getpid()

    def child(address: str) -> None:
        pipe.close()
        set_parent_death_signal(own)
        worker_main(address)

    worker: int | None = None
    while True:
        try:
            address = pipe.recv_bytes().decode()
        except (EOFError, OSError):
            return
        if worker is not None:
            os.waitpid(worker, 0)  # it has ended, else the agent would not request another
        worker = fork(partial(child, address))
        pipe.send_bytes(str(worker).encode())


def set_parent_death_signal(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
