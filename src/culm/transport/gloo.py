"""Sums over a group of workers by torch's Gloo: always on a copy, so that a failure half-way destroys nothing.

Gloo waits in threads of its own, and some of its waits can not be ended. So nothing of it is ever called or freed where
waiting would hurt: not on the event loop, nor in a thread that the end of the process waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from culm.errors import EpochClosed, NodeLost
from culm.transport.base import Address, Key

if TYPE_CHECKING:
    from culm.transport.base import Transport

A = ParamSpec("A")
T = TypeVar("T")

_TIMEOUT = timedelta(days=1)
"""Gloo's own time-out never decides: an epoch that ends abandons the group."""
_groups: set[Any] = set()
"""Groups that were not left: freeing one waits for what is under way in it, so it must never happen by the way."""
_stores: dict[str, Any] = {}
_stores_lock = threading.Lock()


class GlooGroup:
    """A Gloo process group outside of torch's global one. The first member lends the store where they meet."""

    def __init__(self, transport: Transport, key: Key, members: Sequence[Address]) -> None:
        self._transport, self._key, self._members = transport, key, tuple(members)
        self._rank = self._members.index(transport.address)
        self._group: Any = None
        self._loop = asyncio.get_running_loop()

    async def join(self) -> None:
        if len(self._members) == 1:
            return
        host = self._transport.address.rpartition(":")[0]
        if self._rank == 0:
            place = torch.tensor([await _aside(_lent_port, host), secrets.randbits(62)])
            for member in self._members[1:]:
                self._transport.send(member, self._key, [place])
        else:
            (sent,) = await self._transport.receive(self._key)
            assert sent is not None
            place = sent
        store = await self._explained(_entered, self._members[0].rpartition(":")[0], int(place[0]))
        self._group = await self._explained(self._meet, PrefixStore(str(int(place[1])), store), host)
        _groups.add(self._group)

    def _meet(self, store: Any, host: str) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = _TIMEOUT
        options._threads = 2
        return gloo(store, self._rank, len(self._members), options)

    async def _explained(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        try:
            return await _aside(slow, *args, **kwargs)
        except RuntimeError as error:
            raise _broken(len(self._members), error) from None

    async def all_reduce(self, tensor: Tensor) -> None:
        if len(self._members) == 1:
            return
        if self._group is None:
            raise EpochClosed("the group was left")
        loop, size = self._loop, len(self._members)
        done: asyncio.Future[None] = loop.create_future()

        def finished(future: Any) -> None:  # in a thread of the group, which must not hold it: it could not free itself
            error = None
            try:
                future.wait()
            except RuntimeError as reason:
                error = _broken(size, reason)
            _settle(loop, done, None, error)

        self._group.allreduce([tensor], dist.AllreduceOptions()).get_future().add_done_callback(finished)
        await done

    def close(self) -> None:
        if self._group is not None:
            last = [self._group]
            _groups.discard(self._group)
            self._group = None
            threading.Thread(target=last.clear, name="culm-gloo-end", daemon=True).start()


def _broken(size: int, reason: object) -> NodeLost:
    return NodeLost(f"a sum over {size} workers broke off: {reason}")


async def _aside(slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """Call in a thread that nobody waits for, unlike those of asyncio.to_thread: a call may never return."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            made = slow(*args, **kwargs)
        except Exception as error:
            _settle(loop, done, None, error)
        else:
            _settle(loop, done, made, None)

    threading.Thread(target=run, name="culm-gloo", daemon=True).start()
    return await done


def _settle(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    """From any thread: end a wait, if anybody still waits."""

    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)


def _lent_port(host: str) -> int:
    """Where the store that this process lends listens."""
    with _stores_lock:
        if host not in _stores:
            _stores[host] = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return int(_stores[host].port)


def _entered(host: str, port: int) -> Any:
    """A connection of the group's own, also to the store of this process: who waits on one for somebody that has died
    keeps everybody else from using it, for good."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
