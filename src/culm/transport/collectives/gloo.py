"""Sums over a group of workers with torch's Gloo. Callers pass copies, so that a failure half-way destroys nothing.

Some waits inside Gloo cannot be ended. So no Gloo call is made, and no Gloo object freed, on the event loop or in a
thread that the process joins at its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from culm.errors import EpochClosed, NodeLost
from culm.transport.collectives.member_store import (
    NEVER,
    MemberStore,
    Rendezvous,
    resolve_future,
    run_in_daemon_thread,
)
from culm.transport.interface import Address, FrameKey

if TYPE_CHECKING:
    from culm.transport.interface import Transport

_open_groups: dict[Any, MemberStore] = {}
"""Groups that were not closed. A reference keeps them: freeing a group waits for its reduces, so `close` does it."""


class GlooGroup:
    """A Gloo process group beside torch's global one. Its members find each other through frames of the transport."""

    library = "gloo"
    fallback_reason = ""
    on_device = False
    is_connecting = False

    def __init__(self, transport: Transport, key: FrameKey, members: Sequence[Address]) -> None:
        self._transport, self._key, self._members = transport, key, tuple(members)
        self._group: Any = None
        self._loop = asyncio.get_running_loop()

    async def join(self) -> None:
        if len(self._members) > 1:
            rendezvous = Rendezvous(self._transport, self._key, self._members)
            self._group = await rendezvous.run(self._connect(rendezvous))
            _open_groups[self._group] = rendezvous.store

    async def _connect(self, rendezvous: Rendezvous) -> Any:
        host = self._transport.address.rpartition(":")[0]
        try:
            return await run_in_daemon_thread(_create_process_group, rendezvous, host)
        except RuntimeError as error:
            raise reduce_failed(len(self._members), error) from None

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
                error = reduce_failed(size, reason)
            resolve_future(loop, done, None, error)

        self._group.allreduce([tensor], dist.AllreduceOptions()).get_future().add_done_callback(finished)
        return done

    def close(self) -> None:
        if self._group is not None:
            released = [self._group]
            del _open_groups[self._group]
            self._group = None
            threading.Thread(target=released.clear, name="culm-gloo-end", daemon=True).start()


def _create_process_group(rendezvous: Rendezvous, host: str) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = NEVER
    options._threads = 2
    return gloo(rendezvous.store, rendezvous.rank, rendezvous.size, options)


def reduce_failed(size: int, reason: object) -> NodeLost:
    """The error of a sum that broke off. It is a suspicion: a member may be lost."""
    return NodeLost(f"a sum over {size} workers broke off: {reason}")
