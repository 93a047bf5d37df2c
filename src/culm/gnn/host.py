"""A server process of a run: takes a free seat, and serves on it, generation after generation.

It knows nothing but a ticket: where the store is, and the token. What it is for, it reads there. A replacement for a
lost server is started the same way and finds the one seat that is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from typing import TYPE_CHECKING, Protocol

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin would take the workers' cores

import torch

with contextlib.suppress(ImportError):  # here, since processes are forked out of one that has imported this file
    import culm.cluster.etcd  # noqa: F401 - a store may do without
from culm.errors import RunError
from culm.gnn.meeting import attend
from culm.gnn.parameters import ParameterSession
from culm.gnn.server import GraphSession
from culm.gnn.setup import Generation, Member, Setup, pack, unpack
from culm.gnn.share import share

if TYPE_CHECKING:
    from culm.cluster.store import Store
    from culm.gnn.launch.base import Ticket


class Session(Protocol):
    """What a server does in one generation."""

    address: str

    async def run(self, members: dict[str, str]) -> None:
        """Serve, with everyone's addresses, until cancelled, or until the generation is known to be broken."""

    async def close(self) -> None:
        """Leave everyone."""


def serve(ticket: Ticket) -> None:
    """The process, from its first moment to its last: until the store is gone, or goes on without it."""
    with contextlib.suppress(RunError):
        asyncio.run(_serve(ticket))


async def _serve(ticket: Ticket) -> None:
    async with attend(ticket) as store:
        stored = await store.get("setup")
        assert stored is not None
        setup = unpack(stored, Setup)
        seat = await _take_seat(store, setup)
        if seat is not None:
            torch.set_num_threads(setup.threads)
            await _generations(store, setup, seat, ticket.token)


async def _take_seat(store: Store, setup: Setup) -> str | None:
    for seat in setup.seats:
        if await store.swap(f"seats/{seat}", None, str(os.getpid()).encode(), session=True):
            return seat
    return None


async def _generations(store: Store, setup: Setup, seat: str, token: str) -> None:
    serving: asyncio.Task[None] | None = None
    try:
        async with contextlib.aclosing(store.watch("generation")) as changes:
            async for _, value in changes:
                if value is None:
                    continue
                await _ended(serving)
                serving = asyncio.create_task(_generation(store, setup, seat, token, unpack(value, Generation)))
                serving.add_done_callback(_complain)
    finally:
        await _ended(serving)


def _complain(serving: asyncio.Task[None]) -> None:
    """A server that fails must not live on as if it served: its seat becomes free, and somebody else tries."""
    error = None if serving.cancelled() else serving.exception()
    if error is None:
        return
    unexpected = error.split(RunError)[1] if isinstance(error, ExceptionGroup) else error
    if unexpected is not None and not isinstance(unexpected, RunError):
        traceback.print_exception(unexpected)
    os._exit(1)


async def _ended(serving: asyncio.Task[None] | None) -> None:
    if serving is not None:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _generation(store: Store, setup: Setup, seat: str, token: str, generation: Generation) -> None:
    """Meet everyone of the generation and serve until it ends."""
    session = await _session(store, setup, seat, token, generation)
    prefix = f"members/{generation.number}/"
    try:
        await store.put(prefix + seat, pack(Member(seat, session.address, os.getpid())), session=True)
        members: dict[str, str] = {}
        async with contextlib.aclosing(store.watch(prefix)) as changes:
            async for key, value in changes:
                if value is not None:
                    members[key.removeprefix(prefix)] = unpack(value, Member).address
                if set(members) == set(setup.seats):
                    break
        await session.run(members)
    finally:
        await session.close()


async def _session(store: Store, setup: Setup, seat: str, token: str, generation: Generation) -> Session:
    role, _, number = seat.partition("-")
    if role == "parameter":
        return ParameterSession(store, setup, int(number), token, generation)
    await asyncio.to_thread(share, setup, int(number))  # a large part takes a while, and the store wants to hear of us
    return GraphSession(store, setup, int(number), token, generation)
