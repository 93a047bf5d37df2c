"""Local nodes: a nursery, the provider over it, a store, and one run on them."""

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

import msgspec

from culm.cluster.setup import Request, Setup, encode
from culm.cluster.store import MemoryStore, StoreServer
from culm.errors import RunError
from culm.providers import nursery as side
from culm.providers.base import Gone
from culm.providers.nursery import Exited, JobSource, Load, Loaded, Progress, Refused, Start, Stop, refused
from culm.providers.run import LocalRun
from culm.transport.sockets import SocketTransport

__all__ = ["LocalNursery", "LocalProvider", "LocalRun", "local_run"]

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


class LocalProvider:
    """The provider `local`: a node is an agent with its worker, forked out of the nursery in milliseconds."""

    def __init__(self, nursery: LocalNursery, order: Start) -> None:
        """Nodes are started by this order, each with its own number and zone."""
        self._nursery, self._order = nursery, order

    def start(self, node: int, zone: str = "") -> None:
        self._nursery.order(msgspec.structs.replace(self._order, node=node, zone=zone))

    def stop(self, node: int, notice_s: float = 0.0) -> None:
        self._nursery.order(Stop(node, self._order.run, notice_s))

    async def gone(self) -> Gone:
        while True:
            report = await self._nursery.report()
            if isinstance(report, Exited) and report.run == self._order.run:
                return Gone(report.node, report.status)


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
    keys = MemoryStore()
    keys.write("setup", encode(setup))
    order = Start(
        0,
        transport.address,
        secret,
        ports=ports,
        neighbours=setup.nodes,
        run=next(_runs),
        kills=setup.kills,
        renews=setup.renews,
    )
    run = LocalRun(setup, keys.client("launcher"), LocalProvider(nursery, order))
    tasks = [asyncio.create_task(StoreServer(keys, transport).serve()), asyncio.create_task(run.follow())]
    try:
        await run.nodes.start(setup.nodes)
        tasks.append(watching := asyncio.create_task(run.nodes.watch()))
        yield run
        if not run.ended:
            run.fail("the launcher ended the run")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(watching), _PATIENCE_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
