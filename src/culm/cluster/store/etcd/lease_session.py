"""Lease session: a lease that is kept alive, a marker key bound to it, and writes that happen only while it lives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

from culm.cluster.store.etcd import etcd_messages
from culm.cluster.store.etcd.etcd_errors import EtcdRefused, EtcdUnreachable, LeaseNotFound
from culm.cluster.store.etcd.etcd_messages import (
    EmptyAnswer,
    EtcdOperation,
    KeepAliveAnswer,
    LeaseAnswer,
    RangeAnswer,
    TxnAnswer,
)
from culm.cluster.store.etcd.lease_keeper import LeaseKeeper
from culm.cluster.store.store import SessionLost
from culm.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
    from culm.cluster.timeouts import Timeouts
    from culm.runtime.clock import Clock

_LOST_MESSAGE = (
    "the session in the store is lost: this node was unreachable for too long and the others continued without it"
)


class LeaseSession:
    """The session of one client in etcd.

    A lease survives a restart of etcd, which restarts its time to live. An expired lease of a node is not replaced: the
    others have seen its keys vanish, so this client is fenced and has to open another session. In that case the gateway
    fails with SessionLost. A client whose expiry has no consequences, such as a launcher, may replace its lease.
    """

    def __init__(
        self,
        gateway: EtcdGateway,
        clock: Clock,
        key_prefix: str,
        timeouts: Timeouts,
        *,
        session_values: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """`session_values`: by full key, what is written again when an expired lease is replaced; None: it is not."""
        self._gateway, self._clock, self._key_prefix, self._timeouts = gateway, clock, key_prefix, timeouts
        self._session_values = session_values
        self.lease = 0
        self._write_numbers = itertools.count(1)
        self._keepalive_task: asyncio.Task[None] | None = None
        self._keeper: LeaseKeeper | None = None

    @property
    def marker_key(self) -> bytes:
        return session_marker_key(self._key_prefix, self.lease)

    async def begin(self) -> None:
        """Acquire a lease and keep it alive, also while the event loop is blocked for a limited time."""
        self._keeper = await self._acquire_lease()
        self._keepalive_task = asyncio.create_task(self._keep_alive())

    async def _acquire_lease(self) -> LeaseKeeper:
        """Acquire a lease, and write the marker and the session keys with it."""
        while not await self._write_first_keys():
            pass
        keeper = LeaseKeeper(self._gateway.access, self.lease, self._timeouts)
        keeper.start()
        return keeper

    async def _write_first_keys(self) -> bool:
        """Write the marker and the session keys with a new lease. False: it expired before, as on a machine that froze
        in between."""
        request = {"TTL": str(int(self._timeouts.lease)), "ID": "0"}
        self.lease = (await self._gateway.call("/v3/lease/grant", request, LeaseAnswer)).id
        values = {self.marker_key: b"", **(self._session_values or {})}
        first = {"success": [etcd_messages.put_operation(key, value, self.lease) for key, value in values.items()]}
        try:
            await self._gateway.call("/v3/kv/txn", first, TxnAnswer)
        except LeaseNotFound:
            return False
        return True

    async def end(self) -> None:
        """Revoke the lease, which deletes all session keys. Does not wait for an unreachable etcd."""
        if self._keeper is None or self._keepalive_task is None:
            return
        self._keeper.end()
        self._keepalive_task.cancel()
        await asyncio.gather(self._keepalive_task, return_exceptions=True)
        if not self._gateway.failure.done():
            with contextlib.suppress(EtcdRefused, EtcdUnreachable):  # the lease will expire by itself
                await self._gateway.attempt("/v3/lease/revoke", {"ID": str(self.lease)}, EmptyAnswer)

    async def write_once(self, operations: list[EtcdOperation], condition: list[EtcdOperation] | None = None) -> bool:
        """Execute operations once, atomically, if a condition holds. Returns whether it held. Raises RunError if the
        session is lost.

        The caller keeps calls in order: a write overtaken by a later one of this session has no effect.
        """
        number = f"{next(self._write_numbers):016x}"
        body = etcd_messages.write_once_transaction(self.marker_key, number, self.lease, condition or [], operations)
        done = etcd_messages.write_once_outcome(await self._gateway.call("/v3/kv/txn", body, TxnAnswer), number)
        if done is None:
            await self._replace_or_fail()
            return await self.write_once(operations, condition)
        return bool(done)

    async def fence_session(self, lease: int, key: bytes) -> None:
        """Fence another client's session and delete one of its keys, in one write: it cannot write any more."""
        await self.write_once(
            [
                etcd_messages.delete_operation(session_marker_key(self._key_prefix, lease)),
                etcd_messages.delete_operation(key),
            ]
        )

    async def revoke_lease(self, lease: int) -> None:
        """Delete all other keys of a fenced session. (This takes etcd longer than a write.)"""
        with contextlib.suppress(LeaseNotFound):  # it has expired meanwhile
            await self._gateway.call("/v3/lease/revoke", {"ID": str(lease)}, EmptyAnswer)

    async def _keep_alive(self) -> None:
        """Renew the lease until it is lost."""
        while True:
            await self._clock.sleep(self._timeouts.keepalive)
            assert self._keeper is not None
            self._keeper.note_loop_progress()
            try:
                kept = await self._gateway.call("/v3/lease/keepalive", {"ID": str(self.lease)}, KeepAliveAnswer)
                self._keeper.note_renewal()
                if kept.result.ttl <= 0:
                    # Fails with a better message if etcd has lost its data.
                    await self._gateway.call("/v3/kv/range", {"key": self.marker_key}, RangeAnswer)
                    await self._replace_or_fail()
            except RunError as error:
                self._keeper.end()
                self._gateway.fail(error)
                return

    async def _replace_or_fail(self) -> None:
        """The lease has expired: replace it, or raise SessionLost from now on."""
        if self._session_values is None:
            self._gateway.fail(SessionLost(_LOST_MESSAGE))
            self._gateway.raise_if_failed()
        assert self._keeper is not None
        self._keeper.end()
        self._keeper = await self._acquire_lease()


def session_marker_key(key_prefix: str, lease: int) -> bytes:
    """The key that exists while a session lives."""
    return f"{key_prefix}session/{lease:016x}".encode()
