"""The desk: where workers call first. It tells them whom to work for, and sees to it that there are enough of them."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from culm.errors import RunError
from culm.gnn import messages as say
from culm.gnn.launch.base import Ticket
from culm.gnn.link import Link, Listener

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.launch.base import Launcher

_LOOK_S = 0.05
_ARRIVE_S = 20.0
"""A worker that was asked for and has not called by then is taken for lost."""
_SILENT_S = 8.0
"""Without a beat of a worker."""
_GIVE_UP_S = 120.0
"""Without a single worker for so long, the run ends."""


@dataclass
class _Worker:
    link: Link
    since: float
    heard: float
    pid: int = 0
    host: str = ""


class Desk:
    """Counts workers, and asks the launcher for those that are missing. `told` gets an event for everything."""

    def __init__(
        self,
        run: str,
        token: str,
        launcher: Launcher,
        target: int,
        *,
        seconds: float,
        told: Callable[..., None],
        host: str = "127.0.0.1",
    ) -> None:
        self.target = target
        self._launcher, self._told, self._host = launcher, told, host
        self._listener = Listener(token, self._accepted, host)
        self._ticket = Ticket(run, token, host, self._listener.port, seconds)
        self._run = run
        self._workers: dict[str, _Worker] = {}
        self._asked: list[float] = []
        """When workers were asked for that have not called yet; infinite while they are still being launched."""
        self._roster: say.Roster | None = None
        self._last_seen = time.monotonic()
        self.launched = 0
        self._lived = 0.0
        self.lost = 0

    @property
    def address(self) -> str:
        """Where it is called."""
        return self._listener.address

    @property
    def refused(self) -> int:
        """Callers without the token, or of another run."""
        return self._listener.refused

    def __len__(self) -> int:
        return len(self._workers)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values() if worker.pid]

    def forget(self, pid: int) -> None:
        """A worker was killed on purpose: it is no victim any more, before its end is noticed."""
        for worker in self._workers.values():
            if worker.pid == pid:
                worker.pid = 0

    def lived(self) -> float:
        """Seconds of all workers together: what a cloud would bill."""
        now = time.monotonic()
        return self._lived + sum(now - worker.since for worker in self._workers.values())

    def tell(self, roster: say.Roster) -> None:
        """A new generation: everyone has to know."""
        self._roster = roster
        for worker in self._workers.values():
            worker.link.send(roster)

    async def supply(self) -> None:
        """Keep as many workers as the target says, until cancelled. Raises RunError when none comes at all."""
        while True:
            now = time.monotonic()
            self._asked = [at for at in self._asked if now - at < _ARRIVE_S]
            missing = self.target - len(self._workers) - len(self._asked)
            if missing > 0:
                await self._ask(missing)
                now = time.monotonic()
            self._replace_silent(now)
            self._send_home()
            if self._workers:
                self._last_seen = now
            elif now - self._last_seen > _GIVE_UP_S:
                raise RunError(
                    f"no worker has called for {_GIVE_UP_S:.0f} s: "
                    f"check that the {self._launcher.name} launcher can start them"
                )
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, count: int) -> None:
        """A slow launch, as the first one is that waits for imports, is not held against those whom it starts."""
        self._asked += [math.inf] * count
        self.launched += count
        await self._launcher.launch(self._ticket, count)
        now = time.monotonic()
        self._asked = [min(at, now) for at in self._asked]

    def _replace_silent(self, now: float) -> None:
        """One that hangs, or whose machine does, is as good as lost."""
        for worker in [w for w in self._workers.values() if now - w.heard > _SILENT_S]:
            worker.link.close()
            self._lost(worker.link)

    def _send_home(self) -> None:
        """More than the target: the youngest go."""
        for name in list(self._workers)[self.target :]:
            worker = self._workers.pop(name)
            worker.link.send(say.Stop())
            self._lived += time.monotonic() - worker.since
            self._told(kind="worker-sent-home", worker=name)

    def _accepted(self, name: str, sock: socket.socket) -> None:
        role, worker, run = (*name.split(" "), "", "")[:3]
        if role != "worker" or run != self._run:
            self._listener.refused += 1
            sock.close()
            return
        now = time.monotonic()
        self._workers[worker] = _Worker(Link(sock, worker, self._heard, self._lost), now, now)
        if self._asked:
            self._asked.pop(0)

    def _heard(self, link: Link, message: Any, tensors: list[Tensor]) -> None:
        del tensors
        worker = self._workers.get(link.name)
        if worker is None or not isinstance(message, say.Hello):
            return
        worker.heard = time.monotonic()
        if worker.host:
            return
        worker.pid, worker.host = message.pid, message.host
        self._told(kind="worker-up", worker=link.name, pid=message.pid, host=message.host)
        if self._roster is not None:
            link.send(self._roster)

    def _lost(self, link: Link) -> None:
        worker = self._workers.pop(link.name, None)
        if worker is not None:
            self.lost += 1
            self._lived += time.monotonic() - worker.since
            self._told(kind="worker-lost", worker=link.name)

    async def close(self) -> None:
        """Send everyone home. Whoever goes now is not lost."""
        going, self._workers = list(self._workers.values()), {}
        for worker in going:
            worker.link.send(say.Stop())
            self._lived += time.monotonic() - worker.since
        await asyncio.gather(*(worker.link.drained() for worker in going))
        for worker in going:
            worker.link.close()
        self._listener.close()
