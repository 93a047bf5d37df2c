"""Local nodes: a nursery, the provider over it, a store, and one run on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from culm.cluster.sealed import wire_secret
from culm.cluster.setup import JobReference, Request, Setup, encode
from culm.errors import CulmError, RunError, UsageError
from culm.providers import nursery as side
from culm.providers.base import Gone, ended
from culm.providers.etcd import PrivateEtcd
from culm.providers.nursery import GRACE_S, Exited, JobSource, Load, Loaded, Progress, Refused, Start, Stop, refused
from culm.providers.run import LocalRun
from culm.providers.stores import Place, in_etcd, in_launcher
from culm.providers.strike import Board

if TYPE_CHECKING:
    from culm.cluster.etcd import Access
    from culm.cluster.store import Store

__all__ = ["LocalNursery", "LocalProvider", "LocalRun", "Shared", "local_run"]

Told = Callable[[str, int, int], None]
"""Progress of something long: what, how much is done, of how much."""
Opened: TypeAlias = "tuple[Store, Place, bytes]"
"""A store, how nodes reach it, and what they prove to each other."""
_PATIENCE_S = 10.0
_GONE_S = 1.0
_FILES = 16
"""What a process that leads has open beside a connection to the agent and to the worker of each node."""
_runs = itertools.count()
"""A nursery may serve several runs, one after the other: the end of a node says which one it was of."""


class LocalNursery:
    """The launcher's side of a nursery process. Start it early: it imports torch while the launcher does other things.

    What it and the nodes print goes to the descriptors `stdout` and `stderr`; default: where the launcher's goes.
    """

    def __init__(self, *, stdout: int | None = None, stderr: int | None = None) -> None:
        self._pipe, theirs = Pipe()
        self.board = Board()
        """What the nodes know of each other, and the launcher of them, without asking."""
        passed = [theirs.fileno(), self.board.descriptor]
        self._process = subprocess.Popen(
            # Unbuffered, since a node may end without notice and what it printed should not be lost with it.
            [sys.executable, "-u", "-m", "culm.providers.nursery", *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        theirs.close()

        self.private: PrivateEtcd | None = None
        """The etcd of its runs, once there was one."""

    async def etcd(self, note: Callable[[str], None] = lambda _: None) -> Access | None:
        """The private etcd of all runs of this nursery, which ends with it. None: there is none on this machine; then
        the store is kept in the launcher, and `note` is told so."""
        if self.private is not None and self.private.running:
            return self.private.access
        try:
            self.private = await PrivateEtcd().__aenter__()
        except CulmError as error:
            note(f"the store is kept in this process: {error}")
            return None
        return self.private.access

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
            raise self._gone() from None

    async def report(self) -> side.Report:
        """The next report, without blocking the loop."""
        await side.readable(self._pipe.fileno())
        try:
            report: side.Report = side.reports.decode(self._pipe.recv_bytes())
            return report
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> RunError:
        """Its end of the pipe is closed: it has ended, or is about to."""
        try:
            status = self._process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            return RunError("the nursery of local nodes hangs in its end: is there enough memory?")
        likely = "is there enough memory?" if status == -signal.SIGKILL else "a job must not end who imports it"
        return RunError(f"the nursery of local nodes has {ended(status)}: {likely}")

    def close(self) -> None:
        """End it and every process that came out of it, also where it is busy and would not notice a closed pipe."""
        self._pipe.close()
        self.kill()
        self._process.wait()
        self.board.close()
        if self.private is not None:
            self.private.close()

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


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A run that other machines take part in, by `culm agent`."""

    access: Access
    job: str
    secret: bytes
    local: int = 0
    """Nodes that this machine provides itself."""
    host: str = "127.0.0.1"
    """Where others reach those."""


