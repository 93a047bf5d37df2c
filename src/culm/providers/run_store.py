"""Open the store of a run: in etcd, or in the launcher if there is no etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.agent.liveness_probe import EvictingStore, LivenessProber, refuses_connection
from culm.cluster.store.encrypted_store import LAUNCHER_KEY, EncryptedStore
from culm.cluster.store.etcd import EtcdAccess, EtcdStore
from culm.cluster.store.store import MemoryStore, RemoteStore, Store, StoreServer
from culm.cluster.timeouts import DEFAULT_BLOCKED_S, derive_timeouts
from culm.errors import RunError, UsageError
from culm.transport.frames.sockets import SocketTransport

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.transport.frames.encryption_policy import EncryptionPolicy

OnNote = Callable[[str], None]
_DELETE_TIMEOUT_S = 10.0
"""Limit for deleting the keys of a run that has ended. Keys that remain are deleted by the next run of that name."""


class StoreLocation(msgspec.Struct, frozen=True):
    """How a node reaches the store of its run: an etcd and the name of the job in it, or the launcher's address."""

    etcd: EtcdAccess | None = None
    job: str = ""
    server: str = ""
    suspect_after: float = 5.0
    blocked_after: float = DEFAULT_BLOCKED_S
    secret: bytes = b""
    """Secret of a job on several machines, with which values in etcd are encrypted. Empty: the etcd is private."""


@asynccontextmanager
async def open_launcher_store(
    secret: bytes, encrypt: EncryptionPolicy = "auto"
) -> AsyncIterator[tuple[Store, StoreLocation]]:
    """A store in this process, for nodes of this machine. The run ends with the process."""
    transport = SocketTransport(secret=secret, encryption=encrypt)
    keys = MemoryStore()
    serving = asyncio.create_task(StoreServer(keys, transport).serve())
    try:
        yield keys.client(LAUNCHER_KEY), StoreLocation(server=transport.address)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await transport.close()


@asynccontextmanager
async def open_job_in_etcd(
    access: EtcdAccess,
    job: str,
    suspect_after: float,
    secret: bytes = b"",
    *,
    blocked_after: float = DEFAULT_BLOCKED_S,
    on_note: OnNote = lambda _: None,
) -> AsyncIterator[tuple[Store, StoreLocation]]:
    """Claim the name of a job in etcd and yield its store; its keys are deleted afterwards.

    Raises UsageError if etcd cannot be used, or if a job of this name is running.
    """
    place = StoreLocation(access, job, suspect_after=suspect_after, blocked_after=blocked_after, secret=secret)
    times = derive_timeouts(suspect_after, blocked_after=blocked_after)
    async with await EtcdStore.open(access, job, timeouts=times, log=on_note, replaces_session=True) as store:
        await _claim_job_name(store, job)
        sealed = _encrypt_if_secret(store, place)
        if isinstance(sealed, EncryptedStore):
            await sealed.write_secret_marker()
        try:
            yield sealed, place
        finally:
            with suppress(TimeoutError, RunError):
                async with asyncio.timeout(_DELETE_TIMEOUT_S):
                    await store.delete_all()


async def _claim_job_name(store: EtcdStore, job: str) -> None:
    """Delete keys of an earlier run. Raises UsageError if a job of this name is running."""
    taken = not await store.swap(LAUNCHER_KEY, None, b"", session=True)
    if taken or await store.list_keys("nodes/"):
        user = "another culm run" if taken else "nodes of an earlier culm run"
        raise UsageError(f"--job {job!r} is in use by {user}: choose another name, or wait until it has ended")
    await store.delete_all(except_key=LAUNCHER_KEY)


class NodeStoreClient:
    """The store as a node uses it: a session that ends with the node, and can be replaced if it is lost."""

    def __init__(
        self, location: StoreLocation, transport: SocketTransport, clock: Clock, on_note: OnNote = lambda _: None
    ) -> None:
        self._location, self._transport, self._clock, self._on_note = location, transport, clock, on_note
        self._etcd: EtcdStore | None = None

    @property
    def can_reopen(self) -> bool:
        """Whether a lost session can be replaced. If the launcher keeps the store, the run ends with it."""
        return self._location.etcd is not None

    async def open(self) -> tuple[Store, LivenessProber | None]:
        """Open a session; an earlier one is closed. Raises UsageError if etcd or the secret cannot be used, and
        RunError if etcd has lost data."""
        location = self._location
        if location.etcd is None:
            return RemoteStore(location.server, self._transport), None
        seen = 0 if self._etcd is None else self._etcd.seen_revision
        await self.close()
        self._etcd = await _open_etcd_client(location, self._clock, self._on_note, seen)
        store = await _check_secret(self._etcd, location)
        return store, LivenessProber(store, refuses_connection, self._clock)

    async def close(self) -> None:
        """End the session."""
        if self._etcd is not None:
            await self._etcd.close()


@asynccontextmanager
async def open_node_store(
    location: StoreLocation, transport: SocketTransport, clock: Clock, on_note: OnNote = lambda _: None
) -> AsyncIterator[NodeStoreClient]:
    """A client of the store for a node, whose session ends with the node."""
    client = NodeStoreClient(location, transport, clock, on_note)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def open_etcd_store(
    location: StoreLocation, clock: Clock, on_note: OnNote = lambda _: None
) -> AsyncIterator[EvictingStore]:
    """The keys of a job in etcd, as a node uses them. Raises UsageError if etcd or the secret cannot be used."""
    async with await _open_etcd_client(location, clock, on_note) as store:
        yield await _check_secret(store, location)


async def _open_etcd_client(
    location: StoreLocation, clock: Clock, on_note: OnNote, seen_revision: int = 0
) -> EtcdStore:
    assert location.etcd is not None
    times = derive_timeouts(location.suspect_after, blocked_after=location.blocked_after)
    return await EtcdStore.open(
        location.etcd, location.job, timeouts=times, clock=clock, log=on_note, seen_revision=seen_revision
    )


async def _check_secret(store: EtcdStore, location: StoreLocation) -> EvictingStore:
    """The store with encrypted values, if the job has a secret. Raises UsageError if that is wrong."""
    sealed = _encrypt_if_secret(store, location)
    if isinstance(sealed, EncryptedStore):
        await sealed.check_secret_marker()
    return sealed


def _encrypt_if_secret(store: EtcdStore, place: StoreLocation) -> EvictingStore:
    return EncryptedStore(store, place.secret, place.job) if place.secret else store
