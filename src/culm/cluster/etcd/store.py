"""The store over etcd: the same promises as the one in memory, for machines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from culm.cluster.etcd import blob, wire
from culm.cluster.etcd.access import Access, check_job_name
from culm.cluster.etcd.gateway import Gateway
from culm.cluster.etcd.mirror import Mirror
from culm.cluster.etcd.refusals import Unreachable
from culm.cluster.etcd.session import Session
from culm.cluster.etcd.wire import KeyValue, RangeAnswer, prefix_end
from culm.cluster.store import Change
from culm.cluster.timeouts import derive
from culm.errors import CulmError, UsageError
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cluster.timeouts import Timeouts
    from culm.runtime.clock import Clock

_PAGE = 500
"""Keys in one answer when a watch begins."""


class EtcdStore:
    """A client of the store: all keys of one job, in etcd.

    Calls of one client are served in the order in which they were made. While etcd is out of reach they wait; a write
    happens once, however often it had to be sent. A client whose session is lost is fenced: it can write nothing from
    then on, and every call and watch, those that wait and those to come, ends with RunError.
    """

    def __init__(self, gateway: Gateway, session: Session, home: str) -> None:
        self._gateway, self._session, self._home = gateway, session, home
        self._in_order = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        access: Access,
        job: str,
        *,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
        note: Callable[[str], None] = lambda _: None,
        patience_s: float = 5.0,
    ) -> EtcdStore:
        """Connect and begin a session. UsageError: the access is wrong, or nobody answers within `patience_s`.

        `note` is told when etcd goes out of reach and when it is back.
        """
        times, clock = timeouts or derive(), clock or RealClock()
        home = f"culm/{check_job_name(job)}/"
        gateway = Gateway(access, clock, attempt_s=times.store_call, note=note)
        session = Session(gateway, clock, home, times)
        try:
            await gateway.find(patience_s)
            async with asyncio.timeout(patience_s + times.store_call):
                await session.begin()
        except TimeoutError:
            await gateway.close()
            raise UsageError(f"--etcd: {gateway.endpoint} answers but takes no writes: are most members up?") from None
        except BaseException:
            await gateway.close()
            raise
        gateway.opened = True
        return cls(gateway, session, home)

    async def close(self) -> None:
        """End the session, and its keys with it, at once; if etcd is out of reach they run out by themselves."""
        await self._session.end()
        await self._gateway.close()

    async def __aenter__(self) -> EtcdStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def lost(self) -> CulmError:
        """Wait until this client is fenced, or closed; returns why."""
        return await asyncio.shield(self._gateway.ended)

    async def get(self, key: str) -> bytes | None:
        while True:
            found = await self._read(key)
            value = None if found is None else await self._value(found.value)
            if found is None or value is not None:
                return value

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        await self._write([self._put(key, await self._placed(value), session)])

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        """As promised; what was in the place of a large value goes with it."""
        there = [wire.equals(self._key(key), None if old is None else blob.pointer(old))]
        swapped = await self._write([self._put(key, await self._placed(new), session)], there)
        if swapped and old is not None and old != new and blob.is_blob(old):
            folder = blob.folder(self._home, blob.name(old))
            await self._write([wire.delete(folder, prefix_end(folder))])
        return swapped

    async def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error."""
        await self._write([wire.delete(self._key(key))])

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """What is there, by name, then every change in order, through outages, each once.

        Only if an outage lasted until etcd had forgotten the changes since (compaction), what is told then is the
        difference: the last value of what changed, and what is gone. A large value that another one has replaced
        before it could be read is not told.
        """
        mirror = Mirror(f"{self._home}key/")
        while True:
            async with self._in_order:
                there = mirror.settle(*await self._list(self._key(prefix)))
            for change in there:
                if (told := await self._whole(change)) is not None:
                    yield told
            async with aclosing(self._follow(self._key(prefix), mirror)) as changes:
                async for change in changes:
                    if (told := await self._whole(change)) is not None:
                        yield told

    async def evict(self, key: str) -> bool:
        """End the session that a key belongs to, as if its machine were gone; False: there is no such session.

        Its owner can write nothing any more and is told as soon as he asks.
        """
        found = await self._read(key)
        if found is None or not found.lease:
            return False
        async with self._in_order:
            await self._session.fence(found.lease, self._key(key))
        await self._session.revoke(found.lease)  # calls that were made meanwhile need not wait for it
        return True

    async def erase(self, *, but: str = "") -> None:
        """Remove every key and blob of the job, all but one key if asked; sessions end with their clients."""
        keys, kept = self._key(""), self._key(but)
        if but:
            await self._write([wire.delete(keys, kept), wire.delete(kept + b"\0", prefix_end(keys))])
        else:
            await self._write([wire.delete(keys, prefix_end(keys))])
        blobs = blob.folder(self._home)
        await self._write([wire.delete(blobs, prefix_end(blobs))])

    async def names(self, prefix: str) -> list[str]:
        """The keys that begin with a prefix, in order."""
        return [key.removeprefix(self._key("")).decode() for key in await self._keys(self._key(prefix))]

    async def _placed(self, value: bytes) -> bytes:
        """What to write under a key; a large value lies in a blob by then."""
        if blob.is_blob(value):
            name = blob.name(value)
            if not await self._keys(blob.parts_key(self._home, name)):
                for key, part in blob.split(self._home, name, value):
                    await self._write([wire.put(key, part)])
        return blob.pointer(value)

    async def _value(self, found: bytes) -> bytes | None:
        """The value that what was found under a key stands for; None: another one has taken its place."""
        name = blob.pointed(found)
        if name is None:
            return found
        async with self._in_order:
            _, parts = await self._list(blob.folder(self._home, name), page=1)
        return blob.join(name, [kv.value for kv in parts])

    async def _whole(self, change: Change) -> Change | None:
        value = None if change.value is None else await self._value(change.value)
        return None if value is None and change.value is not None else Change(change.key, value)

    def _key(self, key: str) -> bytes:
        return f"{self._home}key/{key}".encode()

    def _put(self, key: str, value: bytes, session: bool) -> wire.Op:
        return wire.put(self._key(key), value, self._session.lease if session else 0)

    async def _write(self, then: list[wire.Op], condition: list[wire.Op] | None = None) -> bool:
        async with self._in_order:
            return await self._session.write(then, condition)

    async def _read(self, key: str) -> KeyValue | None:
        async with self._in_order:
            found = await self._gateway.call("/v3/kv/range", {"key": self._key(key)}, RangeAnswer)
        return found.kvs[0] if found.kvs else None

    async def _keys(self, prefix: bytes) -> list[bytes]:
        asked = {"key": prefix, "range_end": prefix_end(prefix), "keys_only": True}
        async with self._in_order:
            return [kv.key for kv in (await self._gateway.call("/v3/kv/range", asked, RangeAnswer)).kvs]

    async def _list(self, prefix: bytes, page: int = _PAGE) -> tuple[int, list[KeyValue]]:
        """All keys under a prefix at one revision, in pages, and that revision."""
        revision, found, start = 0, list[KeyValue](), prefix
        while True:
            asked = {"key": start, "range_end": prefix_end(prefix), "limit": str(page), "revision": str(revision)}
            answer = await self._gateway.call("/v3/kv/range", asked, RangeAnswer)
            revision = revision or answer.header.revision
            found += answer.kvs
            if not answer.more:
                return revision, found
            start = answer.kvs[-1].key + b"\0"

    async def _follow(self, prefix: bytes, mirror: Mirror) -> AsyncGenerator[Change, None]:
        """Changes after what the mirror knows; ends when etcd has forgotten them."""
        broke = 0
        while True:
            asked = {"key": prefix, "range_end": prefix_end(prefix), "start_revision": str(mirror.revision + 1)}
            try:
                async with aclosing(self._gateway.stream("/v3/watch", {"create_request": asked})) as messages:
                    async for message in messages:
                        if message.compact_revision:
                            return
                        broke = 0
                        for change in mirror.apply(message.events):
                            yield change
            except Unreachable:
                await self._gateway.rest(broke)
                broke += 1
