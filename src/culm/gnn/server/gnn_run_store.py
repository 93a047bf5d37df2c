"""The store that the servers of a run share, and the ticket with which a server process finds it.

The store is a private etcd on this machine, or the user's own. A server belongs to the run as long as its lease: a
server that hangs loses it, is replaced, and can change nothing when it wakes up. If a server process ends, the leader
notices at once and revokes the lease. Without etcd, the store lives in the process that started the run; a server then
belongs to the run as long as its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.store.store import MemoryStore, RemoteStore, Store, StoreServer
from culm.errors import CulmError, RunError, UsageError
from culm.gnn.launch.launcher import Ticket
from culm.providers.fork_server import wait_readable
from culm.transport.frames.sockets import SocketTransport

if TYPE_CHECKING:
    from culm.cluster.store.etcd import EtcdAccess
    from culm.providers.private_etcd import PrivateEtcd

_SERVER_LIFETIME_S = 30 * 24 * 3600.0
_LEADER_LEASE_S = 60.0
"""Lease of the leader. No process waits for it to expire: when the leader's process ends, all its servers end too."""

_CONNECT_TIMEOUT_S = 30.0
"""Timeout of the first answer of etcd. On a busy machine it takes a while, although etcd was running a moment ago."""
_PASSWORD_VARIABLE = "CULM_ETCD_PASSWORD"
_POLL_S = 1.0
_ERASE_TIMEOUT_S = 5.0
"""Timeout of the cleanup at the end. An etcd that hangs or is gone must not delay the run."""

EvictSession = Callable[[str], Awaitable[object]]


