"""The rendezvous store of a group, whose members exchange its entries as frames of the transport."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch._C._distributed_c10d import Store

if TYPE_CHECKING:
    from culm.transport.interface import Address, FrameKey, Transport

A = ParamSpec("A")
T = TypeVar("T")

NEVER = timedelta(days=1)
"""A timeout that is not reached: an epoch that ends abandons the group."""


class MemberStore(Store):
    """One instance per member: an entry that one member sets is sent to all others.

    torch's TCPStore is not used: there, a wait for a member that has died does not end, and connecting may take the
    five seconds of a name server that does not answer.
    """

    def __init__(self, broadcast: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._broadcast = broadcast
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put_entry(key, data)
        self._broadcast(key, data)

    def put_entry(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these entries are here."""
        with self._changed:
            return self._entries.keys() >= set(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = NEVER) -> None:
        """Called by torch in threads of its own. Raises RuntimeError when the store is closed first."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._closed or self._entries.keys() >= set(keys), timeout.total_seconds()
            )
            if self._closed:
                raise RuntimeError("the group was left")
            if not found:
                raise RuntimeError(f"{', '.join(keys)} did not arrive within {timeout.total_seconds():g} s")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Rendezvous:
    """How the members of a group meet: a store of their own, for as long as they join."""

    def __init__(self, transport: Transport, key: FrameKey, members: Sequence[Address]) -> None:
        self._transport, self._key, self._members = transport, key, tuple(members)
        self.rank, self.size = self._members.index(transport.address), len(self._members)
        self._loop = asyncio.get_running_loop()
        self._sent_entries = 0
        self.store = MemberStore(lambda key, value: call_on_loop(self._loop, self._broadcast_entry, key, value))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that uses the store. Raises EpochClosed when the epoch ends first; the store is closed after
        an error, so that no thread waits in it."""
        working = asyncio.ensure_future(work)
        receiving = [asyncio.create_task(self._receive_entries(rank)) for rank in self._other_ranks()]
        for each in (working, *receiving):
            each.add_done_callback(retrieve_exception)
        try:
            done, _ = await asyncio.wait((working, *receiving), return_when=asyncio.FIRST_COMPLETED)
            for task in done - {working}:
                task.result()  # a receiving task ends only with an error
            return working.result()
        except BaseException:
            self.store.close()
            raise
        finally:
            for task in (working, *receiving):
                task.cancel()

    async def exchange(self, name: str, value: bytes) -> list[bytes]:
        """Give a value to all members. Returns the values of all members, by rank."""
        self.store.set(f"{name} {self.rank}", value)
        keys = [f"{name} {rank}" for rank in range(self.size)]
        await run_in_daemon_thread(self.store.wait, keys)
        return [self.store.get(key) for key in keys]

    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _broadcast_entry(self, key: str, value: bytes) -> None:
        """Send an entry of the store to all other members, in one frame each, numbered in the order of sending."""
        name = key.encode()
        body = torch.frombuffer(bytearray(len(name).to_bytes(4, "big") + name + value), dtype=torch.uint8)
        for rank in self._other_ranks():
            self._transport.send(self._members[rank], self._entry_key(self.rank, self._sent_entries), [body])
        self._sent_entries += 1

    async def _receive_entries(self, rank: int) -> None:
        for number in itertools.count():
            (entry,) = await self._transport.receive(self._entry_key(rank, number))
            assert entry is not None
            body = bytes(entry.tolist())
            end = 4 + int.from_bytes(body[:4], "big")
            self.store.put_entry(body[4:end].decode(), body[end:])

    def _entry_key(self, rank: int, number: int) -> FrameKey:
        return self._key._replace(name=f"{self._key.name} from {rank} {number}")


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """A callback for a task that may end after its group was left: nobody reads its exception then."""
    if not task.cancelled():
        task.exception()


async def run_in_daemon_thread(slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """Call a function in a daemon thread: unlike with asyncio.to_thread, the process can end while the call hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = slow(*args, **kwargs)
        except Exception as error:
            resolve_future(loop, done, None, error)
        else:
            resolve_future(loop, done, result, None)

    threading.Thread(target=run, name="culm-group", daemon=True).start()
    return await done


def resolve_future(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], value: Any, error: Exception | None
) -> None:
    """Set the result or the exception of a future that is not done. May be called from any thread."""

    def resolve() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    call_on_loop(loop, resolve)


def call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[A, None], *args: A.args, **kwargs: A.kwargs) -> None:
    """Schedule a call on the event loop, from any thread. Does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(functools.partial(call, *args, **kwargs))
