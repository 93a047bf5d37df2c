"""A session: a lease that is kept alive, a marker that dies with it, and writes that happen only while it lives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

from culm.cluster.etcd import wire
from culm.cluster.etcd.refusals import Gone, Refused, Unreachable
from culm.cluster.etcd.wire import Anything, KeepAliveAnswer, LeaseAnswer, Op, RangeAnswer, TxnAnswer
from culm.errors import RunError

if TYPE_CHECKING:
    from culm.cluster.etcd.gateway import Gateway
    from culm.cluster.timeouts import Timeouts
    from culm.runtime.clock import Clock

_LOST = "the session in the store is lost: this node was out of reach for too long and the others went on without it"


class Session:
    """What this client is to the others: there as long as its lease is, and never again after.

    A lease outlives a restart of etcd, which starts its time anew. One that has run out is not replaced: the others
    have seen the keys go, so this client is fenced and has to come back as a new one. Then the gateway fails.
    """

    def __init__(self, gateway: Gateway, clock: Clock, home: str, times: Timeouts) -> None:
        self._gateway, self._clock, self._home, self._times = gateway, clock, home, times
        self.lease = 0
        self._numbers = itertools.count(1)
        self._keeping: asyncio.Task[None] | None = None

    @property
    def marker(self) -> bytes:
        return marker(self._home, self.lease)

    async def begin(self) -> None:
        """Take a lease and keep it."""
        asked = {"TTL": str(int(self._times.lease)), "ID": "0"}
        self.lease = (await self._gateway.call("/v3/lease/grant", asked, LeaseAnswer)).id
        first = {"success": [wire.put(self.marker, b"", self.lease)]}
        await self._gateway.call("/v3/kv/txn", first, TxnAnswer)
        self._keeping = asyncio.create_task(self._keep())

    async def end(self) -> None:
        """Give the lease back, and all session keys with it. Does not wait for an etcd that is out of reach."""
        if self._keeping is None:
            return
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        if not self._gateway.ended.done():
            with contextlib.suppress(Refused, Unreachable):  # then it runs out by itself
                await self._gateway.attempt("/v3/lease/revoke", {"ID": str(self.lease)}, Anything)

    async def write(self, then: list[Op], condition: list[Op] | None = None) -> bool:
        """Do something once if a condition holds, in one breath; False: it does not. RunError: the session is lost.

        The order of calls is the caller's business: a write that is overtaken by a later one of this session is void.
        """
        number = f"{next(self._numbers):016x}"
        body = wire.once(self.marker, number, self.lease, condition or [], then)
        done = wire.outcome(await self._gateway.call("/v3/kv/txn", body, TxnAnswer), number)
        if done is None:
            self._lose()
        return bool(done)

    async def fence(self, lease: int, key: bytes) -> None:
        """Somebody else is taken for dead: with this write a key of his goes, and he can change nothing any more."""
        await self.write([wire.delete(marker(self._home, lease)), wire.delete(key)])

    async def revoke(self, lease: int) -> None:
        """All other keys of somebody who was fenced go. (This takes etcd longer than a write.)"""
        with contextlib.suppress(Gone):  # it ran out meanwhile
            await self._gateway.call("/v3/lease/revoke", {"ID": str(lease)}, Anything)

    async def _keep(self) -> None:
        """Renew the lease until it is lost."""
        while True:
            await self._clock.sleep(self._times.keepalive)
            try:
                kept = await self._gateway.call("/v3/lease/keepalive", {"ID": str(self.lease)}, KeepAliveAnswer)
                if kept.result.ttl <= 0:
                    await self._gateway.call("/v3/kv/range", {"key": self.marker}, RangeAnswer)  # has etcd its data?
                    self._lose()
            except RunError as error:
                self._gateway.fail(error)
                return

    def _lose(self) -> None:
        self._gateway.fail(RunError(_LOST))
        self._gateway.check()


def marker(home: str, lease: int) -> bytes:
    """The key that says that a session lives."""
    return f"{home}session/{lease:016x}".encode()
