"""Sums over a group of workers with torch's Gloo. Callers pass copies, so that a failure half-way destroys nothing.

Some waits inside Gloo cannot be ended. So no Gloo call is result, and no Gloo object freed, on the event loop or in a
thread that the process joins at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from culm.errors import EpochClosed, NodeLost
from culm.transport.interface import Address, FrameKey

if TYPE_CHECKING:
    from culm.transport.interface import Transport

A = ParamSpec("A")
T = TypeVar("T")

_TIMEOUT = timedelta(days=1)
"""Gloo's own timeout is never reached: an epoch that ends abandons the group."""
_open_groups: dict[Any, GlooStore] = {}
"""Groups that were not closed. A reference keeps them: freeing a group waits for its reduces, so `close` does it."""


class GlooStore(Store):
    """The rendezvous store of a group, one instance per member: an entry that one member sets is sent to all others.

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

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Called by Gloo in its own thread. Raises RuntimeError when the store is closed first."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._entries.keys() >= set(keys), timeout.total_seconds())
            if self._closed:
                raise RuntimeError("the group was left")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class GlooGroup:
    """A Gloo process group beside torch's global one. Its members find each other through frames of the transport."""

    def __init__(self, transport: Transport, key: FrameKey, members: Sequence[Address]) -> None:
        self._transport, self._key, self._members = transport, key, tuple(members)
        self._rank = self._members.index(transport.address)
        self._group: Any = None
        self._sent_entries = 0
        self._loop = asyncio.get_running_loop()

    async def join(self) -> None:
        if len(self._members) == 1:
            return
        store = GlooStore(lambda key, value: _call_on_loop(self._loop, self._broadcast_entry, key, value))
        others = [rank for rank in range(len(self._members)) if rank != self._rank]
        host = self._transport.address.rpartition(":")[0]
        creating = asyncio.create_task(self._run_or_node_lost(self._create_process_group, store, host))
        tasks: list[asyncio.Task[Any]] = [
            creating,
            *(asyncio.create_task(self._receive_entries(rank, store)) for rank in others),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._group = (
                creating if creating in done else done.pop()
            ).result()  # a receiving task ends only with an error
            _open_groups[self._group] = store
        except BaseException:
            store.close()
            raise
        finally:
            for task in tasks:
                task.cancel()

    def _broadcast_entry(self, key: str, value: bytes) -> None:
        """Send an entry of the store to all other members, in one frame each, numbered in the order of sending."""
        name = key.encode()
        body = torch.frombuffer(bytearray(len(name).to_bytes(4, "big") + name + value), dtype=torch.uint8)
        for rank, member in enumerate(self._members):
            if rank != self._rank:
                self._transport.send(member, self._entry_key(self._rank, self._sent_entries), [body])
        self._sent_entries += 1

    async def _receive_entries(self, rank: int, store: GlooStore) -> None:
        for number in itertools.count():
            (entry,) = await self._transport.receive(self._entry_key(rank, number))
            assert entry is not None
            body = bytes(entry.tolist())
            end = 4 + int.from_bytes(body[:4], "big")
            store.put_entry(body[4:end].decode(), body[end:])

    def _entry_key(self, rank: int, number: int) -> FrameKey:
        return self._key._replace(name=f"{self._key.name} from {rank} {number}")

    def _create_process_group(self, store: Any, host: str) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = _TIMEOUT
        options._threads = 2
        return gloo(store, self._rank, len(self._members), options)

    async def _run_or_node_lost(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        try:
            return await _run_in_daemon_thread(slow, *args, **kwargs)
        except RuntimeError as error:
            raise _reduce_failed(len(self._members), error) from None

    async def all_reduce(self, *tensors: Tensor) -> None:
        if len(self._members) == 1:
            return
        if self._group is None:
            raise EpochClosed("the group was left")
        await asyncio.gather(*map(self._start_all_reduce, tensors))

    def _start_all_reduce(self, tensor: Tensor) -> asyncio.Future[None]:
        loop, size = self._loop, len(self._members)
        done: asyncio.Future[None] = loop.create_future()

        def finished(
            future: Any,
        ) -> (
            None
        ):  # runs in a thread of the group; must not hold a reference to the group, which could then not be freed
            error = None
            try:
                future.wait()
            except RuntimeError as reason:
                error = _reduce_failed(size, reason)
            _resolve_future(loop, done, None, error)

        self._group.allreduce([tensor], dist.AllreduceOptions()).get_future().add_done_callback(finished)
        return done

    def close(self) -> None:
        if self._group is not None:
            released = [self._group]
            del _open_groups[self._group]
            self._group = None
            threading.Thread(target=released.clear, name="culm-gloo-end", daemon=True).start()


def _reduce_failed(size: int, reason: object) -> NodeLost:
    return NodeLost(f"a sum over {size} workers broke off: {reason}")


async def _run_in_daemon_thread(slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """Call a function in a daemon thread: unlike with asyncio.to_thread, the process can end while the call hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = slow(*args, **kwargs)
        except Exception as error:
            _resolve_future(loop, done, None, error)
        else:
            _resolve_future(loop, done, result, None)

    threading.Thread(target=run, name="culm-gloo", daemon=True).start()
    return await done


def _resolve_future(
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

    _call_on_loop(loop, resolve)


def _call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[A, None], *args: A.args, **kwargs: A.kwargs) -> None:
    """Schedule a call on the event loop, from any thread. Does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(functools.partial(call, *args, **kwargs))
