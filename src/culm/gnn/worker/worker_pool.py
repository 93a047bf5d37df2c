"""The worker pool: workers connect to it first. It announces the servers to them and keeps enough workers running."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from culm.errors import RunError
from culm.gnn.launch.launcher import Ticket
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.link_listener import LinkListener
from culm.gnn.transport.tensor_link import TensorLink

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.launch.launcher import Launcher
    from culm.transport.frames.handshake import FrameSocket

_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 20.0
"""A launched worker that has not connected by then is considered lost."""
_HEARTBEAT_TIMEOUT_S = 8.0
"""A worker without a heartbeat for this long is considered lost."""
_NO_WORKER_TIMEOUT_S = 120.0
"""The run fails if no worker is connected for this long."""


@dataclass
class _PooledWorker:
    link: TensorLink
    connected_at: float
    last_heartbeat: float
    pid: int = 0
    host: str = ""


class WorkerPool:
    """Tracks workers and launches missing ones. `on_event` gets the events of workers."""

    def __init__(
        self,
        run: str,
        token: str,
        launcher: Launcher,
        target_size: int,
        *,
        worker_seconds: float,
        on_event: Callable[..., None],
        host: str = "127.0.0.1",
    ) -> None:
        self.target_size = target_size
        self._launcher, self._emit_event, self._host = launcher, on_event, host
        self._listener = LinkListener(token, self._handle_connection, host)
        self._ticket = Ticket(run, token, host, self._listener.port, worker_seconds)
        self._run = run
        self._workers: dict[str, _PooledWorker] = {}
        self._launch_times: list[float] = []
        """Launch times of workers that have not connected yet; infinite while the launch is still in progress."""
        self._server_addresses: messages.ServerAddresses | None = None
        self._last_worker_seen = time.monotonic()
        self.launched_count = 0
        self._ended_worker_seconds = 0.0
        self.lost_count = 0

    @property
    def address(self) -> str:
        """Address that workers connect to."""
        return self._listener.address

    @property
    def rejected_connections(self) -> int:
        """Connections without the token, or of another run."""
        return self._listener.rejected_connections

    def __len__(self) -> int:
        return len(self._workers)

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values() if worker.pid]

    def mark_killed(self, pid: int) -> None:
        """Forget the process id of a worker that was killed on purpose, before its end is noticed."""
        for worker in self._workers.values():
            if worker.pid == pid:
                worker.pid = 0

    def total_worker_seconds(self) -> float:
        """Return the lifetime of all workers together, as a cloud would bill it."""
        now = time.monotonic()
        return self._ended_worker_seconds + sum(now - worker.connected_at for worker in self._workers.values())

    def announce_servers(self, addresses: messages.ServerAddresses) -> None:
        """Send the servers of a new generation to all workers."""
        self._server_addresses = addresses
        for worker in self._workers.values():
            worker.link.send(addresses)

    async def maintain_target_size(self) -> None:
        """Keep `target_size` workers running until cancelled. Raises RunError if no worker connects at all."""
        while True:
            now = time.monotonic()
            self._launch_times = [
                launched_at for launched_at in self._launch_times if now - launched_at < _CONNECT_TIMEOUT_S
            ]
            missing = self.target_size - len(self._workers) - len(self._launch_times)
            if missing > 0:
                await self._launch_workers(missing)
                now = time.monotonic()
            self._drop_silent_workers(now)
            self._dismiss_excess_workers()
            if self._workers:
                self._last_worker_seen = now
            elif now - self._last_worker_seen > _NO_WORKER_TIMEOUT_S:
                raise RunError(
                    f"no worker has connected for {_NO_WORKER_TIMEOUT_S:.0f} s: "
                    f"check that the {self._launcher.name} launcher can start them"
                )
            await asyncio.sleep(_POLL_S)

    async def _launch_workers(self, count: int) -> None:
        """Launch workers. The connect timeout starts after the launch: the first one is slow, because it waits for
        imports."""
        self._launch_times += [math.inf] * count
        self.launched_count += count
        await self._launcher.launch(self._ticket, count)
        now = time.monotonic()
        self._launch_times = [min(launched_at, now) for launched_at in self._launch_times]

    def _drop_silent_workers(self, now: float) -> None:
        """Drop workers without a heartbeat: they, or their machines, hang."""
        for worker in [w for w in self._workers.values() if now - w.last_heartbeat > _HEARTBEAT_TIMEOUT_S]:
            worker.link.close()
            self._handle_worker_lost(worker.link)

    def _dismiss_excess_workers(self) -> None:
        """Stop the newest workers beyond the target size."""
        for name in list(self._workers)[self.target_size :]:
            worker = self._workers.pop(name)
            worker.link.send(messages.StopWorker())
            self._ended_worker_seconds += time.monotonic() - worker.connected_at
            self._emit_event(kind="worker-sent-home", worker=name)

    def _handle_connection(self, name: str, sock: FrameSocket) -> None:
        role, worker, run = (*name.split(" "), "", "")[:3]
        if role != "worker" or run != self._run:
            self._listener.rejected_connections += 1
            sock.close()
            return
        now = time.monotonic()
        self._workers[worker] = _PooledWorker(
            TensorLink(sock, worker, self._handle_message, self._handle_worker_lost), now, now
        )
        if self._launch_times:
            self._launch_times.pop(0)

    def _handle_message(self, link: TensorLink, message: Any, tensors: list[Tensor]) -> None:
        del tensors
        worker = self._workers.get(link.name)
        if worker is None or not isinstance(message, messages.WorkerHeartbeat):
            return
        worker.last_heartbeat = time.monotonic()
        if worker.host:
            return
        worker.pid, worker.host = message.pid, message.host
        self._emit_event(kind="worker-up", worker=link.name, pid=message.pid, host=message.host)
        if self._server_addresses is not None:
            link.send(self._server_addresses)

    def _handle_worker_lost(self, link: TensorLink) -> None:
        worker = self._workers.pop(link.name, None)
        if worker is not None:
            self.lost_count += 1
            self._ended_worker_seconds += time.monotonic() - worker.connected_at
            self._emit_event(kind="worker-lost", worker=link.name)

    async def close(self) -> None:
        """Stop all workers. They do not count as lost."""
        stopping, self._workers = list(self._workers.values()), {}
        for worker in stopping:
            worker.link.send(messages.StopWorker())
            self._ended_worker_seconds += time.monotonic() - worker.connected_at
        await asyncio.gather(*(worker.link.wait_until_drained() for worker in stopping))
        for worker in stopping:
            worker.link.close()
        self._listener.close()
