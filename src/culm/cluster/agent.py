"""The agent: a small coroutine on each node. It joins, starts the worker, passes epochs on and, if it is first, leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from culm.cluster.leader import Leader
from culm.cluster.setup import NodeRecord, decode_setup, encode
from culm.cluster.store import RemoteStore, Store
from culm.errors import NodeLost, RunError
from culm.runtime import epoch as letters

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Address, Transport

StartWorker = Callable[["Address"], "Awaitable[None]"]
"""Starts the worker of this node, given the agent's address; the awaitable ends when the worker does."""


class Agent:
    """One node of a run."""

    def __init__(
        self,
        job: Job,
        node: int,
        fingerprint: str,
        transport: Transport,
        clock: Clock,
        store: Store,
        start_worker: StartWorker,
    ) -> None:
        self.job, self.node, self.fingerprint = job, node, fingerprint
        self.transport, self.clock, self.store = transport, clock, store
        self._start_worker = start_worker
        self._worker_address: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._leader: Leader | None = None

    async def run(self) -> None:
        """Until the run has a result, the worker died, or the store is out of reach."""
        reading = asyncio.create_task(self._read_letters())
        worker = asyncio.ensure_future(self._start_worker(self.transport.address))
        following = asyncio.create_task(self._follow())
        tasks = [reading, worker, following]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if worker.done() and not following.done():
                await self._worker_ended(following)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError, RunError):
                    await task

    async def _worker_ended(self, following: asyncio.Task[None]) -> None:
        """After a result that is the normal end; before, the node leaves by ending its session in the store."""
        if self._leader is not None:
            self._leader.inbox.put_nowait(
                NodeLost(f"the worker of node {self.node} died, and nobody else holds its layers")
            )
        with contextlib.suppress(asyncio.TimeoutError, RunError):
            await asyncio.wait_for(asyncio.shield(following), timeout=0.2 if self._leader is None else 10.0)

    async def _follow(self) -> None:
        """Join, lead if nobody does, and pass on what the store says until there is a result."""
        worker = await self._worker_address
        leading = await self._lead_if_first()
        record = NodeRecord(self.node, self.transport.address, worker, self.fingerprint)
        await self.store.put(f"nodes/{self.node}", encode(record), session=True)
        passing = asyncio.create_task(self._pass_epochs(worker))
        try:
            async for _, value in self.store.watch("result"):
                if value is not None:
                    self.transport.post(worker, letters.encode(letters.Stop()))
                    return
        finally:
            passing.cancel()
            if leading is not None:
                leading.cancel()

    async def _lead_if_first(self) -> asyncio.Task[None] | None:
        if not await self.store.swap("leader", None, self.transport.address.encode()):
            return None
        setup = await self.store.get("setup")
        assert setup is not None
        self._leader = Leader(self.job, decode_setup(setup), self.transport, self.clock, self.store)
        return asyncio.create_task(self._leader.run())

    async def _pass_epochs(self, worker: Address) -> None:
        async for _, value in self.store.watch("epoch"):
            if value is not None:
                self.transport.post(worker, value)

    async def _read_letters(self) -> None:
        while True:
            sender, body = await self.transport.letter()
            if isinstance(self.store, RemoteStore) and sender == self.store.server:
                self.store.heed(body)
                if body is None:
                    return  # the launcher is gone, and with it the run
            elif body is not None:
                self._heed(letters.decode(body))

    def _heed(self, message: letters.Message) -> None:
        if isinstance(message, letters.Hello):
            if not self._worker_address.done():
                self._worker_address.set_result(message.address)
        elif self._leader is not None:
            self._leader.inbox.put_nowait(message)
