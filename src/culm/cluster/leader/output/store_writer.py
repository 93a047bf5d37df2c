"""Writes of the leader to the store, in the background and in order. While the store is out of reach, training goes on
and workers keep the leader's snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from culm.cluster.leader.stored_snapshot import PROGRESS_KEY, EncodedSnapshot, StoredSnapshot

if TYPE_CHECKING:
    from culm.cluster.store.store import Store

T = TypeVar("T", bytes, EncodedSnapshot)


class StoreWriter:
    """Writes values in the order in which they are enqueued; a value that a newer one replaces may be skipped."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        """`timeout_s`: a store that takes longer to answer counts as out of reach."""
        self._store, self._timeout_s = store, timeout_s
        self._last_write: asyncio.Task[None] | None = None
        """The newest write; it waits for all others."""
        self._newest_values: dict[str, bytes | EncodedSnapshot] = {}
        self._snapshot = StoredSnapshot(store)

    @property
    def has_pending_writes(self) -> bool:
        """Whether an enqueued value is not in the store yet."""
        return self._last_write is not None and not self._last_write.done()

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
        self._newest_values[key] = value
        self._last_write = asyncio.create_task(self._write(self._last_write, put, key, value, keep_every_value))

    async def _write(
        self,
        previous_write: asyncio.Task[None] | None,
        put: Callable[[T], Awaitable[None]],
        key: str,
        value: T,
        keep_every_value: bool,
    ) -> None:
        if previous_write is not None:
            await previous_write
        if keep_every_value or self._newest_values[key] is value:
            await put(value)

    async def wait_with_timeout(self) -> bool:
        """Wait until all values are written, at most `timeout_s`. False: the store is out of reach."""
        if self._last_write is not None:
            await asyncio.wait([self._last_write], timeout=self._timeout_s)
            if self._last_write.done():
                self._last_write.result()
        return not self.has_pending_writes

    async def wait_until_written(self) -> None:
        """Wait until all values are written, without a timeout."""
        if self._last_write is not None:
            await self._last_write

    async def close(self) -> None:
        """Cancel the writes that are pending."""
        if self._last_write is not None:
            self._last_write.cancel()
            await asyncio.gather(self._last_write, return_exceptions=True)
