"""Where the servers of a run meet: one store for all, and the ticket that leads a server process there.

The store is a private etcd of this machine, or the user's own. A server is there as long as its lease is: one that
hangs loses it, others go on without it, and when it wakes up it can change nothing any more. One that ends is seen at
once by whoever started it, who then ends the lease. Where there is no etcd the store lives in the process that started
the run; a server is then there as long as its connection is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.store import MemoryStore, RemoteStore, Store, StoreServer
from culm.errors import CulmError, RunError, UsageError
from culm.gnn.launch.base import Ticket
from culm.providers.nursery import readable
from culm.transport.sockets import SocketTransport

if TYPE_CHECKING:
    from culm.cluster.etcd import Access
    from culm.providers.etcd import PrivateEtcd

_FOREVER_S = 30 * 24 * 3600.0
_LEADER_S = 60.0
"""Nobody waits for the leader's lease to run out: when its process ends, so does all that it started."""

_PATIENCE_S = 30.0
"""Until etcd answers for the first time: on a busy machine that takes a while, and it was there a moment ago."""
_PASSWORD = "CULM_ETCD_PASSWORD"
_LOOK_S = 1.0
_ERASE_S = 5.0
"""For tidying up at the end: an etcd that hangs, or that is gone, must not keep the run."""

Evict = Callable[[str], Awaitable[object]]


@dataclass(frozen=True)
class Meeting:
    """The leader's side. `evict` ends the session that a key belongs to, as if its process were gone."""

    store: Store
    ticket: Ticket
    kind: str
    evict: Evict | None = None
    """None: the store sees by itself when a process ends."""
    private: PrivateEtcd | None = None
    patience_s: float = _PATIENCE_S
    """Until a private etcd that does not answer is taken to hang."""
    said: Callable[[str], None] = print

    async def tend(self) -> None:
        """Start a private etcd again, with all that it knew, whenever it has ended or hangs.

        RunError: it does not come back, or hangs again at once. An etcd of the user's is not ours to start: while that
        is out of reach, everyone waits.
        """
        while self.private is not None:
            answered = asyncio.Event()
            if await first(ended(self.private.pid), self._silent(answered)) == 1:
                self.private.kill()
                if not answered.is_set():
                    raise RunError(f"the private etcd does not answer for {self.patience_s:g} s: is the disk full?")
                self.said(f"the private etcd did not answer for {self.patience_s:g} s: it is started again")
            await self.private.start()

    async def _silent(self, answered: asyncio.Event) -> None:
        """Wait until the store leaves a question without an answer for too long."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self.patience_s):
                    await self.store.get("setup")
                answered.set()
                await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def meet(
    etcd: Access | None, run: str, token: str, *, suspect_after: float, said: Callable[[str], None]
) -> AsyncIterator[Meeting]:
    """The meeting of one run; its keys are gone afterwards. `said` gets a sentence where there is no etcd.

    UsageError: the etcd that was named can not be used.
    """
    ticket = Ticket(run, token, "127.0.0.1", 0, _FOREVER_S)
    async with contextlib.AsyncExitStack() as stack:
        private = await _private(stack, said) if etcd is None else None
        access = etcd if private is None else private.access
        if access is None:
            yield await stack.enter_async_context(_here(ticket))
        else:
            kind = "etcd" if private is None else "private etcd"
            found = await stack.enter_async_context(_in_etcd(ticket, access, kind, suspect_after))
            yield replace(found, private=private, patience_s=2 * suspect_after, said=said)


async def _private(stack: contextlib.AsyncExitStack, said: Callable[[str], None]) -> PrivateEtcd | None:
    """A private etcd; None where there is none."""
    try:
        from culm.providers.etcd import PrivateEtcd

        return await stack.enter_async_context(PrivateEtcd())
    except (ImportError, CulmError) as error:
        said(f"no private etcd ({error}): the store lives in this process, and a server that hangs is not noticed")
        return None


@contextlib.asynccontextmanager
async def _in_etcd(ticket: Ticket, access: Access, kind: str, suspect_after: float) -> AsyncIterator[Meeting]:
    from culm.cluster.etcd import EtcdStore
    from culm.cluster.timeouts import derive

    way = msgspec.json.encode((access, suspect_after)).decode()
    times = derive(_LEADER_S)
    async with await EtcdStore.open(access, _job(ticket), timeouts=times, patience_s=_PATIENCE_S) as store:
        try:
            yield Meeting(store, replace(ticket, store=way), kind, store.evict)
        finally:
            with contextlib.suppress(CulmError, TimeoutError):  # out of reach: one of our own is about to go anyway
                async with asyncio.timeout(_ERASE_S):
                    await store.erase()


@contextlib.asynccontextmanager
async def _here(ticket: Ticket) -> AsyncIterator[Meeting]:
    transport, store = SocketTransport(secret=ticket.token.encode()), MemoryStore()
    serving = asyncio.create_task(StoreServer(store, transport).serve())
    host, _, port = transport.address.rpartition(":")
    try:
        yield Meeting(store.client("leader"), replace(ticket, host=host, port=int(port)), "in the process")
    finally:
        serving.cancel()
        await transport.close()


@contextlib.asynccontextmanager
async def attend(ticket: Ticket) -> AsyncIterator[Store]:
    """A server's side. When the connection breaks, or the session is lost, every call and watch raises RunError."""
    if ticket.store:
        from culm.cluster.etcd import Access, EtcdStore
        from culm.cluster.timeouts import derive

        access, suspect_after = msgspec.json.decode(ticket.store, type=tuple[Access, float])
        times = derive(suspect_after)
        async with await EtcdStore.open(access, _job(ticket), timeouts=times, patience_s=_PATIENCE_S) as found:
            yield found
    else:
        async with _remote(ticket) as store:
            yield store


@contextlib.asynccontextmanager
async def _remote(ticket: Ticket) -> AsyncIterator[Store]:
    transport = SocketTransport(secret=ticket.token.encode())
    store = RemoteStore(f"{ticket.host}:{ticket.port}", transport)

    async def listen() -> None:
        while True:
            sender, body = await transport.letter()
            if sender == store.server or body is None:
                store.heed(body)

    listening = asyncio.create_task(listen())
    try:
        yield store
    finally:
        listening.cancel()
        await transport.close()


def _job(ticket: Ticket) -> str:
    return f"gnn-{ticket.run}"


def access_of(
    given: str | Access | None, *, user: str = "", ca: str = "", cert: str = "", key: str = ""
) -> Access | None:
    """What `etcd` stands for; the password of a user is in CULM_ETCD_PASSWORD. Raises UsageError for a wrong one."""
    if given is None and (user or ca or cert or key):
        raise UsageError("--etcd is missing: a user or certificates belong to an etcd of your own, so name its URL")
    if not isinstance(given, str):
        return given
    try:
        from culm.cluster.etcd import parse_access
    except ImportError as error:
        raise UsageError(f"--etcd is {given!r} and {error.name} is not installed: pip install {error.name}") from None
    return parse_access(given, user=user, password=os.environ.get(_PASSWORD, ""), ca=ca, cert=cert, key=key)


async def ended(pid: int) -> None:
    """Wait until a process of this machine has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await readable(descriptor)
    finally:
        os.close(descriptor)


async def first(*works: Coroutine[None, None, None]) -> int:
    """Which of these ends first; the others are cancelled. What it raises is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winner = next(i for i, task in enumerate(tasks) if task.done())
        tasks[winner].result()
        return winner
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
