"""The transports behind one interface: a contract that is tested here holds for all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from culm.testing import run_virtual
from culm.transport.frames import frame_codec
from culm.transport.frames.handshake import dialler_steps
from culm.transport.frames.lanes import LANES as LANES_OF_A_RUN
from culm.transport.frames.lanes import OutboundLanes
from culm.transport.frames.simulated_network import SimulatedNetwork
from culm.transport.frames.sockets import MIN_SHARED_BYTES, SocketTransport
from culm.transport.interface import ControlMessage, FrameKey, Transport

T = TypeVar("T")
SECRET = b"a secret of this run"
TIMEOUT_S = 30.0
"""A wait that takes this long is a hang: the test fails instead of hanging."""


def run_with_timeout(main: Coroutine[Any, Any, T]) -> T:
    """Run in real time, with a timeout."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(bounded())


@dataclass(frozen=True)
class TransportVariant:
    """How to run a coroutine, and how to get endpoints in it."""

    name: str
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    @asynccontextmanager
    async def endpoints(self, count: int = 2) -> AsyncIterator[list[Transport]]:
        network = SimulatedNetwork(latency=0.001)
        has_lanes = "lanes" in self.name
        made: list[Transport] = [
            network.endpoint(f"endpoint-{i}")
            if self.name == "memory"
            else SocketTransport(
                secret=SECRET,
                encryption="on" if "encrypted" in self.name else "auto",
                min_shared_bytes=None if has_lanes else MIN_SHARED_BYTES,
                lanes=3 if has_lanes else LANES_OF_A_RUN,
            )
            for i in range(count)
        ]
        try:
            with small_pieces() if has_lanes else nullcontext():
                yield made
        finally:
            for transport in made:
                await close_once(transport)


SMALL_PIECE = 1003
"""Bytes. Not a multiple of the size of an element."""


@contextmanager
def small_pieces() -> Iterator[None]:
    """While this is open, small payloads are cut, and the first one finds its lanes open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_codec, "PIECE_BYTES", SMALL_PIECE)
        patch.setattr(OutboundLanes, "start", _open_at_once)
        yield


def _open_at_once(lanes: OutboundLanes) -> None:
    if not lanes._is_started:
        lanes._is_started = True
        lanes._open()


_closed_transports: WeakSet[Transport] = WeakSet()


async def close_once(transport: Transport) -> None:
    """Close an endpoint, once."""
    if transport not in _closed_transports:
        _closed_transports.add(transport)
        await transport.close()


MEMORY = TransportVariant("memory", run_virtual)
SOCKETS = TransportVariant("sockets", run_with_timeout)
ENCRYPTED = TransportVariant("encrypted", run_with_timeout)
LANES = TransportVariant("lanes", run_with_timeout)
ENCRYPTED_LANES = TransportVariant("encrypted lanes", run_with_timeout)


def frame_key(name: str = "0F0", *, epoch: int = 1, step: int = 0) -> FrameKey:
    return FrameKey(epoch, step, name)


async def next_lost_connection(transport: Transport) -> ControlMessage:
    """The next message that reports a lost connection; others are skipped."""
    while True:
        letter = await transport.receive_message()
        if letter.body is None:
            return letter


def hello_bytes(dialled: str, name: str = "you", *, encrypt: bool = False) -> bytes:
    """What a dialler sends first. It needs no secret."""
    sent: list[bytes] = []
    next(dialler_steps(sent.append, b"unknown", name, dialled, encrypt=encrypt))
    return sent[0]


def same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    """Assert equality to the last bit, with the same type, shape, strides (where they matter) and requires_grad."""
    if one is None or other is None:
        return one is other
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and (not one.numel() or one.stride() == other.stride())
        and one.requires_grad == other.requires_grad
        and tensor_bytes(one) == tensor_bytes(other)
    )


def tensor_bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return bytes(plain.as_strided(plain.shape, (1,)).view(torch.uint8).tolist())


@contextmanager
def forked_child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs a function. It is killed afterwards if it is still alive."""
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
        kill_process(pid)


def kill_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def exit_status(pid: int) -> int | None:
    """The exit code of a child that ends by itself; None if it does not end."""
    descriptor = os.pidfd_open(pid)

    async def ended() -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, done.set)
        await done.wait()

    try:
        run_with_timeout(ended())
    except TimeoutError:
        return None
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