@asynccontextmanager
async def local_run(
    nursery: LocalNursery,
    source: JobSource,
    request: Request,
    *,
    told: Told = lambda *_: None,
    prepared: Callable[[Setup], None] = lambda _: None,
    ports: tuple[int, int] | None = None,
    shared: Shared | None = None,
    zones: Callable[[int], Sequence[str]] = lambda _: (),
    grace_s: float = GRACE_S,
) -> AsyncIterator[LocalRun]:
    """Load the job, start its nodes, and give the run to the caller; afterwards no node of this machine is left.

    UsageError: the request, the job or the etcd of a shared run is wrong; nothing was started. `zones`: where
    the first nodes stand, by how many there are. `grace_s`: what a notice to one of its nodes leaves.
    """
    number = next(_runs)
    kept = _private(nursery, f"run-{number}", request, told) if shared is None else _shared(shared, request, told)
    async with kept as opened:
        nursery.order(Load(source, request, identify=shared is not None))
        loaded = await _loaded(nursery, told)
        setup = loaded.setup
        make_room(setup.nodes if shared is None else shared.local)
        prepared(setup)
        store, place, secret = await opened
        order = Start(0, place, secret, ports=ports, neighbours=setup.nodes, run=number, kills=setup.kills)
        order = msgspec.structs.replace(order, renews=setup.renews, grace_s=grace_s)
        if shared is None:
            run = LocalRun(setup, store, LocalProvider(nursery, order))
        else:
            order = msgspec.structs.replace(order, host=shared.host, neighbours=max(1, shared.local))
            run = LocalRun(setup, store, LocalProvider(nursery, order), alone=False)
        await store.put("setup", encode(setup))
        if shared is not None:
            await store.put("job", encode(JobReference(source.reference, source.overrides, loaded.identity)))
        count = setup.nodes if shared is None else shared.local
        async with led(run, count, zones(count)):
            yield run


def make_room(nodes: int) -> None:
    """Let this process have the files open that so many nodes need: who waits for a free one would wait for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + 2 * nodes
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"a process may have {hard} files open (ulimit -n), and {nodes} nodes need {needed}: allow more"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@asynccontextmanager
async def _private(nursery: LocalNursery, job: str, request: Request, told: Told) -> AsyncIterator[Awaitable[Opened]]:
    """The store of a run of this machine alone; it is opened while torch is imported."""
    secret = os.urandom(32)

    async def opened() -> Opened:
        access = await nursery.etcd(lambda sentence: told(sentence, 0, 0))
        kept = in_launcher(secret) if access is None else in_etcd(access, job, request.suspect_after)
        return *await stack.enter_async_context(kept), secret

    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(opened())
        try:
            yield opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)


@asynccontextmanager
async def _shared(shared: Shared, request: Request, told: Told) -> AsyncIterator[Awaitable[Opened]]:
    """The store of a run of several machines: what is wrong with it is said before anything else takes its time."""
    kept = in_etcd(
        shared.access, shared.job, request.suspect_after, shared.secret, note=lambda sentence: told(sentence, 0, 0)
    )
    async with kept as (store, place):

        async def opened() -> Opened:
            return store, place, wire_secret(shared.secret, shared.job)

        yield asyncio.create_task(opened())


@asynccontextmanager
async def led(run: LocalRun, nodes: int, zones: Sequence[str] = ()) -> AsyncIterator[None]:
    """Start nodes, and follow the run and them; afterwards the run has ended, and our nodes with it."""
    tasks = [asyncio.create_task(run.follow())]
    try:
        await run.nodes.start(nodes, zones)
        tasks.append(watching := asyncio.create_task(run.nodes.watch()))
        yield
        run.fail("the launcher ended the run")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.shield(watching)
    finally:
        if not run.alone:
            await _dismiss(run)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _dismiss(run: LocalRun) -> None:
    """Let nodes of other machines hear that the run has ended, before its keys go."""
    run.fail("the launcher ended the run")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            await run.deserted()


async def _loaded(nursery: LocalNursery, told: Told) -> Loaded:
    while True:
        match await nursery.report():
            case Loaded() as loaded:
                return loaded
            case Refused() as report:
                raise refused(report)
            case Progress(text, done, total):
                told(text, done, total)
