"""Workers as tasks of a Ray cluster. Ray only starts and ends them; tensors do not pass through it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from typing import Any

from culm.errors import RunError, UsageError
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.worker_entry import WORKER_ENTRY, resolve_entry, run_with_time_limit


class RayLauncher:
    """Workers on the cluster at `address`. Without an address, on a private cluster on this machine that `close`
    stops.

    The nodes of a cluster must have culm installed. If all CPUs are taken, workers wait in Ray's queue.
    """

    name = "ray"

    def __init__(self, *, address: str | None = None, cpus: float = 1.0, entry: str = WORKER_ENTRY) -> None:
        if not cpus > 0:
            raise UsageError(f"cpus is {cpus}: give a worker a part of a CPU, as in cpus=0.5")
        self._ray = _import_ray()
        self._address, self._cpus, self._entry = address, cpus, entry
        self._worker_task: Any = None
        self._worker_refs: list[Any] = []
        self._closed = False
        self._lock = asyncio.Lock()

    async def launch(self, ticket: Ticket, count: int) -> None:
        if count < 0:
            raise UsageError(f"count is {count}: give 0 or more workers to start")
        async with self._lock:
            if self._closed:
                raise RunError("the launcher is closed: create another one")
            if self._worker_task is None:
                self._worker_task = await asyncio.to_thread(self._connect)
            self._worker_refs = self._running_refs()
            self._worker_refs += [self._worker_task.remote(self._entry, ticket) for _ in range(count)]

    async def close(self) -> None:
        self._closed = True
        async with self._lock:
            if self._worker_task is not None:
                await asyncio.to_thread(self._shut_down)
                self._worker_task = None

    def _connect(self) -> Any:
        """Connect to the cluster, or start one. Returns the remote function that runs a worker."""
        if self._ray.is_initialized():
            raise RunError("this process is in a Ray cluster already: call ray.shutdown() before launching workers")
        try:
            self._ray.init(
                address=self._address or "local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=None if self._address else {"env_vars": {"PYTHONPATH": _absolute_python_path()}},
            )
        except Exception as error:  # Ray raises the errors of its transport: ConnectionError, ValueError, RuntimeError
            raise RunError(f"no Ray cluster at {self._address or 'this machine'}: {error}") from error
        # One process per worker, as with other launchers, so that it leaves nothing behind.
        return self._ray.remote(num_cpus=self._cpus, max_retries=0, max_calls=1)(_run_worker)

    def _running_refs(self) -> list[Any]:
        """Return the references of running workers; Ray frees the entries of the others once they are dropped."""
        if not self._worker_refs:
            return []
        _, running = self._ray.wait(self._worker_refs, num_returns=len(self._worker_refs), timeout=0, fetch_local=False)
        return list(running)

    def _shut_down(self) -> None:
        for worker in self._running_refs():
            self._ray.cancel(worker, force=True)
        self._worker_refs = []
        self._ray.shutdown()


def _run_worker(entry: str, ticket: Ticket) -> None:
    """Run a worker in a process of Ray."""
    run_with_time_limit(resolve_entry(entry), ticket)


def _absolute_python_path() -> str:
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path)  # noqa: PTH100 - "" is the current folder


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UsageError("launcher is ray, which is not installed: pip install 'culm[ray]'") from None
