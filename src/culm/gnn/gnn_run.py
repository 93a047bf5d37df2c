"""One training run in the process that started it: partition the graph, start servers and workers, lead, sum up.

In this file an epoch is a training epoch: one pass over all training vertices.
"""

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
from culm.gnn import run_preparation
from culm.gnn.gnn_summary import build_summary
from culm.gnn.launch.launcher import Launcher
from culm.gnn.launch.local_launcher import LocalLauncher
from culm.gnn.leader import server_kill_injection
from culm.gnn.leader.gnn_leader import GnnLeader
from culm.gnn.leader.gnn_ledger import EpochLoss, Evaluation
from culm.gnn.leader.metis_process import METIS_ENTRY, assign_owners_in_process
from culm.gnn.model.gnn_model import initial_weights
from culm.gnn.server.gnn_run_store import RunStore, open_run_store
from culm.gnn.server.store_records import GnnRunConfig
from culm.gnn.worker.worker_autoscaler import WorkerAutoscaler
from culm.gnn.worker.worker_pool import WorkerPool
from culm.observe.report.load_run import RunContents
from culm.observe.report.page_server import (
    CachedView,
    ReadContents,
    rewrite_periodically,
    serve_page,
    standalone_report,
)
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.run_folder import RunFolder, create_run_folder

if TYPE_CHECKING:
    from culm.gnn.gnn_request import GnnRequest
    from culm.gnn.graph.graph_partition import Array
    from culm.gnn.leader.gnn_ledger import RunResults

T = TypeVar("T")
SERVER_ENTRY = "culm.gnn.server.server_process:serve"
_AUTOSCALE_S = 0.25
_REPORT_FILE = "report.html"


@dataclass(frozen=True)
class RunOutcome:
    """Configuration, results and summary of a finished run."""

    config: GnnRunConfig
    results: RunResults
    summary: dict[str, Any]


@dataclass
class GnnCallbacks:
    """Callbacks during a run. Replace the fields of interest; the defaults do nothing."""

    on_message: Callable[[str], None] = field(default=lambda _: None)
    on_prepared: Callable[[GnnRunConfig, Any], None] = field(default=lambda *_: None)
    on_epoch: Callable[[EpochLoss, float], None] = field(default=lambda *_: None)
    on_evaluation: Callable[[Evaluation], None] = field(default=lambda _: None)


async def run_training(request: GnnRequest, workers: Launcher, callbacks: GnnCallbacks) -> RunOutcome:
    """Run the training to its end and return its outcome.

    Raises RunError if the run fails. No process is left running in either case.
    """
    servers = LocalLauncher(entry=SERVER_ENTRY, share_with=workers if isinstance(workers, LocalLauncher) else None)
    metis_launcher = LocalLauncher(entry=METIS_ENTRY, share_with=servers)
    servers.preload()  # imports torch while the graph is partitioned
    if request.out is not None:
        create_run_folder(request.out, resumable=False)
    folder = RunFolder(request.out)
    with tempfile.TemporaryDirectory(prefix="culm-gnn-") as scratch:
        try:
            folder.open()
            return await _GnnRun(request, callbacks, folder, Path(scratch), workers, servers, metis_launcher).run()
        finally:
            await asyncio.gather(workers.close(), servers.close())
            folder.close()


