"""Workers as tasks of a Ray cluster. Ray starts them and ends them; tensors never pass through it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from typing import Any

from culm.errors import RunError, UsageError
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.entry import WORKER, live, resolve


class RayLauncher:
    """Workers on the cluster at `address`; without one, on a private cluster of this machine that ends with close.

    The nodes of a cluster must have culm installed. Where all its CPUs are taken, workers wait in Ray's queue.
    """

    name = "ray"

    def __init__(self, *, address: str | None = None, cpus: float = 1.0, entry: str = WORKER) -> None:
        if not cpus > 0:
            raise UsageError(f"cpus is {cpus}: give a worker a part of a CPU, as in cpus=0.5")
        self._ray = _imported()
        self._address, self._cpus, self._entry = address, cpus, entry
        self._remote: Any = None
        self._started: list[Any] = []
        self._closed = False
        self._turn = asyncio.Lock()

    async def launch(self, ticket: Ticket, count: int) -> None:
        if count < 0:
            raise UsageError(f"count is {count}: workers to start are 0 or more")
        async with self._turn:
            if self._closed:
                raise RunError("the launcher is closed: make another one")
            if self._remote is None:
                self._remote = await asyncio.to_thread(self._connect)
            self._started = self._running()
            self._started += [self._remote.remote(self._entry, ticket) for _ in range(count)]

    async def close(self) -> None:
        self._closed = True
        async with self._turn:
            if self._remote is not None:
                await asyncio.to_thread(self._end)
                self._remote = None

    def _connect(self) -> Any:
        """Join or start the cluster, once; returns the task that a worker is."""
        if self._ray.is_initialized():
            raise RunError("this process is in a Ray cluster already: call ray.shutdown() before launching workers")
        try:
            self._ray.init(
                address=self._address or "local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=None if self._address else {"env_vars": {"PYTHONPATH": _path()}},
            )
        except Exception as error:  # Ray raises what its transport raises: ConnectionError, ValueError, RuntimeError
            raise RunError(f"no Ray cluster at {self._address or 'this machine'}: {error}") from error
        # A process per worker, as with other back ends: whatever it leaves behind ends with it.
        return self._ray.remote(num_cpus=self._cpus, max_retries=0, max_calls=1)(_work)

    def _running(self) -> list[Any]:
        """Those that have not ended; Ray frees the others' entries once nobody refers to them."""
        if not self._started:
            return []
        _, running = self._ray.wait(self._started, num_returns=len(self._started), timeout=0, fetch_local=False)
        return list(running)

    def _end(self) -> None:
        for worker in self._running():
            self._ray.cancel(worker, force=True)
        self._started = []
        self._ray.shutdown()


def _work(entry: str, ticket: Ticket) -> None:
    """Runs in a process of Ray's."""
    live(resolve(entry), ticket)


def _path() -> str:
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path)  # noqa: PTH100 - "" is the current folder


def _imported() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UsageError("launcher is ray, which is not installed: pip install 'culm[ray]'") from None
