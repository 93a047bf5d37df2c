"""The door between workers: frames of tensors and letters, named by who waits for them.

A frame is addressed by a key (epoch, step, name); it is received ahead and waits in the mailbox until the executor
asks for it. A letter is a control message: bytes, in order of arrival. Nothing here blocks: sending queues, waiting is
awaiting, and closing an epoch wakes everyone who waits for something of it, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from culm.errors import EpochClosed

if TYPE_CHECKING:
    from torch import Tensor

Address: TypeAlias = str
Tensors: TypeAlias = "tuple[Tensor | None, ...]"


class Key(NamedTuple):
    """What a frame is: unique for its receiver."""

    epoch: int
    step: int
    name: str


class Letter(NamedTuple):
    """A control message. `body` None says that the connection from `sender` was lost: a suspicion, no proof."""

    sender: Address
    body: bytes | None


class Group(Protocol):
    """Workers that add up tensors together, in one order of calls."""

    async def join(self) -> None:
        """Meet the others; returns when all are there."""

    async def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor (a copy made for this) by the sum over the group. They are under way together.

        On failure their content is undefined: NodeLost when the others broke off (a suspicion: somebody may be gone),
        EpochClosed when this member has left itself.
        """

    def close(self) -> None:
        """Leave; whatever is under way is abandoned."""


class Transport(Protocol):
    """One endpoint. Real: sockets. Simulated: memory. A connection that broke took with it what was on its way; that is
    said once, and the next thing to be sent makes a new one."""

    address: Address

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        """Queue a frame. The tensors must not change until it has arrived (senders keep what they send)."""

    def post(self, to: Address, body: bytes) -> None:
        """Queue a letter."""

    def busy(self, computing: bool) -> None:
        """Between busy(True) and busy(False) the worker computes and asks often: nobody else need hurry for it."""

    def arrived(self, key: Key) -> Tensors | None:
        """Take a frame that has come already: the way without a wait."""

    async def receive(self, key: Key) -> Tensors:
        """Wait for a frame and take it. Raises EpochClosed when its epoch is closed first."""

    async def letter(self) -> Letter:
        """The next letter."""

    def close_epochs(self, below: int) -> dict[Key, Tensors]:
        """End every epoch below a number: waiters get EpochClosed, nothing of it is delivered any more. Returns the
        frames that had come and nobody had taken."""

    def group(self, key: Key, members: Sequence[Address]) -> Group:
        """The group of these members, of which this endpoint is one."""

    async def close(self) -> None:
        """Let what is queued go out, then end every connection."""


class Mailbox:
    """Frames that wait for the executor, and the executor that waits for frames. No frame is lost with a wait that was
    cancelled: the next one finds it.

    `put` may be called from another thread (a pump of sockets); everything else from the event loop's own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._frames: dict[Key, Tensors] = {}
        self._waiting: dict[Key, asyncio.Future[Tensors]] = {}
        self._floor = 0

    def put(self, key: Key, tensors: Tensors) -> None:
        """Deliver; what belongs to a closed epoch is dropped."""
        with self._lock:
            if key.epoch < self._floor:
                return
            waiter = self._waiting.pop(key, None)
            if waiter is None:
                self._frames[key] = tensors
                return
        self._wake(key, waiter, tensors)

    def _wake(self, key: Key, waiter: asyncio.Future[Tensors], tensors: Tensors) -> None:
        try:
            own = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            own = False
        if own:
            self._settle(key, waiter, tensors)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._settle, key, waiter, tensors)

    def _settle(self, key: Key, waiter: asyncio.Future[Tensors], tensors: Tensors) -> None:
        if waiter.cancelled():
            self.put(key, tensors)
        elif not waiter.done():
            waiter.set_result(tensors)

    def take(self, key: Key) -> Tensors | None:
        """A frame that is there."""
        with self._lock:
            return self._frames.pop(key, None)

    async def get(self, key: Key) -> Tensors:
        """A frame, now or later. A key has one waiter at a time."""
        with self._lock:
            found = self._frames.pop(key, None)
            if found is not None:
                return found
            if key.epoch < self._floor:
                raise EpochClosed(f"epoch {key.epoch} is closed")
            assert key not in self._waiting or self._waiting[key].done(), key
            waiter = self._waiting[key] = self._loop.create_future()
        try:
            arrived: Tensors = await waiter
            return arrived
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.done() and waiter.exception() is None:
                self.put(key, waiter.result())  # it came and the wait was cancelled in one moment
            raise
        finally:
            with self._lock:
                if self._waiting.get(key) is waiter:
                    del self._waiting[key]

    def awaited(self) -> list[Key]:
        """The frames that somebody waits for."""
        with self._lock:
            return sorted(key for key, waiter in self._waiting.items() if not waiter.done())

    def close_epochs(self, below: int) -> dict[Key, Tensors]:
        """Wake waiters of every epoch below; the frames that lay here are the caller's."""
        with self._lock:
            self._floor = max(self._floor, below)
            left = {key: self._frames.pop(key) for key in [k for k in self._frames if k.epoch < below]}
            ended = [self._waiting.pop(k) for k in list(self._waiting) if k.epoch < below]
        for waiter in ended:
            if not waiter.done():
                waiter.set_exception(EpochClosed("the epoch was closed"))
        return left