class _GnnRun:
    """State of one run in the process that started it."""

    def __init__(
        self,
        request: GnnRequest,
        callbacks: GnnCallbacks,
        folder: RunFolder,
        scratch: Path,
        workers: Launcher,
        servers: Launcher,
        metis_launcher: LocalLauncher,
    ) -> None:
        self._request, self._callbacks, self._folder = request, callbacks, folder
        self._workers, self._servers, self._metis_launcher = workers, servers, metis_launcher
        self._scratch = scratch
        self._run, self._token = secrets.token_hex(6), secrets.token_hex(24)
        self._start_time = time.monotonic()
        self._last_written_epoch = -1
        self._events: list[dict[str, Any]] = []
        self._steps: list[StepMetrics] = []

    async def run(self) -> RunOutcome:
        try:
            return await self._partition_and_run()
        except BaseException as error:
            self._record_failure(error)
            raise

    def _record_failure(self, error: BaseException) -> None:
        """Write the reason of a failure as the last event. Without it the run folder would look as if the run still
        went on."""
        with contextlib.suppress(CulmError):
            self._write_event(
                kind="failed", error=type(error).__name__, message=str(error) or "the run was interrupted"
            )
            if self._writes_report:
                Storage(str(self._request.out)).write(
                    _REPORT_FILE, standalone_report(self._page_contents(None)).encode()
                )

    @property
    def _writes_report(self) -> bool:
        return self._request.out is not None and "://" not in self._request.out

    async def _partition_and_run(self) -> RunOutcome:
        self._callbacks.on_message("partitioning the graph")
        request = self._request
        owner = await assign_owners_in_process(
            request.graph, request.servers, self._metis_launcher, self._scratch / "cut"
        )
        config, intervals = await _run_in_thread(lambda: self._prepare_run(owner))
        self._callbacks.on_prepared(config, request.graph)
        async with open_run_store(
            request.etcd,
            self._run,
            self._token,
            suspect_after=request.suspect_after,
            on_message=self._callbacks.on_message,
        ) as run_store:
            self._write_event(kind="store", where=run_store.kind)
            return await self._run_with_store(config, intervals, run_store)

    async def _run_with_store(self, config: GnnRunConfig, intervals: int, run_store: RunStore) -> RunOutcome:
        request = self._request
        worker_pool = WorkerPool(
            self._run, self._token, self._workers, request.initial_workers,
            worker_seconds=request.worker_seconds, on_event=self._write_event, host=request.host,
        )  # fmt: skip
        leader = GnnLeader(
            config, run_store, worker_pool, self._servers,
            patience=request.patience, latency_s=request.latency_s,
            on_event=self._write_event, on_epoch=self._handle_epoch, on_evaluation=self._handle_evaluation,
        )  # fmt: skip

        def read_contents() -> RunContents:
            return self._page_contents(self._build_summary(config, leader.results, worker_pool, intervals), live=True)

        self._write_event(kind="run_started", **self._run_description(config))
        async with contextlib.AsyncExitStack() as stack:
            if request.dash:
                self._callbacks.on_message(
                    f"the run is shown at {await stack.enter_async_context(serve_page(CachedView(read_contents)))}"
                )
            results = await self._run_leader(leader, worker_pool, run_store, intervals, read_contents)
        await worker_pool.close()
        return self._build_outcome(config, results, worker_pool, intervals)

    async def _run_leader(
        self,
        leader: GnnLeader,
        worker_pool: WorkerPool,
        run_store: RunStore,
        intervals: int,
        read_contents: ReadContents,
    ) -> RunResults:
        """Run the leader and the background tasks of a run until the leader has finished.

        Raises the error of the first task that fails; all tasks are cancelled afterwards.
        """
        background = [
            asyncio.create_task(worker_pool.maintain_target_size()),
            asyncio.create_task(run_store.keep_etcd_running()),
        ]
        if self._writes_report:
            background.append(
                asyncio.create_task(rewrite_periodically(read_contents, Storage(str(self._request.out)), _REPORT_FILE))
            )
        if self._request.workers == "auto":
            background.append(asyncio.create_task(self._autoscale(leader, worker_pool, intervals)))
        if self._request.kills:
            background.append(asyncio.create_task(self._inject_kills(leader, worker_pool)))
        leader_task = asyncio.create_task(leader.run())
        try:
            done, _ = await asyncio.wait([leader_task, *background], return_when=asyncio.FIRST_COMPLETED)
            while leader_task not in done:
                for task in done:
                    task.result()  # re-raises the error of a failed task
                background = [task for task in background if task not in done]
                done, _ = await asyncio.wait([leader_task, *background], return_when=asyncio.FIRST_COMPLETED)
            return leader_task.result()
        finally:
            for task in [leader_task, *background]:
                task.cancel()
            await asyncio.gather(leader_task, *background, return_exceptions=True)

    async def _autoscale(self, leader: GnnLeader, worker_pool: WorkerPool, intervals: int) -> None:
        request = self._request
        autoscaler = WorkerAutoscaler(
            min_workers=1, max_workers=max(run_preparation.available_cores(), 1) * 4, workers=worker_pool.target_size
        )
        autoscaler.max_workers = min(autoscaler.max_workers, request.servers * intervals)
        while True:
            await asyncio.sleep(_AUTOSCALE_S)
            ledger = leader.results.ledger
            reason = (
                autoscaler.observe(ledger.gauge_total("queue"), ledger.gauge_total("running"))
                if ledger.losses
                else None
            )
            if reason is not None:
                worker_pool.target_size = autoscaler.workers
                self._write_event(kind="autotune", workers=autoscaler.workers, why=reason)

    async def _inject_kills(self, leader: GnnLeader, worker_pool: WorkerPool) -> None:
        request = self._request
        kills = [
            kill
            for text in request.kills
            for kill in server_kill_injection.parse_kills(
                text, request.servers, request.parameter_server_count, request.epochs, request.seed
            )
        ]
        await server_kill_injection.inject_kills(kills, leader, worker_pool, self._write_event, request.seed)

    def _prepare_run(self, owner: Array) -> tuple[GnnRunConfig, int]:
        request = self._request
        parts = self._scratch / "parts"
        parts.mkdir()
        checkpoints = self._folder.checkpoints or str(self._scratch / "checkpoints")
        count = request.intervals or run_preparation.default_intervals(
            request.graph, request.servers, request.initial_workers, request.mode
        )
        intervals = run_preparation.write_parts(request.graph, request.model, owner, count, parts)
        run_preparation.write_initial_weights(initial_weights(request.model, request.seed, request.init), checkpoints)
        config = GnnRunConfig(
            run=self._run,
            model=request.model,
            seed=request.seed,
            adam=request.adam,
            mode=request.mode,
            staleness=request.staleness,
            lookahead=request.lookahead,
            epochs=request.epochs,
            evaluate_every=request.evaluate_every,
            checkpoint_every=request.checkpoint_every,
            servers=request.servers,
            parameter_servers=request.parameter_server_count,
            train_vertices=request.graph.train_vertices,
            parts_folder=str(parts),
            checkpoints=checkpoints,
            threads=request.threads or run_preparation.default_threads(request.graph.edges, request.servers),
            host=request.host,
            edge_place=request.edges
            or run_preparation.choose_edge_place(request.graph, request.model, request.servers * intervals),
            share_tables=request.share,
        )
        self._callbacks.on_message("starting servers and workers")
        return config, intervals

    def _write_event(self, **fields: Any) -> None:
        event = {"t": round(time.monotonic() - self._start_time, 4), **fields}
        self._events.append(event)
        self._folder.write_event(event)

    def _handle_epoch(self, done: EpochLoss) -> None:
        """Record a complete training epoch. An epoch that is repeated after a lost server is written only once."""
        now = time.monotonic()
        if done.epoch > self._last_written_epoch:
            self._last_written_epoch = done.epoch
            at = round(now - self._start_time, 4)
            self._steps.append(StepMetrics(done.epoch, at, done.loss, self._request.graph.train_vertices))
            self._folder.write_step(self._steps[-1])
            self._callbacks.on_epoch(done, now - self._start_time)

    def _handle_evaluation(self, evaluation: Evaluation) -> None:
        self._write_event(kind="evaluation", **evaluation._asdict())
        self._callbacks.on_evaluation(evaluation)

    def _build_outcome(
        self, config: GnnRunConfig, results: RunResults, worker_pool: WorkerPool, intervals: int
    ) -> RunOutcome:
        summary = self._build_summary(config, results, worker_pool, intervals)
        self._folder.write_json("summary.json", summary)
        if self._request.out is not None:
            Storage(self._request.out).write(_REPORT_FILE, standalone_report(self._page_contents(summary)).encode())
        return RunOutcome(config, results, summary)

    def _run_description(self, config: GnnRunConfig) -> dict[str, Any]:
        """Fields of the `run_started` event: they describe a run whose summary does not exist yet."""
        request = self._request
        return {
            "graph": request.graph.name,
            "vertices": request.graph.vertices,
            "edges": request.graph.edges,
            "model": config.model.kind,
            "mode": config.mode,
            "servers": config.servers,
            "workers": request.workers,
            "launcher": self._workers.name,
            "exact": config.mode != "async",
            "epochs": config.epochs,
            "global_batch": request.graph.train_vertices,
        }

    def _page_contents(self, summary: dict[str, Any] | None, *, live: bool = False) -> RunContents:
        """Contents of the run's report page."""
        name = (self._request.out or "").rstrip("/").rpartition("/")[2] or self._request.graph.name
        return RunContents(name=name, summary=summary, steps=list(self._steps), events=list(self._events), live=live)

    def _build_summary(
        self, config: GnnRunConfig, results: RunResults, worker_pool: WorkerPool, intervals: int
    ) -> dict[str, Any]:
        """The summary of what has been trained so far."""
        return build_summary(
            config, results, worker_pool, self._request.graph, intervals,
            launcher=self._workers.name, instance=self._request.instance, wall_s=time.monotonic() - self._start_time,
        )  # fmt: skip


async def _run_in_thread(work: Callable[[], T]) -> T:
    """Run a function in a thread and return its result.

    If the caller is cancelled, wait for the thread first: it writes into a folder that is about to be removed.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
