"""The leader of a graph training run: server membership, generations, permits, evaluations, and the end.

A lost server ends the generation. The next one starts from the newest version of the weights that every parameter
server has saved. Graph servers keep no state that cannot be recomputed, so no gradient is missing or counted twice. An
epoch here is a training epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn.leader.gnn_ledger import EpochLoss, Evaluation, GnnLedger, RunResults, early_stop_reason
from culm.gnn.leader.weight_download import download_weights
from culm.gnn.scheduler.passes import list_passes
from culm.gnn.server.gnn_run_store import wait_until_process_ends
from culm.gnn.server.parameter_server import INITIAL_WEIGHTS_FILE
from culm.gnn.server.store_records import (
    Generation,
    GnnRunConfig,
    GraphServerReport,
    PassPermit,
    ServerMember,
    pack_record,
    unpack_record,
)
from culm.gnn.transport import gnn_messages as messages

if TYPE_CHECKING:
    from culm.gnn.launch.launcher import Launcher
    from culm.gnn.server.gnn_run_store import EvictSession, RunStore
    from culm.gnn.worker.worker_pool import WorkerPool
    from culm.runtime.compute.snapshot import Snapshot

_BROKEN_LINK_GRACE_S = 1.0
_GAUGE_INTERVAL_S = 0.5
_MAX_CONSECUTIVE_SERVER_LOSSES = 50
"""Servers lost in a row without a completed epoch before the run fails."""


class GnnLeader:
    """The leader of one run. `on_event` gets every event, `on_epoch` and `on_evaluation` what has become complete."""

    def __init__(
        self,
        config: GnnRunConfig,
        run_store: RunStore,
        worker_pool: WorkerPool,
        server_launcher: Launcher,
        *,
        patience: int,
        latency_s: float,
        on_event: Callable[..., None],
        on_epoch: Callable[[EpochLoss], None],
        on_evaluation: Callable[[Evaluation], None],
    ) -> None:
        self._config, self._run_store, self._worker_pool, self._server_launcher = (
            config,
            run_store,
            worker_pool,
            server_launcher,
        )
        self._store, self._ticket = run_store.store, run_store.ticket
        self._patience, self._latency_s = patience, latency_s
        self._emit_event, self._on_epoch, self._on_evaluation = on_event, on_epoch, on_evaluation
        self._passes = list_passes(config.epochs, config.evaluate_every)
        self.results = RunResults(GnnLedger(config.servers, config.train_vertices, self._passes))
        self._generation = Generation(0, 0, 0, ())
        self._members: dict[str, ServerMember] = {}
        self._claimed_server_ids: set[str] = set()
        self._saved_versions: dict[str, dict[int, str]] = {}
        self._consecutive_server_losses = 0
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._last_gauge_time = float("-inf")
        self._is_held: Callable[[int], bool] = lambda _: False
        self._open_evaluation: Evaluation | None = None
        self._run_over = asyncio.Event()

    async def run(self) -> RunResults:
        """Run to the end and return the results. Raises RunError if servers are lost faster than epochs complete."""
        await self._store.put("setup", pack_record(self._config))
        await self._server_launcher.launch(self._ticket, len(self._config.server_ids))
        watch_task, over_task = asyncio.create_task(self._watch_store()), asyncio.create_task(self._run_over.wait())
        try:
            await asyncio.wait([watch_task, over_task], return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            if watch_task.done():
                watch_task.result()  # re-raises the error of the watcher
        finally:
            tasks = [watch_task, over_task, *self._background_tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.results

    async def _watch_store(self) -> None:
        async with contextlib.aclosing(self._store.watch("")) as changes:
            async for key, value in changes:
                await self._handle_store_change(key, value)

    def server_pids(self) -> dict[str, int]:
        """Return the process ids of the servers, by server id."""
        return {server_id: member.pid for server_id, member in self._members.items()}

    def mark_killed(self, pid: int) -> None:
        """Forget a server that was killed on purpose, before its end is noticed."""
        self._members = {server_id: m for server_id, m in self._members.items() if m.pid != pid}

    async def _handle_store_change(self, key: str, value: bytes | None) -> None:
        kind, _, rest = key.partition("/")
        if kind == "servers":
            await self._handle_server_claim(rest, value)
        elif kind == "saved" and value is not None:
            self._record_saved_versions(rest, unpack_record(value, dict[int, str]))
        elif kind == "members" and value is not None:
            await self._handle_member(rest, unpack_record(value, ServerMember))
        elif kind == "broken" and rest == str(self._generation.number) and value is not None:
            self.results.recoveries.record_first_sign(time.monotonic())
            self._restart_after_grace(f"a connection of graph-{value.decode()} broke")
        elif kind == "report" and value is not None:
            await self._handle_report(unpack_record(value, GraphServerReport))

    # Membership.

    async def _handle_server_claim(self, server_id: str, value: bytes | None) -> None:
        if value is not None:
            self._claimed_server_ids.add(server_id)
            self._evict_when_process_ends(server_id, value)
            if self._generation.number == 0 and self._claimed_server_ids == set(self._config.server_ids):
                await self._start_generation("all servers have started")
            return
        self._claimed_server_ids.discard(server_id)
        self.results.recoveries.record_server_lost(server_id, time.monotonic())
        self._emit_event(kind="server-lost", node=server_id)
        await self._server_launcher.launch(self._ticket, 1)
        if self._generation.number:
            await self._start_generation(f"{server_id} was lost")

    def _evict_when_process_ends(self, server_id: str, value: bytes) -> None:
        """End a server's session as soon as its process has ended, instead of waiting for its lease to expire."""

        async def wait(evict: EvictSession) -> None:
            await wait_until_process_ends(int(value))
            self.results.recoveries.record_first_sign(time.monotonic())
            with contextlib.suppress(RunError):  # the store is lost, which is handled elsewhere
                if await self._store.get(f"servers/{server_id}") == value:
                    await evict(f"servers/{server_id}")

        if self._run_store.evict is not None:
            self._run_in_background(wait(self._run_store.evict))

    def _run_in_background(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background_tasks.add(task)
        task.add_done_callback(self._handle_background_end)

    def _handle_background_end(self, task: asyncio.Task[None]) -> None:
        """End the run if a background task fails."""
        self._background_tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = error
            self._run_over.set()

    def _restart_after_grace(self, reason: str) -> None:
        """Start a new generation after a grace period, unless a lost server has started one by then. A broken
        connection usually means a lost server, which is noticed a moment later."""
        number = self._generation.number

        async def wait() -> None:
            await asyncio.sleep(_BROKEN_LINK_GRACE_S)
            if self._generation.number == number:
                await self._start_generation(reason)

        self._run_in_background(wait())

    async def _start_generation(self, reason: str) -> None:
        """Start a new generation from the newest version that all parameter servers have saved."""
        self._consecutive_server_losses += 1
        if self._consecutive_server_losses > _MAX_CONSECUTIVE_SERVER_LOSSES:
            raise RunError(
                f"{_MAX_CONSECUTIVE_SERVER_LOSSES} servers were lost without a completed epoch: look at their messages"
            )
        saved = [self._saved_versions.get(server_id, {}) for server_id in self._config.parameter_server_ids]
        version = newest_common_version(saved)
        number = self._generation.number + 1
        sources = tuple(known.get(version, INITIAL_WEIGHTS_FILE) for known in saved)
        self._generation = Generation(number, version, self._first_pass_after(version), sources)
        self._members, self._open_evaluation = {}, None
        self.results.generations = number
        self._emit_event(kind="generation", number=number, version=version, why=reason)
        await self._store.put("generation", pack_record(self._generation))
        self.results.recoveries.record_generation_start(time.monotonic(), version, self.results.ledger.epochs_done)

    def _record_saved_versions(self, server_id: str, versions: dict[int, str]) -> None:
        self._saved_versions[server_id] = versions
        version = newest_common_version(
            [self._saved_versions.get(server_id, {}) for server_id in self._config.parameter_server_ids]
        )
        if version and version not in self.results.checkpoints:
            self.results.checkpoints.append(version)

    def _first_pass_after(self, version: int) -> int:
        """Return the first pass that a version does not cover. An evaluation that was due for that version is
        repeated."""
        return next((p.number for p in self._passes if p.newest_version == version and (p.train or version)), 0)

    async def _handle_member(self, key: str, member: ServerMember) -> None:
        number, _, server_id = key.partition("/")
        if int(number) != self._generation.number:
            return
        self._members[server_id] = member
        self._emit_event(kind="server-up", node=server_id, pid=member.pid, generation=self._generation.number)
        if set(self._members) == set(self._config.server_ids):
            self.results.recoveries.record_members_complete(time.monotonic())
            self._worker_pool.announce_servers(self._server_addresses())
            await self._permit_until_evaluation(self._generation.start_pass)

    def _server_addresses(self) -> messages.ServerAddresses:
        config = self._config
        return messages.ServerAddresses(
            generation=self._generation.number,
            graph_servers=tuple(self._members[s].address for s in config.graph_server_ids),
            parameter_servers=tuple(self._members[s].address for s in config.parameter_server_ids),
            model=config.model,
            seed=config.seed,
            train_vertices=config.train_vertices,
            latency_s=self._latency_s,
        )

    # Progress.

    async def _permit_until_evaluation(self, start: int) -> None:
        """Permit all passes up to and including the next evaluation."""
        until = next(p.number for p in self._passes[start:] if not p.train) + 1
        await self._store.put("permit", pack_record(PassPermit(self._generation.number, until, len(self._passes))))

    async def _handle_report(self, report: GraphServerReport) -> None:
        if report.generation != self._generation.number:
            return
        epochs, evaluations = self.results.ledger.add_report(report)
        self._emit_gauges()
        for done in epochs:
            self._consecutive_server_losses = 0
            self.results.recoveries.record_epochs_done(done.epoch + 1, time.monotonic())
            self._on_epoch(done)
        for evaluation in evaluations:
            self._on_evaluation(evaluation)
            self._open_evaluation = evaluation
            await self.decide_open_evaluation()

    def _emit_gauges(self) -> None:
        """Emit the queue lengths, at most once per `_GAUGE_INTERVAL_S`."""
        now, ledger = time.monotonic(), self.results.ledger
        if now - self._last_gauge_time > _GAUGE_INTERVAL_S:
            self._last_gauge_time = now
            gauges = {name: ledger.gauge_total(name) for name in ("queue", "running", "spread")}
            self._emit_event(kind="queues", workers=len(self._worker_pool), **gauges)

    def hold_evaluations_while(self, is_held: Callable[[int], bool]) -> None:
        """Hold the decision on an evaluation while `is_held(epoch)` is true."""
        self._is_held = is_held

    async def decide_open_evaluation(self) -> None:
        """Decide on the open evaluation, if there is one and it is not held."""
        if self._open_evaluation is not None and not self._is_held(self._open_evaluation.epoch):
            evaluation, self._open_evaluation = self._open_evaluation, None
            await self._decide_after_evaluation(evaluation)

    async def _decide_after_evaluation(self, evaluation: Evaluation) -> None:
        """Keep the best weights, then stop or permit the next passes."""
        ledger = self.results.ledger
        last = evaluation.epoch + 1 == self._config.epochs
        history = [e for n, e in sorted(ledger.evaluations.items()) if n <= evaluation.epoch]
        stop_reason = early_stop_reason(history, self._patience)
        best = ledger.best_evaluation is not None and ledger.best_evaluation.epoch == evaluation.epoch
        try:
            if best or last or stop_reason is not None:
                self.results.final_state = await self._download_weights()
                self.results.best_state = self.results.final_state if best else self.results.best_state
        except RunError as error:
            self._restart_after_grace(str(error))  # the next generation repeats the evaluation
            return
        if last or stop_reason is not None:
            self.results.stop_reason = stop_reason or ""
            self._run_over.set()
            return
        number = next(p.number for p in self._passes if not p.train and p.epoch == evaluation.epoch)
        await self._permit_until_evaluation(number + 1)

    async def _download_weights(self) -> dict[int, Snapshot]:
        server_ids = self._config.parameter_server_ids
        if any(server_id not in self._members for server_id in server_ids):
            raise RunError("a parameter server was lost")
        addresses = [self._members[server_id].address for server_id in server_ids]
        return await download_weights(addresses, self._ticket.token, self._generation.number, self._config.model.layers)


def newest_common_version(saved: Sequence[Collection[int]]) -> int:
    """Return the newest version that every parameter server has saved; 0, the initial weights, if there is none."""
    common = set(saved[0]).intersection(*saved[1:])
    return max(common, default=0)
