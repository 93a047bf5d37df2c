"""Writes of the leader to the store, in the background and in order. While the store is out of reach, training goes on
and workers keep the leader's snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from culm.cluster.leader.stored_snapshot import PROGRESS_KEY, EncodedSnapshot, StoredSnapshot
from culm.errors import RunError

if TYPE_CHECKING:
    from culm.cluster.store.store import Store

T = TypeVar("T", bytes, EncodedSnapshot)


class _Write(NamedTuple):
    key: str
    put: Callable[[], Awaitable[None]]


class StoreWriter:
    """Writes values in the order in which they are enqueued; a value that a newer one replaces may be skipped.

    An outage of the store may last for hours, in which thousands of steps are committed: a value that is replaced is
    dropped at once.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        """`timeout_s`: a store that takes longer to answer counts as out of reach."""
        self._store, self._timeout_s = store, timeout_s
        self._numbers = itertools.count(1)
        self._newest = 0
        """The number of the newest value."""
        self._pending: dict[int, _Write] = {}
        """By number, in order, the one that is being written first."""
        self._replaceable: dict[str, int] = {}
        """By key: the number of a value that a newer one replaces."""
        self._task: asyncio.Task[None] | None = None
        """Writes what is pending. It has failed after an error: nothing more is written then."""
        self._changed = asyncio.Event()
        """Set when a value has been written, and when the task has ended."""
        self._snapshot = StoredSnapshot(store)

    @property
    def has_pending_writes(self) -> bool:
        """Whether an enqueued value is not in the store yet."""
        return self._task is not None and not self._task.done()

    def enqueue(self, key: str, value: bytes, *, keep_every_value: bool = False) -> None:
        """Write a key in the background. `keep_every_value`: write it even if a newer value follows. An error is raised
        by the next call that waits."""
        self._enqueue(partial(self._store.put, key), key, value, keep_every_value)

    def enqueue_snapshot(self, snapshot: EncodedSnapshot) -> None:
        """Write the leader's snapshot in the background, unless a newer one follows."""
        self._enqueue(self._snapshot.write, PROGRESS_KEY, snapshot, False)

    async def read_snapshot(self) -> bytes | None:
        """The snapshot that a previous leader has left."""
        return await self._snapshot.read()

    def _enqueue(self, put: Callable[[T], Awaitable[None]], key: str, value: T, keep_every_value: bool) -> None:
        if self._has_failed():
            return
        self._pending.pop(self._replaceable.pop(key, 0), None)
        self._newest = number = next(self._numbers)
        self._pending[number] = _Write(key, partial(put, value))
        if not keep_every_value:
            self._replaceable[key] = number
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_pending())
            self._task.add_done_callback(lambda _: self._changed.set())

    def _has_failed(self) -> bool:
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    async def _write_pending(self) -> None:
        while self._pending:
            number, write = next(iter(self._pending.items()))
            if self._replaceable.get(write.key) == number:
                del self._replaceable[write.key]  # it is being written: a newer value follows it
            await write.put()
            del self._pending[number]
            self._changed.set()

    async def wait_with_timeout(self) -> bool:
        """Wait until all values are written, at most `timeout_s`. False: the store is out of reach."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.wait_until_written()
        except TimeoutError:
            if self._has_failed():
                raise
        return not self.has_pending_writes

    async def wait_until_written(self) -> None:
        """Wait until all values that have been enqueued so far are written, without a timeout."""
        newest = self._newest
        while self.has_pending_writes and next(iter(self._pending), newest + 1) <= newest:
            self._changed.clear()
            await self._changed.wait()
        if self._task is not None and self._task.done():
            self._task.result()

    async def accepts_writes(self, node: int) -> bool:
        """Whether the store accepts a write of this node. It accepts none of a node whose lease has expired."""
        with contextlib.suppress(RunError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._store.put("lines", str(node).encode())
            return True
        return False

    async def close(self) -> None:
        """Cancel the writes that are pending."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