@dataclass(frozen=True)
class RunStore:
    """The store of a run, for the leader. `evict` ends the session that owns a key, as if its process had ended."""

    store: Store
    ticket: Ticket
    kind: str
    evict: EvictSession | None = None
    """None if the store itself notices the end of a process."""
    private_etcd: PrivateEtcd | None = None
    hang_timeout_s: float = _CONNECT_TIMEOUT_S
    """Seconds after which a private etcd that does not answer is considered to hang."""
    on_message: Callable[[str], None] = print

    async def keep_etcd_running(self) -> None:
        """Restart the private etcd, with its data, whenever it has ended or hangs.

        Raises RunError if it does not come back or hangs again at once. A user's etcd is never restarted; while it is
        unreachable, all servers wait.
        """
        while self.private_etcd is not None:
            answered = asyncio.Event()
            if (
                await wait_for_first(
                    wait_until_process_ends(self.private_etcd.pid), self._wait_until_unresponsive(answered)
                )
                == 1
            ):
                self.private_etcd.kill()
                if not answered.is_set():
                    raise RunError(f"the private etcd does not answer for {self.hang_timeout_s:g} s: is the disk full?")
                self.on_message(f"the private etcd did not answer for {self.hang_timeout_s:g} s: restarting it")
            await self.private_etcd.start()

    async def _wait_until_unresponsive(self, answered: asyncio.Event) -> None:
        """Return when the store has not answered a request for `hang_timeout_s`."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self.hang_timeout_s):
                    await self.store.get("setup")
                answered.set()
                await asyncio.sleep(_POLL_S)


@contextlib.asynccontextmanager
async def open_run_store(
    etcd: EtcdAccess | None, run: str, token: str, *, suspect_after: float, on_message: Callable[[str], None]
) -> AsyncIterator[RunStore]:
    """Open the store of one run; its keys are deleted afterwards. `on_message` gets a sentence if there is no etcd.

    Raises UsageError if the given etcd cannot be used.
    """
    ticket = Ticket(run, token, "127.0.0.1", 0, _SERVER_LIFETIME_S)
    async with contextlib.AsyncExitStack() as stack:
        private = await _start_private_etcd(stack, on_message) if etcd is None else None
        access = etcd if private is None else private.access
        if access is None:
            yield await stack.enter_async_context(_open_in_process(ticket))
        else:
            kind = "etcd" if private is None else "private etcd"
            run_store = await stack.enter_async_context(_open_in_etcd(ticket, access, kind, suspect_after))
            yield replace(run_store, private_etcd=private, hang_timeout_s=2 * suspect_after, on_message=on_message)


async def _start_private_etcd(
    stack: contextlib.AsyncExitStack, on_message: Callable[[str], None]
) -> PrivateEtcd | None:
    """Start a private etcd; None if that is not possible."""
    try:
        from culm.providers.private_etcd import PrivateEtcd

        return await stack.enter_async_context(PrivateEtcd())
    except (ImportError, CulmError) as error:
        on_message(
            f"no private etcd ({error}): the store lives in this process, and servers that hang are not detected"
        )
        return None


@contextlib.asynccontextmanager
async def _open_in_etcd(ticket: Ticket, access: EtcdAccess, kind: str, suspect_after: float) -> AsyncIterator[RunStore]:
    from culm.cluster.store.etcd import EtcdStore
    from culm.cluster.timeouts import derive_timeouts

    encoded_access = msgspec.json.encode((access, suspect_after)).decode()
    timeouts = derive_timeouts(_LEADER_LEASE_S)
    async with await EtcdStore.open(
        access, _etcd_job_name(ticket), timeouts=timeouts, timeout_s=_CONNECT_TIMEOUT_S
    ) as store:
        try:
            yield RunStore(store, replace(ticket, store=encoded_access), kind, store.evict)
        finally:
            with contextlib.suppress(
                CulmError, TimeoutError
            ):  # unreachable; a private etcd is about to be removed anyway
                async with asyncio.timeout(_ERASE_TIMEOUT_S):
                    await store.delete_all()


@contextlib.asynccontextmanager
async def _open_in_process(ticket: Ticket) -> AsyncIterator[RunStore]:
    transport, store = SocketTransport(secret=ticket.token.encode()), MemoryStore()
    serving = asyncio.create_task(StoreServer(store, transport).serve())
    host, _, port = transport.address.rpartition(":")
    try:
        yield RunStore(store.client("leader"), replace(ticket, host=host, port=int(port)), "in the process")
    finally:
        serving.cancel()
        await transport.close()


@contextlib.asynccontextmanager
async def connect_run_store(ticket: Ticket) -> AsyncIterator[Store]:
    """Connect a server to the store. If the connection breaks or the session is lost, every call and watch raises
    RunError."""
    if ticket.store:
        from culm.cluster.store.etcd import EtcdAccess, EtcdStore
        from culm.cluster.timeouts import derive_timeouts

        access, suspect_after = msgspec.json.decode(ticket.store, type=tuple[EtcdAccess, float])
        timeouts = derive_timeouts(suspect_after)
        async with await EtcdStore.open(
            access, _etcd_job_name(ticket), timeouts=timeouts, timeout_s=_CONNECT_TIMEOUT_S
        ) as store:
            yield store
    else:
        async with _connect_remote(ticket) as store:
            yield store


@contextlib.asynccontextmanager
async def _connect_remote(ticket: Ticket) -> AsyncIterator[Store]:
    transport = SocketTransport(secret=ticket.token.encode())
    store = RemoteStore(f"{ticket.host}:{ticket.port}", transport)

    async def listen() -> None:
        while True:
            sender, body = await transport.receive_message()
            if sender == store.server or body is None:
                store.handle_answer(body)

    listening = asyncio.create_task(listen())
    try:
        yield store
    finally:
        listening.cancel()
        await transport.close()


def _etcd_job_name(ticket: Ticket) -> str:
    return f"gnn-{ticket.run}"


def resolve_etcd_access(
    etcd: str | EtcdAccess | None,
    *,
    user: str = "",
    ca: str = "",
    cert: str = "",
    key: str = "",
    insecure: bool = False,
) -> EtcdAccess | None:
    """Return the access for `etcd`; the user's password is read from CULM_ETCD_PASSWORD. Raises UsageError for
    invalid values."""
    if etcd is None and (user or ca or cert or key):
        raise UsageError("--etcd is missing: a user or certificates only apply to an etcd of your own, so give its URL")
    if not isinstance(etcd, str):
        return etcd
    try:
        from culm.cluster.store.etcd import parse_etcd_access
        from culm.cluster.store.etcd.etcd_access import check_password_is_encrypted
    except ImportError as error:
        raise UsageError(f"--etcd is {etcd!r} and {error.name} is not installed: pip install {error.name}") from None
    access = parse_etcd_access(
        etcd, user=user, password=os.environ.get(_PASSWORD_VARIABLE, ""), ca=ca, cert=cert, key=key
    )
    if not insecure:
        check_password_is_encrypted(access)
    return access


async def wait_until_process_ends(pid: int) -> None:
    """Wait until a process of this machine has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def wait_for_first(*coroutines: Coroutine[None, None, None]) -> int:
    """Return the index of the coroutine that ends first and cancel the others. Raises its error if it failed."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winner = next(i for i, task in enumerate(tasks) if task.done())
        tasks[winner].result()
        return winner
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
