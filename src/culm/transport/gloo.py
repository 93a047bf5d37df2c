"""Sums over a group of workers by torch's Gloo: always on a copy, so that a failure half-way destroys nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from culm.errors import RunError
from culm.transport.base import Address, Key

if TYPE_CHECKING:
    from culm.transport.base import Transport

_TIMEOUT = timedelta(days=1)
"""Gloo's own time-out never decides: an epoch that ends abandons the group."""
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
            store = await asyncio.to_thread(_own_store, host)
            for member in self._members[1:]:
                self._transport.send(member, self._key, [torch.tensor([store.port])])
        else:
            (port,) = await self._transport.receive(self._key)
            assert port is not None
            first = self._members[0].rpartition(":")[0]
            store = await asyncio.to_thread(_their_store, first, int(port))
        self._group = await asyncio.to_thread(self._meet, store, host)

    def _meet(self, store: Any, host: str) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = _TIMEOUT
        options._threads = 2
        scoped = PrefixStore("/".join(map(str, self._key)), store)
        return gloo(scoped, self._rank, len(self._members), options)

    async def all_reduce(self, tensor: Tensor) -> None:
        if self._group is None:
            return
        done: asyncio.Future[None] = self._loop.create_future()
        options = dist.AllreduceOptions()
        work = self._group.allreduce([tensor], options)

        def finished(future: Any) -> None:
            try:
                future.wait()
                error = None
            except RuntimeError as reason:
                error = RunError(f"a reduce failed: {reason}")
            self._loop.call_soon_threadsafe(_settle, done, error)

        work.get_future().add_done_callback(finished)
        await done

    def close(self) -> None:
        self._group = None


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _own_store(host: str) -> Any:
    with _stores_lock:
        if host not in _stores:
            _stores[host] = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return _stores[host]


def _their_store(host: str, port: int) -> Any:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
