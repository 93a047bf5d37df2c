"""The leader: a coroutine on one of the nodes that executes the instructions of `LeaderState` and feeds it events."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from culm.cluster.leader import events
from culm.cluster.leader.background_tasks import BackgroundTasks
from culm.cluster.leader.checkpoints.checkpoint_committer import CheckpointCommitter
from culm.cluster.leader.events import (
    Call,
    CallBody,
    Completed,
    EndLeading,
    ErrorRaised,
    Instruction,
    KeyChanged,
    LeaderEvent,
)
from culm.cluster.leader.leader_state import JobFacts, LeaderState, is_planning, to_error
from culm.cluster.leader.output.input_log import VERSION as INPUT_LOG_VERSION
from culm.cluster.leader.output.input_log import InputLogWriter, LogHeader
from culm.cluster.leader.output.run_files import RunFiles
from culm.cluster.leader.output.run_output import HANDOVER_TIMEOUT_S, RunOutput
from culm.cluster.leader.output.store_writer import StoreWriter
from culm.cluster.leader.output.stored_run import StoredRun, killed_at
from culm.cluster.leader.planning_calls import PlanningCalls
from culm.cluster.run_setup import RunResult, encode
from culm.cluster.store.store import SessionLost
from culm.errors import BudgetReached, CulmError, RunError, unexpected_failure
from culm.metric import declared_metrics
from culm.observe.writers.run_folder import local_path
from culm.runtime import messages

if TYPE_CHECKING:
    from culm.cluster.agent.liveness_probe import RefusesConnection
    from culm.cluster.leader.hang_detector import HangDetector
    from culm.cluster.leader.output.hook_runner import HookRunner
    from culm.cluster.run_setup import RunSetup
    from culm.cluster.store.store import Store
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.interface import Transport

_LOG_DELAY_S = 0.2
"""How long recorded events are collected before they are written."""

LeaderInput: TypeAlias = "LeaderEvent | CulmError"


class Leader:
    """Leads one run from the first node to the summary.

    Inputs from the store, from workers and from its own agent go through one inbox to the state machine, one at a time.
    An error in handling one becomes the result of the run. Calls of the state machine are awaited, except for planning:
    that runs in a thread while further inputs are handled.
    """

    def __init__(
        self,
        job: Job,
        setup: RunSetup,
        node: int,
        transport: Transport,
        clock: Clock,
        store: Store,
        hang_detector: HangDetector,
        hooks: HookRunner,
        *,
        previous_leader: int | None = None,
        sessions_expired: bool = False,
        refuses_connection: RefusesConnection | None = None,
        term: int = 0,
        simulated: bool = False,
    ) -> None:
        """`previous_leader`: the node that was the leader before and is gone. `sessions_expired`: this node and the
        previous leader have lost their sessions in the store, as others may have: they may come back.
        `refuses_connection`: whether a process has ended, by its address. `term`: how often this node was the leader
        before. `simulated`: time is virtual. Then the state is validated after every event, and plans are made at
        once."""
        self.inbox: asyncio.Queue[LeaderInput] = asyncio.Queue()
        self.hang_detector = hang_detector
        self.may_leave_event = asyncio.Event()
        """Set when this node has notice and has handed over everything."""
        self.dismissed_event = asyncio.Event()
        """Set when this node is declared lost."""
        self.transport, self.clock, self.store = transport, clock, store
        self.state = LeaderState(
            JobFacts.from_job(job),
            setup,
            node,
            transport.address,
            clock.now(),
            slowest_action_s=hang_detector.slowest_action_s,
            metrics=declared_metrics(job.metrics),
        )
        self._node, self._previous_leader, self._simulated = node, previous_leader, simulated
        self._sessions_expired, self._refuses_connection, self._term = sessions_expired, refuses_connection, term
        self._hooks = hooks
        self._tasks = BackgroundTasks(self.inbox.put_nowait)
        self._store_writer = StoreWriter(store, self.state.timeouts.store_call)
        self._stored_run = StoredRun(store, self._store_writer, clock)
        self._output = RunOutput(
            job, self.state, hooks, clock, self._store_writer, self._tasks, on_give_up=self.inbox.put_nowait
        )
        self._run_files = RunFiles(job, self.state, clock, self._output, self._tasks)
        self._planning = PlanningCalls(self.state, clock, self._output.log_event, simulated=simulated)
        self._committer = CheckpointCommitter(self.state.checkpoints, setup, clock)
        self._committer.on_failure = self._output.handle_commit_failure
        self._committer.on_recovery = self._output.handle_commit_recovery
        self._committer.on_commit_end = lambda: self.inbox.put_nowait(events.CheckpointWritten())
        self._next_events: deque[LeaderEvent] = deque()
        """Events to handle before those of the inbox."""
        self._input_log = self._create_input_log()
        self._log_write: asyncio.Task[None] | None = None

    def receive(self, message: messages.Message) -> None:
        """Put a message into the inbox."""
        self.inbox.put_nowait(message)

    async def run(self) -> None:
        """Lead until the result is in the store. A result that is there already is kept."""
        for prefix in ("nodes/", "missing/", "wish/", "gate/", "prices/", "rentals/"):
            self._tasks.start(self._watch_store(prefix))
        try:
            result = await self._lead_to_result()
            await self._store_writer.wait_until_written()
            await self.store.swap("result", None, encode(result))
        finally:
            await self._close()

    async def _lead_to_result(self) -> RunResult:
        """Lead the run and write its files. Returns the summary or the error as the result."""
        try:
            await self._lead_to_end()
            await self._output.finish_event_hooks()
            summary = self._run_files.build_summary()
            await self._committer.prune_leftovers(self._output.checkpoint_folder or "")
            await self._run_files.write(summary)
            await self._output.close_writers(summary)
            if self.state.spending.stop_reason and not self.state.is_complete:
                raise BudgetReached(self.state.budget_message())
            if self.state.all_nodes_leaving:
                raise self.state.all_nodes_left_error()
            return RunResult(summary=summary)
        except SessionLost:
            raise
        except Exception as reason:
            error = reason if isinstance(reason, CulmError) else unexpected_failure("the leader", reason)
        self._output.log_event("failed", error=type(error).__name__, message=str(error))
        await self._run_files.write_final_cost()
        await self._output.finish_failed_run()
        return RunResult(error=type(error).__name__, message=str(error), traceback_text=error.trace)

    async def _lead_to_end(self) -> None:
        """Feed events to the state machine until the run has ended. Raises the error that ended it."""
        started = await self._stored_run.load(
            previous_leader=self._previous_leader,
            sessions_expired=self._sessions_expired,
            reads_hook_result=self.state.setup.gate == "hook",
        )
        self._next_events.append(started)
        while True:
            event = self._next_events.popleft() if self._next_events else await self._next_input()
            if isinstance(event, messages.StorageReport):
                self._handle_storage_report(event)
                continue
            end = await self._handle_event(event)
            if end is not None:
                if end.error is not None:
                    raise to_error(end.error)
                return

    async def _next_input(self) -> LeaderEvent:
        """The next event of the inbox. Raises SessionLost: the run goes on, but not with this leader."""
        item = await self.inbox.get()
        if isinstance(item, SessionLost):
            raise item
        return _to_event(item)

    async def _handle_event(self, event: LeaderEvent) -> EndLeading | None:
        """Handle an event, and the results of the calls that it needs. Returns the end of the run, if it is that."""
        next_event: LeaderEvent | None = event
        while next_event is not None:
            now = self.clock.now()
            instructions = self.state.handle(next_event, now)
            self._record_input(next_event, now, instructions)
            if self._simulated:
                self.state.validate(next_event)
            next_event = None
            for instruction in instructions:
                if isinstance(instruction, EndLeading):
                    return instruction
                if not isinstance(instruction, Call):
                    self._execute(instruction)
                elif is_planning(instruction) and not self._simulated:
                    self._tasks.start(self._plan_in_background(instruction))
                else:
                    next_event = await self._complete_call(instruction)
        return None

    def _handle_storage_report(self, report: messages.StorageReport) -> None:
        self._output.handle_storage_report(report)
        if report.skipped:
            self._tasks.start(self._committer.delete_skipped(self._output.checkpoint_folder or "", report.step))

    async def _plan_in_background(self, call: Call) -> None:
        """Plan a recovery or a reshape while the leader handles other events. An exception ends the run, because no
        event would follow; SessionLost ends this leader only."""
        try:
            completed: LeaderInput = await self._complete_call(call)
        except SessionLost as error:
            completed = error
        except Exception as error:  # of a strategy of the user, for example
            failure = unexpected_failure("planning the next epoch", error)
            completed = Completed(call.number, error=ErrorRaised.from_error(failure))
        self.inbox.put_nowait(completed)

    async def _complete_call(self, call: Call) -> Completed:
        """Execute a call. An expected error becomes part of the result; others raise."""
        try:
            return Completed(call.number, await self._perform(call.body))
        except SessionLost:
            raise
        except CulmError as error:
            return Completed(call.number, error=ErrorRaised.from_error(error))

    def _execute(self, instruction: Instruction) -> None:  # noqa: PLR0912
        """Execute an instruction that has no result."""
        match instruction:
            case events.SendMessage(address, body):
                self.transport.send_message(address, body)
            case events.SendToAll(addresses, body):
                for address in addresses:
                    self.transport.send_message(address, body)
            case events.PutKey(key, value, keep_every_value):
                self._store_writer.enqueue(key, value, keep_every_value=keep_every_value)
            case events.PutSnapshot(snapshot):
                self._store_writer.enqueue_snapshot(snapshot)
            case events.WriteStep(metrics):
                self._output.write_step(metrics)
            case events.WriteEvent(event):
                self._output.write_event(event)
            case events.WriteCost(record):
                self._run_files.write_cost(record)
            case events.RewindLines(step):
                self._output.rewind_lines(step)
            case events.SyncFolder():
                self._tasks.start(self._output.sync())
            case events.StartTimer(seconds, timer):
                if seconds:
                    self._tasks.start(self._post_later(seconds, timer))
                else:
                    self.inbox.put_nowait(timer)
            case events.StartHook(metrics):
                self._hooks.start_hook(metrics, self._next_events.append if self._simulated else self.inbox.put_nowait)
            case events.ExpectHeartbeats(epoch, workers, slowest_action_s):
                self.hang_detector.expect_heartbeats(epoch, workers, self.clock.now())
                self.hang_detector.slowest_action_s = max(self.hang_detector.slowest_action_s, slowest_action_s)
            case events.EvictNode(node):
                self.hang_detector.request_eviction(node)
            case events.PrecomputePlans():
                self._tasks.start(self._planning.precompute_plans(instruction))
            case events.ImprovePlan(shape):
                self._tasks.start(self._post_result(self._planning.improve_plan(shape)))
            case events.DecideReshape(epoch):
                case = self._planning.policy_case()
                self._tasks.start(self._post_result(self._planning.decide_reshape(epoch, case)))
            case events.BuildShape(depths):
                self._tasks.start(self._post_result(self._planning.build_shape(depths)))
            case events.LeaveNode(dismissed):
                self._tasks.start(self._leave_node(self.dismissed_event if dismissed else self.may_leave_event))

    async def _perform(self, body: CallBody) -> Any:  # noqa: PLR0911, PLR0912
        """Execute a call and return its result."""
        match body:
            case events.OpenWriters(new_run):
                await self._output.open(new_run)
            case events.FlushLines():
                await self._output.flush_lines()
            case events.WaitForStore():
                await self._store_writer.wait_until_written()
            case events.PublishEpoch():
                return await self._stored_run.publish_epoch(body)
            case events.CommitStep():
                return await self._stored_run.commit_step(body)
            case events.ReachCommit(step):
                await self.clock.after_action(self._node, step, "commit")
            case events.DeleteKey(key):
                await self.store.delete(key)
            case events.FindCheckpoint():
                return await self._committer.newest_checkpoint(self._output.checkpoint_folder)
            case events.ReturnToVerified():
                return await self._committer.return_to_verified(self._output.checkpoint_folder)
            case events.CommitCheckpoint(committed_steps):
                return await self._committer.commit_newest(committed_steps, self._output.checkpoint_folder or "")
            case events.ProbeWorkers(addresses):
                return await self._probe_workers(addresses)
            case events.FindSmallerStages():
                return await self._planning.find_smaller_stages()
            case events.PlanReshape():
                return await self._planning.plan_reshape(body)
            case events.PlanRecovery():
                return await self._planning.plan_recovery(body)
        return None

    async def _probe_workers(self, addresses: tuple[str, ...]) -> events.EndedWorkers:
        """The workers whose process has ended. Without a probe: all of them."""
        if self._refuses_connection is None:
            return events.EndedWorkers(addresses)
        answers = await asyncio.gather(*map(self._refuses_connection, addresses))
        return events.EndedWorkers(tuple(at for at, ended in zip(addresses, answers, strict=True) if ended))

    async def _post_later(self, seconds: float, event: events.TimerEvent) -> None:
        await self.clock.sleep(seconds)
        self.inbox.put_nowait(event)

    async def _post_result(self, work: Awaitable[LeaderEvent | None]) -> None:
        """Feed the event that some work returns to the state machine, if it returns one."""
        event = await work
        if event is not None:
            self.inbox.put_nowait(event)

    async def _leave_node(self, leave_event: asyncio.Event) -> None:
        """Let this node go, with this event, after its state is in the store for the next leader."""
        self._store_writer.enqueue_snapshot(self.state.encode_snapshot())
        await self._store_writer.wait_until_written()
        await self._output.hand_over()
        leave_event.set()

    async def _watch_store(self, prefix: str) -> None:
        """Put changes under a prefix of the store into the inbox: nodes, and the launcher's permits under `gate/`."""
        try:
            async for key, value in self.store.watch(prefix):
                node = key.rpartition("/")[2] if prefix in ("nodes/", "missing/") else ""
                self.inbox.put_nowait(KeyChanged(key, value, killed_at(self.clock, int(node)) if node else {}))
        except RunError as error:
            self.inbox.put_nowait(error)

    # The input log.

    def _create_input_log(self) -> InputLogWriter | None:
        """The input log in a local run folder; None: the run has none."""
        state, folder = self.state, None if self.state.setup.out is None else local_path(self.state.setup.out)
        if folder is None:
            return None
        facts = (state.job, state.setup, state.node, state.address, state.now, state.slowest_action_s)
        name = f"leader-{self._node}.log" if not self._term else f"leader-{self._node}-{self._term}.log"
        return InputLogWriter(Path(folder) / name, LogHeader(INPUT_LOG_VERSION, *facts))

    def _record_input(self, event: LeaderEvent, now: float, instructions: list[Instruction]) -> None:
        """Record an event, and write it soon."""
        log = self._input_log
        if log is None or log.is_full:
            return
        log.add(event, now, instructions)
        if log.is_full:
            self._output.log_event("input_log_full", why="later events cannot be replayed")
        if self._log_write is None or self._log_write.done():
            self._log_write = self._tasks.start(self._write_input_log(log, _LOG_DELAY_S))

    async def _write_input_log(self, log: InputLogWriter, delay_s: float = 0.0) -> None:
        """Write recorded events in a thread. If that fails, nothing more is recorded: the run does not need it."""
        await self.clock.sleep(delay_s)
        try:
            await self.clock.run_in_thread(log.write)
        except OSError as error:
            self._input_log = None
            self._output.log_event("input_log_failed", why=str(error))

    async def _close_input_log(self) -> None:
        log, self._input_log = self._input_log, None
        if log is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HANDOVER_TIMEOUT_S):
                    await self._write_input_log(log)
            log.close()

    async def _close(self) -> None:
        """Close writers and tasks. Lines that cannot be written are lost: the result of the run is in the store."""
        self._tasks.cancel()
        try:
            await self._close_input_log()
            await self._output.close_writers(None, HANDOVER_TIMEOUT_S)
            await self._output.hand_over()
        finally:
            self._output.close()
            self._committer.close()
            await self._store_writer.close()
            await self._tasks.close()


def _to_event(item: LeaderInput) -> LeaderEvent:
    return ErrorRaised.from_error(item) if isinstance(item, CulmError) else item
