"""The two sides of the transport behind one face: a promise that holds here holds in memory and over sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from culm.testing import run_virtual
from culm.transport.base import Key, Letter, Transport
from culm.transport.memory import MemoryNetwork
from culm.transport.sockets import SocketTransport

T = TypeVar("T")
SECRET = b"a secret of this run"
PATIENCE_S = 30.0
"""A wait that takes as long as this is a hang, and the test says so instead of hanging."""


def patiently(main: Coroutine[Any, Any, T]) -> T:
    """Run in real time, but not for ever."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, PATIENCE_S)

    return asyncio.run(bounded())


@dataclass(frozen=True)
class Side:
    """How to run a coroutine, and how to get endpoints in it."""

    name: str
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    @asynccontextmanager
    async def endpoints(self, count: int = 2) -> AsyncIterator[list[Transport]]:
        network = MemoryNetwork(latency=0.001)
        made: list[Transport] = [
            network.endpoint(f"endpoint-{i}") if self.name == "memory" else SocketTransport(secret=SECRET)
            for i in range(count)
        ]
        try:
            yield made
        finally:
            for transport in made:
                await leave(transport)


_gone: WeakSet[Transport] = WeakSet()


async def leave(transport: Transport) -> None:
    """Close an endpoint, once."""
    if transport not in _gone:
        _gone.add(transport)
        await transport.close()


MEMORY = Side("memory", run_virtual)
SOCKETS = Side("sockets", patiently)


def key(name: str = "0F0", *, epoch: int = 1, step: int = 0) -> Key:
    return Key(epoch, step, name)


async def lost(transport: Transport) -> Letter:
    """The next letter that says that a connection is lost; others are passed over."""
    while True:
        letter = await transport.letter()
        if letter.body is None:
            return letter


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal to the last bit, with the same type, shape, strides (where they say anything) and wish for a gradient."""
    if one is None or other is None:
        return one is other
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and (not one.numel() or one.stride() == other.stride())
        and one.requires_grad == other.requires_grad
        and raw(one) == raw(other)
    )


def raw(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return bytes(plain.as_strided(plain.shape, (1,)).view(torch.uint8).tolist())


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs a function; killed afterwards, if it is still there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        kill(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def exit_status(pid: int) -> int | None:
    """Of a child that ends by itself; None if it does not."""
    descriptor = os.pidfd_open(pid)

    async def ended() -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, done.set)
        await done.wait()

    try:
        patiently(ended())
    except TimeoutError:
        return None
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
