"""Local nodes: a nursery, a store, and one run on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from culm.cluster.recovered import Recovered, decode_recoveries
from culm.cluster.setup import Request, Result, Setup, decode_node, decode_result, encode
from culm.cluster.store import Change, MemoryStore, StoreServer
from culm.errors import RunError
from culm.providers import nursery as side
from culm.providers.nursery import Exited, JobSource, Load, Loaded, Progress, Refused, Start, refused
from culm.transport.sockets import SocketTransport

Told = Callable[[str, int, int], None]
"""Progress of something long: what, how much is done, of how much."""
_PATIENCE_S = 10.0
_runs = itertools.count()
"""A nursery may serve several runs, one after the other: the end of a node says which one it was of."""


class LocalNursery:
    """The launcher's side of a nursery process. Start it early: it imports torch while the launcher does other things.

    What it and the nodes print goes to the descriptors `stdout` and `stderr`; default: where the launcher's goes.
    """

    def __init__(self, *, stdout: int | None = None, stderr: int | None = None) -> None:
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            # Unbuffered, since a node may end without notice and what it printed should not be lost with it.
            [sys.executable, "-u", "-m", "culm.providers.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Also the process group of everything it starts."""
        return self._process.pid

    @property
    def pipe(self) -> Connection:
        return self._pipe

    def order(self, order: side.Order) -> None:
        try:
            self._pipe.send_bytes(side.orders(order))
        except OSError:
            raise RunError("the nursery of local nodes has ended: is there enough memory?") from None

    async def report(self) -> side.Report:
        """The next report, without blocking the loop."""
        await side.readable(self._pipe.fileno())
        try:
            report: side.Report = side.reports.decode(self._pipe.recv_bytes())
            return report
        except (EOFError, OSError):
            raise RunError("the nursery of local nodes has ended: is there enough memory?") from None

    def close(self) -> None:
        """End it and every process that came out of it, also where it is busy and would not notice a closed pipe."""
        self._pipe.close()
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """End all its processes at once. The group outlives a nursery that was killed and left children behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> LocalNursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalRun:
    """A run on local nodes, as its launcher sees it."""

    def __init__(self, setup: Setup, store: MemoryStore, number: int) -> None:
        self.setup, self._store, self.number = setup, store, number
        self._joined: set[str] = set()
        self.lost: list[int] = []
        """Nodes that vanished while the run went on, in order."""
        self._recoveries = 0
        self._news: asyncio.Queue[int | Recovered] = asyncio.Queue()
        self._steps = store.subscribe("step")
        self._results = store.subscribe("result")
        self._joining = store.subscribe("nodes/")
        store.listen("nodes/", self._heard_of_node)
        store.listen("record", self._heard_of_record)

    def _heard_of_node(self, change: Change) -> None:
        self._joined.add(change.key)
        if change.value is None and self._store.read("result") is None:
            self.lost.append(int(change.key.rpartition("/")[2]))
            self._news.put_nowait(self.lost[-1])

    def _heard_of_record(self, change: Change) -> None:
        recoveries = decode_recoveries(change.value).recoveries if change.value is not None else ()
        for recovered in recoveries[self._recoveries :]:
            self._news.put_nowait(recovered)
        self._recoveries = max(self._recoveries, len(recoveries))

    async def news(self) -> int | Recovered:
        """The next node that is lost, or the next loss that the run has recovered from."""
        return await self._news.get()

    async def step(self) -> dict[str, Any] | None:
        """The metrics of the next committed step; None when the run has ended."""
        stepping = asyncio.ensure_future(self._steps.get())
        ending = asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait([stepping, ending], return_when=asyncio.FIRST_COMPLETED)
            if not stepping.done():
                return None
            found: dict[str, Any] = msgspec.msgpack.decode(stepping.result().value or b"")
            return found
        finally:
            stepping.cancel()
            ending.cancel()

    def joined(self, node: int) -> bool:
        """Whether its agent has ever been in the store: from then on, its end is noticed there."""
        return f"nodes/{node}" in self._joined

    async def node_up(self) -> int:
        """The number of the next node whose worker is up."""
        while True:
            _, value = await self._joining.get()
            if value is not None and (record := decode_node(value)).worker:
                return record.node

    async def _ended(self) -> None:
        while self._store.read("result") is None:
            await self._results.get()

    def permit(self, until: int) -> None:
        """With the gate `outside`: steps below this number may run."""
        self._store.write("gate/permit", str(until).encode())

    def finish(self, step: int) -> None:
        """With the gate `outside`: end the run before a step."""
        self._store.write("gate/finish", str(step).encode())

    async def result(self) -> Result:
        """How it ended."""
        await self._ended()
        return decode_result(self._store.read("result") or b"")

    def fail(self, message: str) -> None:
        """End the run from outside."""
        if self._store.read("result") is None:
            self._store.write("result", encode(Result(error="RunError", message=message)))


@asynccontextmanager
async def local_run(
    nursery: LocalNursery,
    source: JobSource,
    request: Request,
    *,
    told: Told = lambda *_: None,
    prepared: Callable[[Setup], None] = lambda _: None,
    ports: tuple[int, int] | None = None,
) -> AsyncIterator[LocalRun]:
    """Load the job, start its nodes, and give the run to the caller; afterwards no node is left."""
    nursery.order(Load(source, request))
    setup = await _loaded(nursery, told)
    prepared(setup)
    secret = os.urandom(32)
    transport = SocketTransport(secret=secret)
    store = MemoryStore()
    store.write("setup", encode(setup))
    run = LocalRun(setup, store, next(_runs))
    serving = asyncio.create_task(StoreServer(store, transport).serve())
    for node in range(setup.nodes):
        nursery.order(
            Start(
                node,
                transport.address,
                secret,
                ports=ports,
                neighbours=setup.nodes,
                run=run.number,
                kills=setup.kills,
                renews=setup.renews,
            )
        )
    left = set(range(setup.nodes))
    watching = asyncio.create_task(_watch(nursery, run, left))
    try:
        yield run
        if store.read("result") is None:
            run.fail("the launcher ended the run")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(watching), _PATIENCE_S)
    finally:
        for task in (serving, watching):
            task.cancel()
        await transport.close()


async def _loaded(nursery: LocalNursery, told: Told) -> Setup:
    while True:
        match await nursery.report():
            case Loaded(setup):
                return setup
            case Refused() as report:
                raise refused(report)
            case Progress(text, done, total):
                told(text, done, total)


async def _watch(nursery: LocalNursery, run: LocalRun, left: set[int]) -> None:
    """Until every agent has ended. One that ends before the run does, where nobody else reports it, ends the run."""
    while left:
        try:
            report = await nursery.report()
        except RunError as error:
            run.fail(str(error))
            return
        if isinstance(report, Exited) and report.run == run.number:
            left.discard(report.node)
            if not run.joined(report.node):
                run.fail(f"node {report.node} ended with status {report.status} before it had joined")
            if not left:
                run.fail("all nodes have ended before the run")
