"""The pulse of a worker: beats that tell the leader how far it has come. One that stands still says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from culm.runtime.epoch import Beat, encode

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch
    from culm.runtime.executor import Executor
    from culm.transport.base import Transport


class Pulse:
    """Beats now and then for as long as an epoch lasts."""

    def __init__(self, node: int, transport: Transport, clock: Clock) -> None:
        self.node, self.transport, self.clock = node, transport, clock
        self._slow = 0
        """Whether layers are being built, or a disk is waited for: that takes as long as it takes."""

    async def beat(self, epoch: Epoch, executor: Callable[[], Executor | None]) -> None:
        """Until cancelled. `executor` gives the newest one, which may still be of the epoch before."""
        waited = done = 0
        slowest_s = 0.0
        while True:
            found = executor()
            if found is not None and found.epoch is epoch:
                done, slowest_s = found.done, found.slowest_s
            waited += self._slow > 0
            self.tell(epoch, done + waited, slowest_s)
            await self.clock.sleep(epoch.beat_s)

    def tell(self, epoch: Epoch, done: int, slowest_s: float) -> None:
        """One beat: so much has been done in the epoch."""
        self.transport.post(epoch.leader, encode(Beat(self.node, epoch.number, done, slowest_s)))

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """For as long as this lasts every beat says that something moves."""
        self._slow += 1
        try:
            yield
        finally:
            self._slow -= 1
