"""One run, as the process that started it sees it: prepare, start, lead, and tell how it went."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from culm.checkpoint.storage import Storage
from culm.errors import CulmError
from culm.gnn import faults, prepare
from culm.gnn.cutter import CUTTER, owners_aside
from culm.gnn.desk import Desk
from culm.gnn.launch.base import Launcher
from culm.gnn.launch.local import LocalLauncher
from culm.gnn.lead import Leader
from culm.gnn.ledger import Epoch, Evaluation
from culm.gnn.meeting import Meeting, meet
from culm.gnn.model import initial_weights
from culm.gnn.setup import Setup
from culm.gnn.summary import summarise
from culm.gnn.tune import Tuner
from culm.observe.folder import RunFolder, claim
from culm.observe.reading import Contents, Step
from culm.observe.serving import Look, Window, kept_fresh, report, served

if TYPE_CHECKING:
    from culm.gnn.findings import Findings
    from culm.gnn.partition import Array
    from culm.gnn.request import Request

T = TypeVar("T")
SERVERS = "culm.gnn.host:serve"
_TUNE_S = 0.25
_PAGE = "report.html"


@dataclass(frozen=True)
class Outcome:
    """What a run leaves."""

    setup: Setup
    findings: Findings
    summary: dict[str, Any]


@dataclass
class Watcher:
    """What is told of a run while it goes: override what is of interest."""

    told: Callable[[str], None] = field(default=lambda _: None)
    prepared: Callable[[Setup, Any], None] = field(default=lambda *_: None)
    epoch: Callable[[Epoch, float], None] = field(default=lambda *_: None)
    evaluated: Callable[[Evaluation], None] = field(default=lambda _: None)


async def run(wanted: Request, workers: Launcher, watcher: Watcher) -> Outcome:
    """To the end. Raises RunError when it fails; nothing is left running either way."""
    servers = LocalLauncher(entry=SERVERS, beside=workers if isinstance(workers, LocalLauncher) else None)
    cutter = LocalLauncher(entry=CUTTER, beside=servers)
    servers.warm()  # it imports while the graph is cut
    if wanted.out is not None:
        claim(wanted.out, resumable=False)
    folder = RunFolder(wanted.out)
    with tempfile.TemporaryDirectory(prefix="culm-gnn-") as scratch:
        try:
            folder.open()
            return await _Run(wanted, watcher, folder, Path(scratch), workers, servers, cutter).go()
        finally:
            await asyncio.gather(workers.close(), servers.close())
            folder.close()


class _Run:
    """One run: everything that lives in the process that started it."""

    def __init__(
        self,
        wanted: Request,
        watcher: Watcher,
        folder: RunFolder,
        scratch: Path,
        workers: Launcher,
        servers: Launcher,
        cutter: LocalLauncher,
    ) -> None:
        self._wanted, self._watcher, self._folder = wanted, watcher, folder
        self._workers, self._servers, self._cutter = workers, servers, cutter
        self._scratch = scratch
        self._run, self._token = secrets.token_hex(6), secrets.token_hex(24)
        self._began = time.monotonic()
        self._started = self._began
        self._written = -1
        self._events: list[dict[str, Any]] = []
        self._steps: list[Step] = []

    async def go(self) -> Outcome:
        try:
            return await self._go()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """The last that the folder says of a run that comes to no end: why. Otherwise it would seem to go on."""
        with contextlib.suppress(CulmError):
            self._event(kind="failed", error=type(error).__name__, message=str(error) or "it was interrupted")
            if self._keeps_page:
                Storage(str(self._wanted.out)).write(_PAGE, report(self._contents(None)).encode())

    @property
    def _keeps_page(self) -> bool:
        return self._wanted.out is not None and "://" not in self._wanted.out

    async def _go(self) -> Outcome:
        self._watcher.told("cutting the graph")
        wanted = self._wanted
        owner = await owners_aside(wanted.graph, wanted.servers, self._cutter, self._scratch / "cut")
        setup, intervals = await _to_its_end(lambda: self._prepare(owner))
        self._watcher.prepared(setup, wanted.graph)
        async with meet(
            wanted.etcd, self._run, self._token, suspect_after=wanted.suspect_after, said=self._watcher.told
        ) as meeting:
            self._event(kind="store", where=meeting.kind)
            return await self._together(setup, intervals, meeting)

    async def _together(self, setup: Setup, intervals: int, meeting: Meeting) -> Outcome:
        wanted = self._wanted
        desk = Desk(
            self._run, self._token, self._workers, wanted.first_workers,
            seconds=wanted.worker_seconds, told=self._event, host=wanted.host,
        )  # fmt: skip
        leader = Leader(
            setup, meeting, desk, self._servers,
            patience=wanted.patience, latency_s=wanted.latency_s,
            told=self._event, epoch=self._epoch, evaluated=self._evaluated,
        )  # fmt: skip

        def look() -> Contents:
            return self._contents(self._summary(setup, leader.found, desk, intervals), live=True)

        self._event(kind="run_started", **self._begun(setup))
        async with contextlib.AsyncExitStack() as stack:
            if wanted.dash:
                self._watcher.told(f"the run is shown at {await stack.enter_async_context(served(Window(look)))}")
            findings = await self._lead(leader, desk, meeting, intervals, look)
        await desk.close()
        return self._outcome(setup, findings, desk, intervals)

    async def _lead(self, leader: Leader, desk: Desk, meeting: Meeting, intervals: int, look: Look) -> Findings:
        """The leader, and beside it whoever must go on while it does; the first to fail ends all."""
        beside = [asyncio.create_task(desk.supply()), asyncio.create_task(meeting.tend())]
        if self._keeps_page:
            beside.append(asyncio.create_task(kept_fresh(look, Storage(str(self._wanted.out)), _PAGE)))
        if self._wanted.workers == "auto":
            beside.append(asyncio.create_task(self._tune(leader, desk, intervals)))
        if self._wanted.kills:
            beside.append(asyncio.create_task(self._kill(leader, desk)))
        leading = asyncio.create_task(leader.run())
        try:
            done, _ = await asyncio.wait([leading, *beside], return_when=asyncio.FIRST_COMPLETED)
            while leading not in done:
                for task in done:
                    task.result()  # raises what went wrong
                beside = [task for task in beside if task not in done]
                done, _ = await asyncio.wait([leading, *beside], return_when=asyncio.FIRST_COMPLETED)
            return leading.result()
        finally:
            for task in [leading, *beside]:
                task.cancel()
            await asyncio.gather(leading, *beside, return_exceptions=True)

    async def _tune(self, leader: Leader, desk: Desk, intervals: int) -> None:
        wanted = self._wanted
        tuner = Tuner(low=1, high=max(prepare.cores(), 1) * 4, workers=desk.target)
        tuner.high = min(tuner.high, wanted.servers * intervals)
        while True:
            await asyncio.sleep(_TUNE_S)
            ledger = leader.found.ledger
            why = tuner.look(ledger.now_of("queue"), ledger.now_of("running")) if ledger.losses else None
            if why is not None:
                desk.target = tuner.workers
                self._event(kind="autotune", workers=tuner.workers, why=why)

    async def _kill(self, leader: Leader, desk: Desk) -> None:
        wanted = self._wanted
        kills = [
            k
            for text in wanted.kills
            for k in faults.parse(text, wanted.servers, wanted.parameter_seats, wanted.epochs, wanted.seed)
        ]
        await faults.inject(kills, leader, desk, self._event, wanted.seed)

    def _prepare(self, owner: Array) -> tuple[Setup, int]:
        wanted = self._wanted
        parts = self._scratch / "parts"
        parts.mkdir()
        checkpoints = self._folder.checkpoints or str(self._scratch / "checkpoints")
        count = wanted.intervals or prepare.default_intervals(
            wanted.graph.vertices, wanted.servers, wanted.first_workers, wanted.mode
        )
        intervals = prepare.write_parts(wanted.graph, wanted.model, owner, count, parts)
        prepare.write_initial(initial_weights(wanted.model, wanted.seed, wanted.init), checkpoints)
        setup = Setup(
            run=self._run,
            model=wanted.model,
            seed=wanted.seed,
            adam=wanted.adam,
            mode=wanted.mode,
            staleness=wanted.staleness,
            lookahead=wanted.lookahead,
            epochs=wanted.epochs,
            evaluate_every=wanted.evaluate_every,
            checkpoint_every=wanted.checkpoint_every,
            servers=wanted.servers,
            parameter_servers=wanted.parameter_seats,
            total=wanted.graph.train_vertices,
            parts=str(parts),
            checkpoints=checkpoints,
            threads=wanted.threads or prepare.default_threads(wanted.graph.edges, wanted.servers),
            host=wanted.host,
            edges=wanted.edges or prepare.edge_place(wanted.graph, wanted.model, wanted.servers * intervals),
            share=wanted.share,
        )
        self._watcher.told("starting servers and workers")
        return setup, intervals

    def _event(self, **fields: Any) -> None:
        event = {"t": round(time.monotonic() - self._began, 4), **fields}
        self._events.append(event)
        self._folder.event(**event)

    def _epoch(self, done: Epoch) -> None:
        """Complete for the first time, or again after a loss: a line stands there once."""
        now = time.monotonic()
        if self._written < 0:
            self._started = now
        if done.epoch > self._written:
            self._written = done.epoch
            at = round(now - self._began, 4)
            line = {"step": done.epoch, "loss": done.loss, "samples": self._wanted.graph.train_vertices, "t": at}
            self._steps.append(Step(done.epoch, at, done.loss, self._wanted.graph.train_vertices))
            self._folder.step(**line)
            self._watcher.epoch(done, now - self._began)

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._event(kind="evaluation", **evaluation._asdict())
        self._watcher.evaluated(evaluation)

    def _outcome(self, setup: Setup, findings: Findings, desk: Desk, intervals: int) -> Outcome:
        summary = self._summary(setup, findings, desk, intervals)
        self._folder.write("summary.json", summary)
        if self._wanted.out is not None:
            Storage(self._wanted.out).write(_PAGE, report(self._contents(summary)).encode())
        return Outcome(setup, findings, summary)

    def _begun(self, setup: Setup) -> dict[str, Any]:
        """What the run is, for who reads its folder before there is a summary."""
        wanted = self._wanted
        return {
            "graph": wanted.graph.name,
            "vertices": wanted.graph.vertices,
            "edges": wanted.graph.edges,
            "model": setup.model.kind,
            "mode": setup.mode,
            "servers": setup.servers,
            "workers": wanted.workers,
            "launcher": self._workers.name,
            "exact": setup.mode != "async",
            "epochs": setup.epochs,
            "global_batch": wanted.graph.train_vertices,
        }

    def _contents(self, summary: dict[str, Any] | None, *, live: bool = False) -> Contents:
        """What a page can be made of."""
        name = (self._wanted.out or "").rstrip("/").rpartition("/")[2] or self._wanted.graph.name
        return Contents(name=name, summary=summary, steps=list(self._steps), events=list(self._events), live=live)

    def _summary(self, setup: Setup, findings: Findings, desk: Desk, intervals: int) -> dict[str, Any]:
        """What it has come to so far."""
        return summarise(
            setup, findings, desk, self._wanted.graph, intervals,
            launcher=self._workers.name, instance=self._wanted.instance, wall_s=time.monotonic() - self._began,
        )  # fmt: skip


async def _to_its_end(work: Callable[[], T]) -> T:
    """What a thread comes to. One that is cancelled is waited for: it writes where all is about to be removed."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
