"""The store over etcd: the guarantees of the in-memory store, for machines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from culm.cluster.store.etcd import etcd_messages, large_values
from culm.cluster.store.etcd.etcd_access import EtcdAccess, check_job_name
from culm.cluster.store.etcd.etcd_errors import EtcdUnreachable
from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import KeyValue, RangeAnswer, prefix_end
from culm.cluster.store.etcd.lease_session import LeaseSession
from culm.cluster.store.etcd.watch_state import WatchState
from culm.cluster.store.store import KeyVersion, StoreChange, VersionedChange, VersionedValue
from culm.cluster.timeouts import derive_timeouts
from culm.errors import CulmError, UsageError
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cluster.timeouts import Timeouts
    from culm.runtime.clock import Clock

_PAGE_KEYS = 500
"""Keys per answer when a watch starts."""


class EtcdStore:
    """A client of the store: all keys of one job, in etcd.

    Calls of one client are served in the order in which they were made. While etcd is unreachable they wait; a write
    happens once, however often it had to be sent. A client whose session is lost is fenced: it cannot write any more,
    and all current and later calls and watches raise RunError.
    """

    def __init__(
        self, gateway: EtcdGateway, session: LeaseSession, key_prefix: str, session_values: dict[bytes, bytes]
    ) -> None:
        self._gateway, self._session, self._key_prefix = gateway, session, key_prefix
        self._session_values = session_values
        self._call_order_lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        access: EtcdAccess,
        job: str,
        *,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
        log: Callable[[str], None] = lambda _: None,
        timeout_s: float = 5.0,
        replaces_session: bool = False,
        seen_revision: int = 0,
    ) -> EtcdStore:
        """Connect and start a session. Raises UsageError if the access is wrong or nothing answers within `timeout_s`.

        `log` is called when etcd becomes unreachable and when it is back. `replaces_session`: an expired session is
        replaced by a new one, with the same keys. `seen_revision`: see `EtcdStore.seen_revision`.
        """
        times, clock = timeouts or derive_timeouts(), clock or RealClock()
        key_prefix = f"culm/{check_job_name(job)}/"
        gateway = EtcdGateway(access, clock, attempt_timeout_s=times.store_call, log=log, seen_revision=seen_revision)
        values: dict[bytes, bytes] = {}
        session = LeaseSession(gateway, clock, key_prefix, times, session_values=values if replaces_session else None)
        try:
            await gateway.find_endpoint(timeout_s)
            async with asyncio.timeout(timeout_s + times.store_call):
                await session.begin()
        except TimeoutError:
            await gateway.close()
            raise UsageError(f"--etcd: {gateway.endpoint} answers but takes no writes: are most members up?") from None
        except BaseException:
            await gateway.close()
            raise
        gateway.is_open = True
        return cls(gateway, session, key_prefix, values)

    @property
    def seen_revision(self) -> int:
        """The highest revision of etcd that this client has seen. A later client that sees a lower one raises RunError:
        etcd has lost data."""
        return self._gateway.seen_revision

    async def close(self) -> None:
        """End the session and delete its keys. If etcd is unreachable, they expire with the lease."""
        await self._session.end()
        await self._gateway.close()

    async def __aenter__(self) -> EtcdStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait_until_fenced(self) -> CulmError:
        """Wait until this client is fenced or closed; returns the error."""
        return await asyncio.shield(self._gateway.failure)

    async def get(self, key: str) -> bytes | None:
        found = await self.read_version(key)
        return None if found is None else found.value

    async def read_version(self, key: str) -> VersionedValue | None:
        while True:
            entry = await self._read(key)
            if entry is None:
                return None
            value = await self._load_value(entry.value)
            if value is not None:
                return VersionedValue(value, entry.key_version)

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        await self._write([self._put_operation(key, await self._store_if_large(value), session)])

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        """Compare and swap; the parts of a replaced large value are deleted."""
        stored = None if old is None else large_values.pointer_or_value(old)
        condition = [etcd_messages.equals_condition(self._full_key(key), stored)]
        return await self._replace(key, old or b"", new, condition, session)

    async def write_version(
        self, key: str, value: bytes, current: KeyVersion | None, *, session: bool = False, replaced: bytes = b""
    ) -> bool:
        condition = etcd_messages.version_condition(self._full_key(key), current)
        return await self._replace(key, replaced, value, condition, session)

    async def _replace(
        self, key: str, old: bytes, new: bytes, condition: list[etcd_messages.EtcdOperation], session: bool
    ) -> bool:
        """Set a key under a condition; the parts of the old value are deleted if it is large."""
        written = await self._write([self._put_operation(key, await self._store_if_large(new), session)], condition)
        if written and old != new and large_values.is_large(old):
            folder = large_values.key_prefix(self._key_prefix, large_values.content_hash(old))
            await self._write([etcd_messages.delete_operation(folder, prefix_end(folder))])
        return written

    async def delete(self, key: str) -> None:
        """Delete a key; a missing key is not an error."""
        await self._write([etcd_messages.delete_operation(self._full_key(key))])

    async def watch(self, prefix: str) -> AsyncGenerator[StoreChange, None]:
        """Yield the existing keys by name, then every change in order and once, also across outages.

        If an outage lasted until etcd had compacted the changes since, yields the difference instead: the latest value
        of each changed key, and the deleted keys. Skips a large value that was replaced before it could be read.
        """
        async with aclosing(self.watch_versions(prefix)) as changes:
            async for change, _ in changes:
                yield change

    async def watch_versions(self, prefix: str) -> AsyncGenerator[VersionedChange, None]:
        """As `watch`, with versions."""
        watch_state = WatchState(f"{self._key_prefix}key/")
        while True:
            async with self._call_order_lock:
                initial = watch_state.diff_with_listing(*await self._list_key_values(self._full_key(prefix)))
            for change in initial:
                if (loaded := await self._load_change(change)) is not None:
                    yield loaded
            async with aclosing(self._follow_changes(self._full_key(prefix), watch_state)) as changes:
                async for change in changes:
                    if (loaded := await self._load_change(change)) is not None:
                        yield loaded

    async def evict(self, key: str) -> bool:
        """End the session that a key belongs to, as if its machine were gone. Returns False if there is none.

        Its owner cannot write any more and learns of it with its next call.
        """
        entry = await self._read(key)
        if entry is None or not entry.lease:
            return False
        async with self._call_order_lock:
            await self._session.fence_session(entry.lease, self._full_key(key))
        await self._session.revoke_lease(entry.lease)  # outside the lock: other calls need not wait for it
        return True

    async def delete_all(self, *, except_key: str = "") -> None:
        """Delete all keys and large values of the job except `except_key`; sessions end with their clients."""
        keys, kept = self._full_key(""), self._full_key(except_key)
        if except_key:
            await self._write(
                [
                    etcd_messages.delete_operation(keys, kept),
                    etcd_messages.delete_operation(kept + b"\0", prefix_end(keys)),
                ]
            )
        else:
            await self._write([etcd_messages.delete_operation(keys, prefix_end(keys))])
        blobs = large_values.key_prefix(self._key_prefix)
        await self._write([etcd_messages.delete_operation(blobs, prefix_end(blobs))])

    async def list_keys(self, prefix: str) -> list[str]:
        """The keys with a prefix, in order."""
        return [
            key.removeprefix(self._full_key("")).decode() for key in await self._list_full_keys(self._full_key(prefix))
        ]

    async def _store_if_large(self, value: bytes) -> bytes:
        """Write the parts of a large value. Returns what to write under its key."""
        if large_values.is_large(value):
            name = large_values.content_hash(value)
            if not await self._list_full_keys(large_values.part_count_key(self._key_prefix, name)):
                for key, part in large_values.split_into_parts(self._key_prefix, name, value):
                    await self._write([etcd_messages.put_operation(key, part)])
        return large_values.pointer_or_value(value)

    async def _load_value(self, stored: bytes) -> bytes | None:
        """The value that a stored entry stands for; None: it was replaced meanwhile."""
        name = large_values.pointer_target(stored)
        if name is None:
            return stored
        async with self._call_order_lock:
            _, parts = await self._list_key_values(large_values.key_prefix(self._key_prefix, name), page=1)
        return large_values.join_parts(name, [kv.value for kv in parts])

    async def _load_change(self, found: VersionedChange) -> VersionedChange | None:
        """The change with its whole value; None: the value was replaced meanwhile."""
        key, stored = found.change
        if stored is None:
            return found
        value = await self._load_value(stored)
        return None if value is None else VersionedChange(StoreChange(key, value), found.version)

    def _full_key(self, key: str) -> bytes:
        return f"{self._key_prefix}key/{key}".encode()

    def _put_operation(self, key: str, value: bytes, session: bool) -> etcd_messages.EtcdOperation:
        if session:
            self._session_values[self._full_key(key)] = value
        return etcd_messages.put_operation(self._full_key(key), value, self._session.lease if session else 0)

    async def _write(
        self, operations: list[etcd_messages.EtcdOperation], condition: list[etcd_messages.EtcdOperation] | None = None
    ) -> bool:
        async with self._call_order_lock:
            return await self._session.write_once(operations, condition)

    async def _read(self, key: str) -> KeyValue | None:
        async with self._call_order_lock:
            answer = await self._gateway.call("/v3/kv/range", {"key": self._full_key(key)}, RangeAnswer)
        return answer.kvs[0] if answer.kvs else None

    async def _list_full_keys(self, prefix: bytes) -> list[bytes]:
        request = {"key": prefix, "range_end": prefix_end(prefix), "keys_only": True}
        async with self._call_order_lock:
            return [kv.key for kv in (await self._gateway.call("/v3/kv/range", request, RangeAnswer)).kvs]

    async def _list_key_values(self, prefix: bytes, page: int = _PAGE_KEYS) -> tuple[int, list[KeyValue]]:
        """All keys with a prefix at one revision, read in pages, and that revision."""
        revision, entries, start = 0, list[KeyValue](), prefix
        while True:
            request = {"key": start, "range_end": prefix_end(prefix), "limit": str(page), "revision": str(revision)}
            answer = await self._gateway.call("/v3/kv/range", request, RangeAnswer)
            revision = revision or answer.header.revision
            entries += answer.kvs
            if not answer.more:
                return revision, entries
            start = answer.kvs[-1].key + b"\0"

    async def _follow_changes(self, prefix: bytes, watch_state: WatchState) -> AsyncGenerator[VersionedChange, None]:
        """Yield changes after the state's revision; returns when etcd has compacted them."""
        broke = 0
        while True:
            request = {"key": prefix, "range_end": prefix_end(prefix), "start_revision": str(watch_state.revision + 1)}
            try:
                async with aclosing(self._gateway.stream("/v3/watch", {"create_request": request})) as messages:
                    async for message in messages:
                        if message.compact_revision:
                            return
                        broke = 0
                        for change in watch_state.new_changes(message.events):
                            yield change
            except EtcdUnreachable:
                await self._gateway.wait_before_retry(broke)
                broke += 1
