"""Lease keeper: a thread that renews the lease of a client whose event loop is blocked for a while."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import KeepAliveAnswer
from culm.errors import CulmError
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cluster.store.etcd.etcd_access import EtcdAccess
    from culm.cluster.timeouts import Timeouts

_CHECKS_PER_KEEPALIVE = 4


class LeaseKeeper:
    """Renews a lease when the event loop is late with it, for at most `timeouts.blocked` seconds.

    The event loop renews the lease itself, and calls `note_loop_progress` before and `note_renewal` after. A process
    that is stopped stops this thread, too, and loses its lease; so does a process whose loop makes no progress for
    longer than `timeouts.blocked`. Code that keeps Python's global lock blocks the thread as well.
    """

    def __init__(self, access: EtcdAccess, lease: int, timeouts: Timeouts) -> None:
        self._access, self._lease, self._timeouts = access, lease, timeouts
        self._loop_seen_at = self._renewed_at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="culm-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End the thread, without waiting for a call under way: a daemon thread does not keep the process alive."""
        self._ended.set()

    def note_loop_progress(self) -> None:
        """The event loop runs."""
        self._loop_seen_at = time.monotonic()

    def note_renewal(self) -> None:
        """The event loop has renewed the lease."""
        self._loop_seen_at = self._renewed_at = time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(self._timeouts.keepalive / _CHECKS_PER_KEEPALIVE):
            now = time.monotonic()
            late = now - self._renewed_at > 1.25 * self._timeouts.keepalive
            if late and now - self._loop_seen_at <= self._timeouts.blocked:
                asyncio.run(self._renew())

    async def _renew(self) -> None:
        """Renew the lease once. An error is left to the event loop, which meets the same one when it runs again."""
        gateway = EtcdGateway(
            self._access, RealClock(), attempt_timeout_s=self._timeouts.store_call, log=lambda _: None
        )
        try:
            with contextlib.suppress(CulmError, TimeoutError):
                async with asyncio.timeout(self._timeouts.lease):
                    await gateway.call("/v3/lease/keepalive", {"ID": str(self._lease)}, KeepAliveAnswer)
                    self._renewed_at = time.monotonic()
        finally:
            await gateway.close()
