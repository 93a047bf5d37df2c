"""Sums over a group of workers by torch's Gloo: always on a copy, so that a failure half-way destroys nothing.

Gloo waits in threads of its own, and some of its waits can not be ended. So nothing of it is ever called or freed where
waiting would hurt: not on the event loop, nor in a thread that the end of the process waits for.
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
from culm.transport.base import Address, Key

if TYPE_CHECKING:
    from culm.transport.base import Transport

A = ParamSpec("A")
T = TypeVar("T")

_TIMEOUT = timedelta(days=1)
"""Gloo's own time-out never decides: an epoch that ends abandons the group."""
_groups: dict[Any, Meeting] = {}
"""Groups that were not left: freeing one waits for what is under way in it, so it must never happen by the way."""


class Meeting(Store):
    """The store in which members of a group find each other, in each of them: what one sets, all others are told.

    Not torch's TCPStore: who waits there for a member that has died waits on, and to connect to it may take the five
    seconds of a name server that does not answer.
    """

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._known: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over = False

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, data)
        self._tell(key, data)

    def learn(self, key: str, value: bytes) -> None:
        with self._changed:
            self._known[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Called in a thread of its own, which may wait. Raises RuntimeError when the group is left meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._known.keys() >= set(keys), timeout.total_seconds())
            if self._over:
                raise RuntimeError("the group was left")

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


class GlooGroup:
    """A Gloo process group outside of torch's global one. Its members meet through frames of the transport."""

    def __init__(self, transport: Transport, key: Key, members: Sequence[Address]) -> None:
        self._transport, self._key, self._members = transport, key, tuple(members)
        self._rank = self._members.index(transport.address)
        self._group: Any = None
        self._told = 0
        self._loop = asyncio.get_running_loop()

    async def join(self) -> None:
        if len(self._members) == 1:
            return
        meeting = Meeting(lambda key, value: _soon(self._loop, self._tell, key, value))
        others = [rank for rank in range(len(self._members)) if rank != self._rank]
        host = self._transport.address.rpartition(":")[0]
        meet = asyncio.create_task(self._explained(self._meet, meeting, host))
        tasks: list[asyncio.Task[Any]] = [meet, *(asyncio.create_task(self._hear(rank, meeting)) for rank in others)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._group = (meet if meet in done else done.pop()).result()  # who hears ends with an error alone
            _groups[self._group] = meeting
        except BaseException:
            meeting.close()
            raise
        finally:
            for task in tasks:
                task.cancel()

    def _tell(self, key: str, value: bytes) -> None:
        """One frame for each of the others, numbered in the order in which they are sent."""
        word = key.encode()
        body = torch.frombuffer(bytearray(len(word).to_bytes(4, "big") + word + value), dtype=torch.uint8)
        for rank, member in enumerate(self._members):
            if rank != self._rank:
                self._transport.send(member, self._frame(self._rank, self._told), [body])
        self._told += 1

    async def _hear(self, rank: int, meeting: Meeting) -> None:
        for number in itertools.count():
            (sent,) = await self._transport.receive(self._frame(rank, number))
            assert sent is not None
            body = bytes(sent.tolist())
            end = 4 + int.from_bytes(body[:4], "big")
            meeting.learn(body[4:end].decode(), body[end:])

    def _frame(self, rank: int, number: int) -> Key:
        return self._key._replace(name=f"{self._key.name} from {rank} {number}")

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

    async def all_reduce(self, *tensors: Tensor) -> None:
        if len(self._members) == 1:
            return
        if self._group is None:
            raise EpochClosed("the group was left")
        await asyncio.gather(*map(self._started, tensors))

    def _started(self, tensor: Tensor) -> asyncio.Future[None]:
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
        return done

    def close(self) -> None:
        if self._group is not None:
            last = [self._group]
            del _groups[self._group]
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

    _soon(loop, settle)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[A, None], *args: A.args, **kwargs: A.kwargs) -> None:
    """On the loop, from any thread, as long as there is one."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(functools.partial(call, *args, **kwargs))
