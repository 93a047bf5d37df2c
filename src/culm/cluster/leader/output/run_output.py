"""Run output: lines of steps and events to the run folder, the writers and the event hooks, and what storage that fails
means for the run."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from culm.cluster.leader.output.line_buffer import LineBuffer
from culm.cluster.leader.output.run_summary import run_started_fields
from culm.cluster.leader.output.storage_health import StorageHealth, shard_write_name
from culm.cluster.run_setup import encode
from culm.errors import CulmError, RunError
from culm.observe.event_hooks import EventHookReport, has_event_hook
from culm.observe.writers.run_folder import RunFolder
from culm.observe.writers.writer import RunInfo
from culm.observe.writers.writer_group import CLOSE_TIMEOUT_S
from culm.runtime.storage_retry import MISSING_FOLDER_S, STALL_S, retry_storage

if TYPE_CHECKING:
    from culm.cluster.leader.background_tasks import BackgroundTasks
    from culm.cluster.leader.leader_state import LeaderState
    from culm.cluster.leader.output.hook_runner import HookRunner
    from culm.cluster.leader.output.store_writer import StoreWriter
    from culm.job import Job
    from culm.observe.step_metrics import StepMetrics
    from culm.runtime.clock import Clock
    from culm.runtime.messages import StorageReport

_OPEN_TIMEOUT_S = 15.0
"""How long a run that begins waits for its folder. Nothing is lost yet, so an error is better than a wait."""
_LINE_WAIT_S = 1.0
"""How long a commit waits until the line of its step is written."""
_FINAL_CHECK_S = 0.5
"""Time between two checks of the last writes."""
HANDOVER_TIMEOUT_S = 5.0
"""How long a leader that is replaced or leaves waits for its writers."""
_STORAGE_CHECK_S = 0.5
"""Time between two checks of a storage that fails."""


class RunOutput:
    """Writes what the run reports. While storage fails, lines are kept and the run goes on, for a limited time.

    It reads the leader's state and does not change it. The launcher sees incidents and the storage's health in the
    store.
    """

    def __init__(
        self,
        job: Job,
        state: LeaderState,
        hooks: HookRunner,
        clock: Clock,
        store_writer: StoreWriter,
        tasks: BackgroundTasks,
        on_give_up: Callable[[CulmError], None],
    ) -> None:
        """`on_give_up`: called with the error that ends the run when a write has failed for too long."""
        setup = state.setup
        self._job, self._state, self._hooks, self._clock = job, state, hooks, clock
        self._store_writer, self._tasks, self._on_give_up = store_writer, tasks, on_give_up
        self._writers = hooks.create_writers(setup.writers)
        self._health = StorageHealth(clock.now, self._log_storage_event)
        self._folder = RunFolder(setup.out, resumed_at=None if setup.resume is None else setup.start)
        self._lines = self._buffer_lines(self._folder)

    def _buffer_lines(self, folder: RunFolder) -> LineBuffer:
        return LineBuffer(
            folder,
            self._clock,
            lambda why: self._handle_failure("lines", self._state.setup.out or "", why, "lines of steps and events"),
            lambda dropped: self._health.record_recovery("lines", dropped),
        )

    @property
    def checkpoint_folder(self) -> str | None:
        """The folder of the run's checkpoints."""
        return self._folder.checkpoints

    async def open(self, new_run: bool) -> None:
        """Open the run folder and the other writers. Raises RunError if the folder of a new run cannot be written;
        else lines are kept until it can."""
        state = self._state
        if not new_run:
            self._folder = RunFolder(state.setup.out, resumed_at=state.setup.steps, creates=False)
            self._lines = self._buffer_lines(self._folder)
        self._lines.open()
        if new_run and not await self._lines.flush(_OPEN_TIMEOUT_S, despite_failure=True):
            raise RunError(f"{self._health.describe()}: check that node {state.node} can write to {state.setup.out}")
        name = state.setup.name or "culm"
        config = run_started_fields(self._job, state.setup, state.timeouts)
        self._writers.open(
            RunInfo(
                id=hashlib.sha256(f"{name} {state.setup.out} {state.started_at}".encode()).hexdigest()[:16],
                name=name,
                out=state.setup.out,
                first_step=state.ledger.next_step,
                samples=state.ledger.samples,
                config=config,
            )
        )
        if new_run:
            self.log_event("run_started", **config)

    # Lines, writers and hooks for events.

    def log_event(self, kind: str, node: int | None = None, **fields: Any) -> None:
        """Write an event about the leader's own work."""
        now = self._clock.now()
        self.write_event({"t": round(now - self._state.started_at, 6), "kind": kind, "node": node, **fields})

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Write a line of events.jsonl, and call the job's hook for such an event."""
        self._lines.write_event(event)
        self._writers.write_event(event)
        self._log_writer_failures()
        if has_event_hook(self._job, event):
            self._hooks.start_event_hook(event, self._state.setup.hook_timeout, self._log_event_hook)

    def write_step(self, metrics: StepMetrics) -> None:
        """Write a line of steps.jsonl."""
        self._lines.write_step(metrics)
        self._writers.write_step(metrics)
        self._log_writer_failures()

    def rewind_lines(self, step: int) -> None:
        """Remove the lines of this step and later ones."""
        self._lines.rewind(step)

    async def flush_lines(self) -> None:
        """Wait until the lines so far are written, unless that takes long."""
        await self._lines.flush_unless_hanging(_LINE_WAIT_S)

    async def sync(self) -> None:
        """Copy lines to a run folder that is a URL, in the background, if this node is still the leader: a replaced
        leader would overwrite the lines of the new one."""
        if self._lines.has_unsynced_lines and await self._store_writer.accepts_writes(self._state.node):
            self._lines.sync()

    async def hand_over(self, timeout_s: float = HANDOVER_TIMEOUT_S) -> None:
        """Write the lines so far, for a limited time."""
        await self.sync()
        await self._lines.flush(timeout_s)

    def _log_writer_failures(self) -> None:
        for failure in self._writers.take_failures():
            self.log_event("writer_failed", writer=failure.writer, why=failure.why)
            sentence = f"the writer {failure.writer} failed ({failure.why}) and gets no more steps; the run goes on"
            self._store_writer.enqueue("incident", sentence.encode(), keep_every_value=True)

    def _log_event_hook(self, report: EventHookReport) -> None:
        """Log a hook for events that has failed, or that takes long. The run does not depend on it."""
        if report.why:
            self.log_event("hook_failed", name=report.name, cause=report.cause, why=report.why)
        else:
            self.log_event("hook_slow", name=report.name, cause=report.cause, seconds=round(report.seconds, 3))

    async def finish_event_hooks(self) -> None:
        """Wait until the hooks for events have returned, for a limited time."""
        timeout_s = self._state.setup.hook_timeout
        await self._hooks.finish_event_hooks(CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)

    async def close_writers(self, summary: Mapping[str, Any] | None, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the writers beside the run folder, and log those that failed. Does nothing if they are closed."""
        if self._writers.is_open:
            await self._clock.run_in_thread(self._writers.close, summary, timeout_s)
            self._log_writer_failures()

    async def finish_failed_run(self) -> None:
        """Write everything of a run that has failed, unless that takes too long."""
        await self.finish_event_hooks()
        await self.close_writers(None)
        await self.hand_over(STALL_S)

    def close(self) -> None:
        """Give up lines that are not written."""
        self._lines.close()

    # Files beside the lines.

    async def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file in a thread. Raises RunError."""
        await self._clock.run_in_thread(self._folder.write_json, name, value)

    async def write_final_files(
        self, files: Mapping[str, Mapping[str, Any]], write_more: Callable[[], Awaitable[None]]
    ) -> None:
        """Write the files of a complete run, by name, with retries; then call `write_more`, and write all lines. Raises
        RunError if that fails for too long.

        In a thread: with many nodes it takes longer than a lease, which the event loop must renew meanwhile.
        """

        def write_files() -> None:
            for name, value in files.items():
                self._folder.write_json(name, value)

        def handle_failure(why: str, stalled: bool) -> None:
            del stalled
            self._handle_failure("summary", self._state.setup.out or "", why, "summary.json")

        writing = asyncio.ensure_future(retry_storage(self._clock, write_files, handle_failure))
        try:
            while not writing.done():
                await asyncio.wait([writing], timeout=_FINAL_CHECK_S)
                self._raise_if_storage_failed()
            writing.result()
            self._health.record_recovery("summary")
            await write_more()
            if self._folder.is_url:
                self._lines.sync()
            while not await self._lines.flush(_FINAL_CHECK_S, despite_failure=True):
                self._raise_if_storage_failed()
        finally:
            writing.cancel()

    # The health of the storage.

    def handle_storage_report(self, report: StorageReport) -> None:
        """A worker cannot write its checkpoint shard, or can again."""
        name = shard_write_name(report.worker)
        if report.skipped:
            self._health.record_skipped(report.step)
        elif report.why:
            where = self._state.members.describe_worker(report.worker)
            delayed = f"the checkpoint of step {report.step}"
            self._handle_failure(name, self.checkpoint_folder or "", f"{where}: {report.why}", delayed)
        else:
            self._health.record_recovery(name)

    def handle_commit_failure(self, delayed: str, why: str) -> None:
        """A checkpoint cannot be committed or read, which delays this."""
        self._handle_failure("commit", self.checkpoint_folder or "", why, delayed)

    def handle_commit_recovery(self) -> None:
        """Checkpoints can be committed and read again."""
        self._health.record_recovery("commit")

    def _handle_failure(self, name: str, path: str, why: str, delayed: str) -> None:
        """Record that a write fails. The run goes on, unless that lasts longer than the limits allow."""
        watched = self._health.is_failing
        self._health.record_failure(name, path, why, delayed)
        if self._folder.is_open:
            self._folder.creates = self._health.failing_s(path) > MISSING_FOLDER_S
        if not watched:
            self._tasks.start(self._watch_storage())

    async def _watch_storage(self) -> None:
        """While a write fails: end the run when that has lasted too long."""
        while self._health.is_failing:
            members = self._state.members
            self._health.forget_workers(members.workers_of(members.departed_nodes))
            if (why := self._give_up_reason()) is not None:
                self._on_give_up(RunError(why))
                return
            await self._clock.sleep(_STORAGE_CHECK_S)

    def _raise_if_storage_failed(self) -> None:
        if (why := self._give_up_reason()) is not None:
            raise RunError(why)

    def _give_up_reason(self) -> str | None:
        """Why a run must end whose storage fails; None: it goes on."""
        self._health.note_training(done=self._state.all_steps_committed)
        return self._health.give_up_reason(self._state.setup.storage_timeout)

    def _log_storage_event(self, kind: str, **fields: Any) -> None:
        """Log a change of the storage's health, and show it to the launcher."""
        self.log_event(kind, **fields)
        self._store_writer.enqueue("storage", encode({"kind": kind, **fields}), keep_every_value=True)
