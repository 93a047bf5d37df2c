"""Where the store of a run is: in etcd, or in the launcher where there is no etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.etcd import Access, EtcdStore
from culm.cluster.probe import EvictingStore, Prober, refuses
from culm.cluster.sealed import LAUNCHER, SealedStore
from culm.cluster.store import MemoryStore, RemoteStore, Store, StoreServer
from culm.cluster.timeouts import derive
from culm.errors import UsageError
from culm.transport.sockets import SocketTransport

if TYPE_CHECKING:
    from culm.runtime.clock import Clock

Note = Callable[[str], None]


class Place(msgspec.Struct, frozen=True):
    """How a node reaches the store of its run: an etcd and the name of the job there, or the launcher's address."""

    etcd: Access | None = None
    job: str = ""
    server: str = ""
    suspect_after: float = 5.0
    secret: bytes = b""
    """Of a job that several machines share: values in its etcd are sealed with it. Empty: the etcd is our own."""


@asynccontextmanager
async def in_launcher(secret: bytes) -> AsyncIterator[tuple[Store, Place]]:
    """A store in this process, for nodes of this machine; it ends with the process, and the run with it."""
    transport = SocketTransport(secret=secret)
    keys = MemoryStore()
    serving = asyncio.create_task(StoreServer(keys, transport).serve())
    try:
        yield keys.client(LAUNCHER), Place(server=transport.address)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await transport.close()


@asynccontextmanager
async def in_etcd(
    access: Access, job: str, suspect_after: float, secret: bytes = b"", *, note: Note = lambda _: None
) -> AsyncIterator[tuple[Store, Place]]:
    """The keys of a job in etcd, which must not be anybody else's: they are gone afterwards.

    UsageError: etcd can not be used, or somebody runs a job of this name.
    """
    place = Place(access, job, suspect_after=suspect_after, secret=secret)
    async with await EtcdStore.open(access, job, timeouts=derive(suspect_after), note=note) as store:
        await _claim(store, job)
        sealed = _sealed(store, place)
        if isinstance(sealed, SealedStore):
            await sealed.sign()
        try:
            yield sealed, place
        finally:
            await store.erase()


async def _claim(store: EtcdStore, job: str) -> None:
    """What an earlier run has left behind goes; one that is going on is not disturbed."""
    taken = not await store.swap(LAUNCHER, None, b"", session=True)
    if taken or await store.names("nodes/"):
        who = "another culm run" if taken else "nodes of an earlier culm run"
        raise UsageError(f"--job {job!r} is in use by {who}: choose another name, or wait until it has ended")
    await store.erase(but=LAUNCHER)


@asynccontextmanager
async def joined(
    place: Place, transport: SocketTransport, clock: Clock, note: Note = lambda _: None
) -> AsyncIterator[tuple[Store, Prober | None]]:
    """The store as a node reaches it, for as long as the node is there; its session ends with it."""
    if place.etcd is None:
        yield RemoteStore(place.server, transport), None
        return
    async with opened(place, clock, note) as store:
        yield store, Prober(store, refuses, clock)


@asynccontextmanager
async def opened(place: Place, clock: Clock, note: Note = lambda _: None) -> AsyncIterator[EvictingStore]:
    """The keys of a job in etcd, as a node uses them. UsageError: etcd can not be used, or the secret is another."""
    assert place.etcd is not None
    times = derive(place.suspect_after)
    async with await EtcdStore.open(place.etcd, place.job, timeouts=times, clock=clock, note=note) as store:
        sealed = _sealed(store, place)
        if isinstance(sealed, SealedStore):
            await sealed.check()
        yield sealed


def _sealed(store: EtcdStore, place: Place) -> EvictingStore:
    return SealedStore(store, place.secret, place.job) if place.secret else store
