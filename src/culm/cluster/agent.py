"""The agent: a small coroutine on each node. It joins, starts the worker, passes epochs on and, if first, leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from culm.cluster.leader import Leader
from culm.cluster.notice import NoNotice
from culm.cluster.setup import NodeRecord, Result, Setup, decode_setup, encode
from culm.cluster.store import RemoteStore, Store
from culm.cluster.vigil import Vigil
from culm.errors import NodeLost, RunError
from culm.runtime import epoch as letters

if TYPE_CHECKING:
    from culm.cluster.notice import NoticeSource
    from culm.cluster.probe import Prober
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Address, Transport

StartWorker = Callable[["Address"], "Awaitable[str | None]"]
"""Starts the worker of this node, given the agent's address; the awaitable ends when the worker does, and says how that
came about where people should hear of it."""
_TELL_S = 0.5
"""How long it may take to say how a worker has ended: its work waits for others to take it over."""
_PATIENCE_S = 5.0
"""How long a worker may take to end by itself, and a leader to put the result into the store."""


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
        notices: NoticeSource | None = None,
        *,
        prober: Prober | None = None,
        zone: str = "",
    ) -> None:
        """`prober` looks after connections that break, where the store does not know of them by itself."""
        self.zone, self._prober = zone, prober
        self.job, self.node, self.fingerprint = job, node, fingerprint
        self.transport, self.clock, self.store = transport, clock, store
        self._start_worker = start_worker
        self._notices = notices or NoNotice()
        self._leaves_in: float | None = None
        self._relieved = asyncio.Event()
        """Set when this node has notice and nothing more to give."""
        self._life = 0
        """How often the worker was started anew."""
        self._renewal = asyncio.Event()
        self._worker_address: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._leader: Leader | None = None

    async def run(self) -> bool:
        """Until the run has a result or, after a notice, needs nothing from here (True), or until the worker died or
        the others took this node for dead (False: its machine may come back as a new node). Nothing of it is left then.

        The node's session in the store should end right after: that is how the others hear of a node that is gone.
        """
        reading = asyncio.create_task(self._read_letters())
        worker = asyncio.ensure_future(self._keep_worker())
        following = asyncio.create_task(self._follow())
        leaving = asyncio.create_task(self._leave())
        try:
            await asyncio.wait([reading, worker, following, leaving], return_when=asyncio.FIRST_COMPLETED)
            if _went_well(following):
                await asyncio.wait([worker], timeout=_PATIENCE_S)  # it was told to stop, and may have to tidy up
            elif worker.done() and self._leader is not None and self._leader.tenure.setup.strategy == "none":
                self._leader.inbox.put_nowait(self._leader.tenure.lost(self.node))
                await asyncio.wait([following], timeout=_PATIENCE_S)
            return _went_well(following) or _went_well(leaving)
        finally:
            await _ended(reading, worker, following, leaving)
            if self._prober is not None:
                await self._prober.close()

    async def _keep_worker(self) -> None:
        """The worker and, as often as the leader says so, another in its place. Ends when one ends by itself, and says
        how, so that it is known when this node is missed."""
        while True:
            working = asyncio.ensure_future(self._start_worker(self.transport.address))
            tending = asyncio.ensure_future(self._tend())
            try:
                await asyncio.wait([working, tending], return_when=asyncio.FIRST_COMPLETED)
                if not tending.done():
                    how = working.result()
                    if how is not None:
                        await asyncio.wait([asyncio.ensure_future(self._tell_end(how))], timeout=_TELL_S)
                    return
                tending.result()
            finally:
                await _ended(working, tending)
            self._life += 1
            self._worker_address = asyncio.get_running_loop().create_future()

    async def _tell_end(self, how: str) -> None:
        with contextlib.suppress(RunError):
            await self.store.put(f"ended/{self.node}", how.encode())

    async def _tend(self) -> None:
        """Say so when a worker that was started anew is up. Ends when another is to be started."""
        if self._life:
            await self._join(await self._worker_address)
        await self._renewal.wait()
        self._renewal.clear()

    async def _follow(self) -> None:
        """Join, lead if nobody does, and pass on what the store says until there is a result."""
        await self._join()  # before the worker is up, so that its death is noticed from the first moment on
        setup = decode_setup(await self.store.get("setup") or b"")
        vigil = Vigil(setup.suspect_after, max((part for costs in setup.costs for part in costs), default=0.0))
        leading = asyncio.create_task(self._campaign(setup, vigil))
        serving = asyncio.create_task(self._serve_worker())
        ending = asyncio.create_task(self._await_result())
        knowing = [asyncio.create_task(self._know_leader(self._prober, vigil))] if self._prober is not None else []
        try:
            await asyncio.wait([leading, ending, *knowing], return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in knowing if task.done()):
                task.result()  # it ends only with the store, or if it is this node that hangs
            if leading.done():
                leading.result()  # a leader that failed takes its node along, and so is missed
            await ending
            if self._worker_address.done():
                self.transport.post(self._worker_address.result(), letters.encode(letters.Stop()))
        finally:
            await _ended(leading, serving, ending, *knowing)

    async def _leave(self) -> None:
        """A notice: say so, and go when everything that is needed from here is with the others."""
        notice = await self._notices.wait()
        self._leaves_in = notice.deadline_s
        await self._join(self._worker_address.result() if self._worker_address.done() else "")
        await self._relieved.wait()

    async def _join(self, worker: Address = "") -> None:
        seen = (self.fingerprint, self._leaves_in, self._life, self.zone)
        record = NodeRecord(self.node, self.transport.address, worker, *seen)
        await self.store.put(f"nodes/{self.node}", encode(record), session=True)

    async def _campaign(self, setup: Setup, vigil: Vigil) -> None:
        """Lead as soon as nobody else does: at first whoever asks first, later when the one that led is gone."""
        before = b""
        async with aclosing(self.store.watch("leader")) as leaders:
            if not await self._elected():
                async for _, value in leaders:
                    if value is None:
                        if setup.strategy == "none":  # nobody can go on without its layers: whoever sees it says so
                            lost = Result(error=NodeLost.__name__, message=_leader_lost(before.decode(), setup))
                            await self.store.swap("result", None, encode(lost))
                        elif await self._elected():
                            break
                    before = value or before
        if await self.store.get("result") is not None:
            return  # who led has finished: there is nothing left to lead
        seams = (self.transport, self.clock, self.store)
        self._leader = Leader(self.job, setup, self.node, *seams, vigil, before=int(before) if before else None)
        self._leader.tenure.relieved = self._relieved
        await self._leader.run()

    async def _know_leader(self, prober: Prober, vigil: Vigil) -> None:
        """Be connected to the agent that leads, from both sides: when either ends, the other one hears of it. Who leads
        keeps the vigil."""
        async for _, value in self.store.watch("leader"):
            if value == str(self.node).encode():
                break
            key = f"nodes/{(value or b'').decode()}"
            record = await self.store.get(key) if value is not None else None
            if record is not None:
                here = letters.encode(letters.Beat(self.node, 0, 0, 0.0))
                self.transport.post(prober.know(key, record), here)
        tasks = [asyncio.create_task(work) for work in (self._know_nodes(prober), self._keep_vigil(vigil, prober))]
        try:
            for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()
        finally:
            await _ended(*tasks)

    async def _know_nodes(self, prober: Prober) -> None:
        async for key, record in self.store.watch("nodes/"):
            if record is not None:
                prober.know(key, record)

    async def _keep_vigil(self, vigil: Vigil, prober: Prober) -> None:
        """Whose worker hangs, or was given up, goes, and may come back as a new node. If it is this node's own, another
        will lead."""
        while True:
            await self.clock.sleep(vigil.times.beat)
            for node in vigil.as_good_as_gone(self.clock.now()):
                if node == self.node:
                    raise RunError("the worker of the node that leads hangs, or can not reach the others")
                await prober.evict(f"nodes/{node}")

    async def _elected(self) -> bool:
        return await self.store.swap("leader", None, str(self.node).encode(), session=True)

    async def _serve_worker(self) -> None:
        """When it is up: say so, and pass every epoch on to it, or to the one in its place. An epoch that is there
        before a new worker is was meant for the one before."""
        await self._join(await self._worker_address)
        async for _, value in self.store.watch("epoch"):
            if value is not None and self._worker_address.done():
                self.transport.post(self._worker_address.result(), value)

    async def _await_result(self) -> None:
        async with aclosing(self.store.watch("result")) as results:
            async for _, value in results:
                if value is not None:
                    return

    async def _read_letters(self) -> None:
        while True:
            sender, body = await self.transport.letter()
            if isinstance(self.store, RemoteStore) and sender == self.store.server:
                self.store.heed(body)
                if body is None:
                    return  # the launcher is gone, and with it the run
            elif body is not None:
                self._heed(letters.decode(body))
            elif self._prober is not None:
                self._prober.broke(sender)

    def _heed(self, message: letters.Message) -> None:
        if isinstance(message, letters.Hello):
            if not self._worker_address.done():
                self._worker_address.set_result(message.address)
        elif isinstance(message, letters.Stop):
            self._relieved.set()
        elif isinstance(message, letters.Renew):
            if message.life == self._life:
                self._renewal.set()
        elif self._leader is not None:
            self._leader.tenure.vigil.heard(message, self.clock.now())
            self._leader.inbox.put_nowait(message)


def _went_well(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for it. That the store is out of reach is an end like any other; else raises."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception) and not isinstance(outcome, RunError):
            raise outcome


def _leader_lost(node: str, setup: Setup) -> str:
    saved = f"resume it with --resume {setup.out} if it had a checkpoint" if setup.out else "nothing of it was saved"
    return f"node {node}, which led, vanished and nobody else holds its layers (strategy {setup.strategy}): {saved}"
