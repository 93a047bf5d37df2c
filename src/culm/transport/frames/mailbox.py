"""The mailbox of an endpoint: frames that have arrived, and coroutines that wait for frames."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from culm.errors import EpochClosed
from culm.transport.interface import FrameKey, Tensors


class Mailbox:
    """Matches frames with the coroutines that wait for them. A frame is not lost when the wait for it is cancelled: the
    next wait gets it.

    `put` may be called from any thread (the I/O thread of sockets); everything else from the thread of the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._frames: dict[FrameKey, Tensors] = {}
        self._waiters: dict[FrameKey, asyncio.Future[Tensors]] = {}
        self._min_epoch = 0

    def put(self, key: FrameKey, tensors: Tensors) -> None:
        """Deliver a frame. A frame of a closed epoch is dropped."""
        with self._lock:
            if key.epoch < self._min_epoch:
                return
            waiter = self._waiters.pop(key, None)
            if waiter is None:
                self._frames[key] = tensors
                return
        self._wake(key, waiter, tensors)

    def _wake(self, key: FrameKey, waiter: asyncio.Future[Tensors], tensors: Tensors) -> None:
        try:
            on_own_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_own_loop = False
        if on_own_loop:
            self._deliver(key, waiter, tensors)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
                self._loop.call_soon_threadsafe(self._deliver, key, waiter, tensors)

    def _deliver(self, key: FrameKey, waiter: asyncio.Future[Tensors], tensors: Tensors) -> None:
        if waiter.cancelled():
            self.put(key, tensors)
        elif not waiter.done():
            waiter.set_result(tensors)

    def take(self, key: FrameKey) -> Tensors | None:
        """Take a frame that has arrived; None: it has not."""
        with self._lock:
            return self._frames.pop(key, None)

    async def get(self, key: FrameKey) -> Tensors:
        """Take a frame, waiting until it arrives. A key has one waiter at a time. Raises EpochClosed."""
        with self._lock:
            frame = self._frames.pop(key, None)
            if frame is not None:
                return frame
            if key.epoch < self._min_epoch:
                raise EpochClosed(f"epoch {key.epoch} is closed")
            assert key not in self._waiters or self._waiters[key].done(), key
            waiter = self._waiters[key] = self._loop.create_future()
        try:
            arrived: Tensors = await waiter
            return arrived
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.done() and waiter.exception() is None:
                self.put(key, waiter.result())  # the frame arrived in the moment in which the wait was cancelled
            raise
        finally:
            with self._lock:
                if self._waiters.get(key) is waiter:
                    del self._waiters[key]

    def awaited_keys(self) -> list[FrameKey]:
        """The keys that coroutines wait for, sorted."""
        with self._lock:
            return sorted(key for key, waiter in self._waiters.items() if not waiter.done())

    def close_epochs(self, below: int) -> dict[FrameKey, Tensors]:
        """Close every epoch below a number: waiters get EpochClosed. Returns the frames that were not taken."""
        with self._lock:
            self._min_epoch = max(self._min_epoch, below)
            unused = {key: self._frames.pop(key) for key in [k for k in self._frames if k.epoch < below]}
            closed_waiters = [self._waiters.pop(k) for k in list(self._waiters) if k.epoch < below]
        for waiter in closed_waiters:
            if not waiter.done():
                waiter.set_exception(EpochClosed("the epoch was closed"))
        return unused
