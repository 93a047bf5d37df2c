"""Heartbeats of a worker: they tell the leader how much it has done, so that a worker that hangs is noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from culm.runtime.messages import Heartbeat, encode

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch
    from culm.transport.interface import Transport


class HeartbeatSender:
    """Sends heartbeats at the interval of the epoch."""

    def __init__(self, worker: int, transport: Transport, clock: Clock) -> None:
        self._worker, self._transport, self._clock = worker, transport, clock
        self._slow_operations = 0
        """Number of operations under way that may take any time: building layers, waiting for a disk."""

    async def run(self, epoch: Epoch, progress: Callable[[], tuple[int, float]]) -> None:
        """Send heartbeats until cancelled.

        `progress` returns (number of actions run, seconds of the slowest one) in the epoch. Each beat during a slow
        operation counts as one more action.
        """
        beats_in_slow_operations = 0
        while True:
            actions_done, slowest_s = progress()
            beats_in_slow_operations += self._slow_operations > 0
            self.send(epoch, actions_done + beats_in_slow_operations, slowest_s)
            await self._clock.sleep(epoch.heartbeat_s)

    def send(self, epoch: Epoch, actions_done: int, slowest_s: float) -> None:
        """Send one heartbeat."""
        message = Heartbeat(self._worker, epoch.number, actions_done, slowest_s)
        self._transport.send_message(epoch.leader, encode(message))

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """While this is open, every heartbeat reports progress."""
        self._slow_operations += 1
        try:
            yield
        finally:
            self._slow_operations -= 1
