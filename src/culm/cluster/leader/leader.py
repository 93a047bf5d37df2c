"""The leader: a coroutine on one of the nodes that executes the instructions of `LeaderState` and feeds it events."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from culm.cluster.leader import events
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
from culm.cluster.leader.leader_snapshot import decode_snapshot
from culm.cluster.leader.leader_state import JobFacts, LeaderState, is_planning, to_error
from culm.cluster.leader.next_epoch import NextEpoch, nodes_by_slot, recovery_epoch, surviving_cluster
from culm.cluster.leader.output.input_log import VERSION as INPUT_LOG_VERSION
from culm.cluster.leader.output.input_log import InputLogWriter, LogHeader
from culm.cluster.leader.output.line_buffer import LineBuffer
from culm.cluster.leader.output.run_summary import run_started_fields, slot_label, speed_fields, summary_fields
from culm.cluster.leader.output.storage_health import StorageHealth, shard_write_name
from culm.cluster.leader.output.store_writer import StoreWriter
from culm.cluster.leader.plan_improver import search_plan
from culm.cluster.leader.policy_case import PolicyCase
from culm.cluster.leader.reshaped_epoch import ReshapeInputs, reshaped_epoch, template_epoch
from culm.cluster.run_setup import RunResult, encode
from culm.cluster.store.store import SessionLost
from culm.errors import BudgetReached, CulmError, RunError, unexpected_failure
from culm.market.cost_record import CostRecord, cost_fields
from culm.metric import declared_metrics
from culm.observe.event_hooks import EventHookReport, has_event_hook
from culm.observe.writers.run_folder import RunFolder, local_path, perfetto_trace
from culm.observe.writers.writer import RunInfo
from culm.observe.writers.writer_group import CLOSE_TIMEOUT_S
from culm.plan.recover.role_assignment import precompute_next_plans
from culm.plan.replan.plan_cache import PlanCache
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.runtime.storage_retry import MISSING_FOLDER_S, STALL_S, retry_storage
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.agent.liveness_probe import RefusesConnection
    from culm.cluster.leader.hang_detector import HangDetector
    from culm.cluster.leader.output.hook_runner import HookRunner
    from culm.cluster.run_setup import RunSetup
    from culm.cluster.store.store import Store
    from culm.job import Job
    from culm.observe.step_metrics import StepMetrics
    from culm.plan.reshape.pipeline_shape import PipelineShape
    from culm.runtime.clock import Clock
    from culm.transport.interface import Transport


_OPEN_TIMEOUT_S = 15.0
"""How long a run that begins waits for its folder. Nothing is lost yet, so an error is better than a wait."""
_LINE_WAIT_S = 1.0
"""How long a commit waits until the line of its step is written."""
FINAL_CHECK_S = 0.5
"""Time between two checks of the last writes."""
_HANDOVER_TIMEOUT_S = 5.0
"""How long a leader that is replaced or leaves waits for its writers."""
_LOG_DELAY_S = 0.2
"""How long recorded events are collected before they are written."""
_STORAGE_CHECK_S = 0.5
"""Time between two checks of a storage that fails."""

_MAX_PLANS = 512
"""Plans that a leader keeps. Each node that becomes slow has other costs, and with them other plans."""

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
        self._job, self._node, self._previous_leader, self._simulated = job, node, previous_leader, simulated
        self._sessions_expired, self._refuses_connection, self._term = sessions_expired, refuses_connection, term
        self._hooks, self._writers = hooks, hooks.create_writers(setup.writers)
        self._storage_health = StorageHealth(clock.now, self._log_storage_event)
        self._folder = RunFolder(setup.out, resumed_at=None if setup.resume is None else setup.start)
        self._line_buffer = self._buffer_lines(self._folder)
        self._store_writer = StoreWriter(store, self.state.timeouts.store_call)
        self._plan_cache = PlanCache(max_solutions=_MAX_PLANS)
        self._committer = CheckpointCommitter(self.state.checkpoints, setup, clock)
        self._committer.on_failure = self._handle_commit_failure
        self._committer.on_recovery = partial(self._storage_health.record_recovery, "commit")
        self._committer.on_commit_end = lambda: self.inbox.put_nowait(events.CheckpointWritten())
        self._published_epoch: bytes | None = None
        """The encoded epoch in the store."""
        self._announcement: bytes | None = None
        """The announcement in the store; of an earlier epoch if a leader was lost before it could announce one."""
        self._next_events: deque[LeaderEvent] = deque()
        """Events to handle before those of the inbox."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        """Tasks that have not ended, in the order in which they were started."""
        self._input_log = self._create_input_log()
        self._log_write: asyncio.Task[None] | None = None
        self._cost_record: CostRecord | None = None
        """The newest account of what the nodes have cost."""
        self._cost_write: asyncio.Task[None] | None = None

    def receive(self, message: messages.Message) -> None:
        """Put a message into the inbox."""
        self.inbox.put_nowait(message)

    async def run(self) -> None:
        """Lead until the result is in the store. A result that is there already is kept."""
        for prefix in ("nodes/", "missing/", "wish/", "gate/", "prices/", "rentals/"):
            self._start_task(self._watch_store(prefix))
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
            await self._finish_event_hooks()
            summary = self._build_summary()
            await self._committer.prune_leftovers(self._folder.checkpoints or "")
            await self._write_run_files(summary)
            await self._close_writers(summary)
            if self.state.spending.stop_reason and not self.state.is_complete:
                raise BudgetReached(self.state.budget_message())
            if self.state.all_nodes_leaving:
                raise self.state.all_nodes_left_error()
            return RunResult(summary=summary)
        except SessionLost:
            raise
        except Exception as reason:
            error = reason if isinstance(reason, CulmError) else unexpected_failure("the leader", reason)
        self.log_event("failed", error=type(error).__name__, message=str(error))
        await self._write_final_cost()
        await self._finish_event_hooks()
        await self._close_writers(None)
        await self._sync_run_folder()
        await self._line_buffer.flush(STALL_S)
        return RunResult(error=type(error).__name__, message=str(error), traceback_text=error.trace)

    async def _lead_to_end(self) -> None:
        """Feed events to the state machine until the run has ended. Raises the error that ended it."""
        self._next_events.append(await self._load_from_store())
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
                    self._start_task(self._plan_in_background(instruction))
                else:
                    next_event = await self._complete_call(instruction)
        return None

    async def _plan_in_background(self, call: Call) -> None:
        """Plan a recovery while the leader handles other events. An exception ends the run: no event would follow."""
        try:
            completed = await self._complete_call(call)
        except Exception as error:  # of a strategy of the user, for example
            failure = unexpected_failure("planning the recovery", error)
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
                self._write_step(metrics)
            case events.WriteEvent(event):
                self._write_event(event)
            case events.WriteCost(record):
                self._write_cost(record)
            case events.RewindLines(step):
                self._line_buffer.rewind(step)
            case events.SyncFolder():
                self._start_task(self._sync_run_folder())
            case events.StartTimer(seconds, timer):
                if seconds:
                    self._start_task(self._post_later(seconds, timer))
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
                self._start_task(self._precompute_plans(instruction))
            case events.ImprovePlan(shape):
                self._start_task(self._improve_plan(shape))
            case events.DecideReshape(epoch):
                self._start_task(self._decide_reshape(epoch, self._policy_case()))
            case events.LeaveNode(dismissed):
                self._start_task(self._leave_node(self.dismissed_event if dismissed else self.may_leave_event))

    async def _perform(self, body: CallBody) -> Any:  # noqa: PLR0911, PLR0912
        """Execute a call and return its result."""
        match body:
            case events.OpenWriters(new_run):
                await self._open_writers(new_run)
            case events.FlushLines():
                await self._line_buffer.flush_unless_hanging(_LINE_WAIT_S)
            case events.WaitForStore():
                await self._store_writer.wait_until_written()
            case events.PublishEpoch():
                return await self._publish_epoch(body)
            case events.CommitStep():
                return await self._commit_step(body)
            case events.ReachCommit(step):
                await self.clock.after_action(self._node, step, "commit")
            case events.DeleteKey(key):
                await self.store.delete(key)
            case events.FindCheckpoint():
                return await self._committer.newest_checkpoint(self._folder.checkpoints)
            case events.ReturnToVerified():
                return await self._committer.return_to_verified(self._folder.checkpoints)
            case events.CommitCheckpoint(committed_steps):
                return await self._committer.commit_newest(committed_steps, self._folder.checkpoints or "")
            case events.ProbeWorkers(addresses):
                return await self._probe_workers(addresses)
            case events.FindSmallerStages():
                return await self.clock.run_in_thread(self._policy_case().find_smaller_stages)
            case events.PlanReshape():
                return await self.clock.run_in_thread(
                    partial(self._plan_reshape, body, self.state.initial_setup, self.state.epoch)
                )
            case events.PlanRecovery():
                return await self.clock.run_in_thread(
                    partial(self._plan_recovery, body, self.state.setup, self.state.epoch)
                )
        return None

    async def _probe_workers(self, addresses: tuple[str, ...]) -> events.EndedWorkers:
        """The workers whose process has ended. Without a probe: all of them."""
        if self._refuses_connection is None:
            return events.EndedWorkers(addresses)
        answers = await asyncio.gather(*map(self._refuses_connection, addresses))
        return events.EndedWorkers(tuple(at for at, ended in zip(addresses, answers, strict=True) if ended))

    def _plan_recovery(self, order: events.PlanRecovery, setup: RunSetup, old: Epoch | None) -> events.PlannedEpoch:
        """Plan the next epoch. Runs in a thread."""
        assert old is not None
        self._collect_garbage()
        hits = self._plan_cache.hits
        with paused_collection():
            planned = self._plan_epoch(order, setup, old)
        self._exempt_plans_from_collection()
        return events.PlannedEpoch(planned.epoch, planned.why, planned.source, self._plan_cache.hits > hits)

    def _plan_epoch(self, order: events.PlanRecovery, setup: RunSetup, old: Epoch) -> NextEpoch:
        return recovery_epoch(
            setup,
            old,
            order.number,
            self.transport.address,
            order.inventories,
            order.committed,
            plans=self._plan_cache,
            moving_slots=order.moving_slots,
            arrivals=order.arrivals,
            leaving_slots=order.leaving_slots,
            zones=order.zones,
            departure_steps=order.departure_steps,
            slow_slots=order.slow_slots,
            slow_reason=order.slow_reason,
            limits_activations=order.limits_activations,
            failed_slots=order.failed_slots,
        )

    def _collect_garbage(self) -> None:
        """Free what would otherwise be exempted from collection, and never be freed, with the plans that are made next.
        Takes a millisecond: what lives for long has been exempted already."""
        if not self._simulated:
            gc.collect()

    def _plan_reshape(self, order: events.PlanReshape, setup: RunSetup, old: Epoch | None) -> events.PlannedEpoch:
        """Plan the next epoch in another shape. Runs in a thread. Raises PlanError if that is impossible."""
        assert old is not None
        inputs = ReshapeInputs(
            setup=setup,
            old_epoch=old,
            epoch_number=order.number,
            leader=self.transport.address,
            workers=order.workers,
            inventories=order.inventories,
            step=order.step,
            zones=order.zones,
        )
        with paused_collection():
            if order.depths is None:
                planned = template_epoch(inputs)
            else:
                planned = reshaped_epoch(inputs, order.depths, order.why, order.shape)
        self._exempt_plans_from_collection()
        return events.PlannedEpoch(planned.epoch, planned.why, planned.source, planned_ahead=False)

    def _exempt_plans_from_collection(self) -> None:
        """Plans stay for long, and looking through them for garbage stops the leader for tenths of a second. In a
        simulation many runs follow each other in one process, so that their values are not exempted."""
        if not self._simulated:
            gc.freeze()

    async def _precompute_plans(self, order: events.PrecomputePlans) -> None:
        """Precompute, one at a time in a thread, the plans for the next possible losses, so that a loss finds its plan
        in the cache. A failure only costs that head start: it is logged as an event and the run continues."""
        try:
            cluster = surviving_cluster(
                self.state.setup, order.inventories, order.committed, order.old_epoch, self._plan_cache
            )
            members = self.state.epoch.members if self.state.epoch is not None else ()
            self._collect_garbage()
            plans = precompute_next_plans(replace(cluster, nodes=nodes_by_slot(members)))
            while await self.clock.run_in_thread(next, plans, None) is not None:
                pass
            self._exempt_plans_from_collection()
        except Exception as error:
            self.log_event("unplanned", why=f"cannot precompute plans: {type(error).__name__}: {error}")

    async def _improve_plan(self, shape: PipelineShape) -> None:
        """Search for a better plan in a thread. A failure leaves the plan as it is."""
        try:
            self.inbox.put_nowait(await self.clock.run_in_thread(search_plan, self.state.initial_setup, shape))
        except Exception as error:
            self.log_event("unplanned", why=f"cannot improve the plan: {type(error).__name__}: {error}")

    def _policy_case(self) -> PolicyCase:
        return self.state.handlers.epoch_change.reshape_controller.policy_case()

    async def _decide_reshape(self, epoch: int, case: PolicyCase) -> None:
        self.inbox.put_nowait(events.ReshapeDecided(epoch, await self.clock.run_in_thread(case.decide)))

    async def _load_from_store(self) -> events.Started:
        """Read what a previous leader has left in the store."""
        epoch, record = await self.store.get("epoch"), await self._store_writer.read_snapshot()
        self._published_epoch, self._announcement = epoch, await self.store.get("announced")
        nodes: dict[int, bytes] = {}
        killed: dict[int, float] = {}
        hook_result = await self.store.get("hook") if self.state.setup.gate == "hook" else None
        if epoch is not None:
            found = messages.decode(epoch)
            assert isinstance(found, Epoch)
            for node in dict.fromkeys(member.node for member in found.present_members):
                known = await self.store.get(f"nodes/{node}")
                if known is not None:
                    nodes[node] = known
                killed |= self._killed_at(node)
        absent = await self._absent_nodes(record)
        return events.Started(
            epoch,
            record,
            nodes,
            hook_result,
            self._previous_leader,
            killed,
            absent_nodes=absent,
            sessions_expired=self._sessions_expired,
        )

    async def _absent_nodes(self, record: bytes | None) -> tuple[int, ...]:
        """The nodes that the previous leader knew as rented and that are not in the store."""
        spending = None if record is None else decode_snapshot(record).spending
        known = () if spending is None else spending.names
        return tuple([node for node in known if await self.store.get(f"nodes/{node}") is None])

    def _killed_at(self, node: int) -> dict[int, float]:
        at = self.clock.killed_at(node)
        return {} if at is None else {node: at}

    async def _publish_epoch(self, order: events.PublishEpoch) -> bool:
        """Write an epoch to the store, then announce it. Both fail for a leader that was replaced."""
        await self._store_writer.wait_until_written()  # snapshots that workers keep then belong to this epoch
        if not await self.store.swap("epoch", self._published_epoch, order.body):
            return False
        self._published_epoch = order.body
        inline = b"" if order.is_large else order.body
        announcement = encode(messages.EpochAnnouncement(order.number, order.digest, inline))
        if not await self.store.swap("announced", self._announcement, announcement):
            return False
        self._announcement = announcement
        return True

    async def _commit_step(self, commit: events.CommitStep) -> bool:
        """Write a commit to the store. Returns whether it is there."""
        lags = commit.store_unreachable and self._store_writer.has_pending_writes
        if commit.record is not None:
            self._store_writer.enqueue_snapshot(commit.record)
        if commit.step is not None:
            self._store_writer.enqueue("step", commit.step, keep_every_value=True)
        if commit.wait:
            await self._store_writer.wait_until_written()
            return True
        return not lags and await self._store_writer.wait_with_timeout()

    async def _post_later(self, seconds: float, event: events.TimerEvent) -> None:
        await self.clock.sleep(seconds)
        self.inbox.put_nowait(event)

    async def _leave_node(self, leave_event: asyncio.Event) -> None:
        """Let this node go, with this event, after its state is in the store for the next leader."""
        self._store_writer.enqueue_snapshot(self.state.encode_snapshot())
        await self._store_writer.wait_until_written()
        await self._sync_run_folder()
        await self._line_buffer.flush(_HANDOVER_TIMEOUT_S)
        leave_event.set()

    async def _watch_store(self, prefix: str) -> None:
        """Put changes under a prefix of the store into the inbox: nodes, and the launcher's permits under `gate/`."""
        try:
            async for key, value in self.store.watch(prefix):
                node = key.rpartition("/")[2] if prefix in ("nodes/", "missing/") else ""
                self.inbox.put_nowait(KeyChanged(key, value, self._killed_at(int(node)) if node else {}))
        except RunError as error:
            self.inbox.put_nowait(error)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside the others. An unexpected exception ends the run: nobody waits for the task."""
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._handle_task_end)
        return task

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, CulmError):  # a store that is lost is reported by its watch
            self.inbox.put_nowait(unexpected_failure("the leader", error))

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
            self.log_event("input_log_full", why="later events cannot be replayed")
        if self._log_write is None or self._log_write.done():
            self._log_write = self._start_task(self._write_input_log(log, _LOG_DELAY_S))

    async def _write_input_log(self, log: InputLogWriter, delay_s: float = 0.0) -> None:
        """Write recorded events in a thread. If that fails, nothing more is recorded: the run does not need it."""
        await self.clock.sleep(delay_s)
        try:
            await self.clock.run_in_thread(log.write)
        except OSError as error:
            self._input_log = None
            self.log_event("input_log_failed", why=str(error))

    async def _close_input_log(self) -> None:
        log, self._input_log = self._input_log, None
        if log is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
                    await self._write_input_log(log)
            log.close()

    # The run folder and the writers.

    async def _open_writers(self, new_run: bool) -> None:
        """Open the run folder and the other writers. Raises RunError if the folder of a new run cannot be written;
        else lines are kept until it can."""
        state = self.state
        if not new_run:
            self._folder = RunFolder(state.setup.out, resumed_at=state.setup.steps, creates=False)
            self._line_buffer = self._buffer_lines(self._folder)
        self._line_buffer.open()
        if new_run and not await self._line_buffer.flush(_OPEN_TIMEOUT_S, despite_failure=True):
            raise RunError(
                f"{self._storage_health.describe()}: check that node {self._node} can write to {state.setup.out}"
            )
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

    def log_event(self, kind: str, node: int | None = None, **fields: Any) -> None:
        """Write an event about the leader's own work."""
        self._write_event(
            {"t": round(self.clock.now() - self.state.started_at, 6), "kind": kind, "node": node, **fields}
        )

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._line_buffer.write_event(event)
        self._writers.write_event(event)
        self._log_writer_failures()
        if has_event_hook(self._job, event):
            self._hooks.start_event_hook(event, self.state.setup.hook_timeout, self._log_event_hook)

    def _write_step(self, metrics: StepMetrics) -> None:
        self._line_buffer.write_step(metrics)
        self._writers.write_step(metrics)
        self._log_writer_failures()

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

    async def _finish_event_hooks(self) -> None:
        """Wait until the hooks for events have returned, for a limited time."""
        timeout_s = self.state.setup.hook_timeout
        await self._hooks.finish_event_hooks(CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)

    async def _close_writers(self, summary: Mapping[str, Any] | None, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the writers beside the run folder, and log those that failed. Does nothing if they are closed."""
        if self._writers.is_open:
            await self.clock.run_in_thread(self._writers.close, summary, timeout_s)
            self._log_writer_failures()

    def _build_summary(self) -> dict[str, Any]:
        """The summary of a run whose steps are all committed."""
        state, ledger = self.state, self.state.ledger
        finals = list(state.final_reports.values())
        started = state.started_at if state.first_step_at is None else state.first_step_at
        ended = self.clock.now() if ledger.last_step is None else state.started_at + ledger.last_step.t
        summary = {
            **summary_fields(self._job, state.initial_setup, ledger, finals),
            **speed_fields(ledger.samples, state.started_at, started, ended),
            **self._final_cost(),
            "checkpoints": state.checkpoints.completed_steps,
            **state.evaluation_monitor.summary_fields(ledger.evaluation_values),
            "preemptions": len(state.members.departed_nodes),
            "recoveries": [msgspec.to_builtins(recovered) for recovered in state.recovery_metrics.recoveries],
            "at_risk_s": state.recovery_metrics.at_risk_s,
            "samples_redone": ledger.samples_redone,
            "corruptions": state.corruptions,
        }
        self.log_event("finished", steps=ledger.steps, samples=ledger.samples)
        return summary

    def _final_cost(self) -> Mapping[str, float | None]:
        """The fields of summary.json about cost. The run ends now, and all of its nodes with it."""
        if not self.state.spending.is_active:
            return {}
        self._cost_record = self.state.handlers.costs.record(self.clock.now(), ended=True)
        return cost_fields(self._cost_record)

    def _write_cost(self, record: CostRecord) -> None:
        """Write cost.json in the background. A write that fails is repeated with the next change."""
        self._cost_record = record
        if self._cost_write is None or self._cost_write.done():
            self._cost_write = self._start_task(self._write_newest_cost())

    async def _write_newest_cost(self) -> None:
        written: CostRecord | None = None
        with contextlib.suppress(RunError):
            while (record := self._cost_record) is not None and record is not written:
                await self.clock.run_in_thread(self._folder.write_json, "cost.json", msgspec.to_builtins(record))
                written = record

    async def _write_final_cost(self) -> None:
        """Write cost.json of a run that failed, unless that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
                self._final_cost()
                await self._write_newest_cost()

    async def _write_run_files(self, summary: dict[str, Any]) -> None:
        """Write summary.json and all lines, with retries, and trace.json. Raises RunError if that fails for too long.

        In a thread: with many nodes it takes longer than a lease, which the event loop must renew meanwhile.
        """
        state = self.state

        def handle_failure(why: str, stalled: bool) -> None:
            del stalled
            self._handle_storage_failure("summary", state.setup.out or "", why, "summary.json")

        writing = asyncio.ensure_future(retry_storage(self.clock, lambda: self._write_summary(summary), handle_failure))
        try:
            while not writing.done():
                await self._wait_or_raise(writing)
            writing.result()
            self._storage_health.record_recovery("summary")
            await self._write_trace()
            if self._folder.is_url:
                self._line_buffer.sync()
            while not await self._line_buffer.flush(FINAL_CHECK_S, despite_failure=True):
                self._raise_if_storage_failed()
        finally:
            writing.cancel()

    async def _wait_or_raise(self, writing: asyncio.Future[None]) -> None:
        await asyncio.wait([writing], timeout=FINAL_CHECK_S)
        self._raise_if_storage_failed()

    def _raise_if_storage_failed(self) -> None:
        state = self.state
        self._storage_health.note_training(done=state.all_steps_committed)
        if (why := self._storage_health.give_up_reason(state.setup.storage_timeout)) is not None:
            raise RunError(why)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        """Raises RunError if a file cannot be written."""
        self._folder.write_json("summary.json", summary)
        if self._cost_record is not None:
            self._folder.write_json("cost.json", msgspec.to_builtins(self._cost_record))

    async def _write_trace(self) -> None:
        """Write trace.json, unless that fails: a disk that is too full for it has everything that the run is for."""
        try:
            async with asyncio.timeout(STALL_S):
                await self.clock.run_in_thread(self._folder.write_json, "trace.json", self._trace())
        except (RunError, TimeoutError) as error:
            why = str(error) or f"it was not written within {STALL_S:.0f} s"
            self.log_event("trace_failed", why=why)

    def _trace(self) -> dict[str, Any]:
        """The last actions of every worker."""
        state = self.state
        assert state.epoch is not None
        stages = Plan.from_text(state.epoch.plan).stages
        labels = {
            member.worker: f"{member.label}: {slot_label(slot, stages)}"
            for slot, member in enumerate(state.epoch.members)
            if member is not None
        }
        spans = {final.worker: final.spans for final in state.final_reports.values()}
        return perfetto_trace(spans, labels)

    def _handle_storage_report(self, report: messages.StorageReport) -> None:
        """A worker cannot write its checkpoint shard, or can again."""
        name = shard_write_name(report.worker)
        if report.skipped:
            self._storage_health.record_skipped(report.step)
            self._start_task(self._committer.delete_skipped(self._folder.checkpoints or "", report.step))
        elif report.why:
            path, delayed = self._folder.checkpoints or "", f"the checkpoint of step {report.step}"
            where = self.state.members.describe_worker(report.worker)
            self._handle_storage_failure(name, path, f"{where}: {report.why}", delayed)
        else:
            self._storage_health.record_recovery(name)

    def _buffer_lines(self, folder: RunFolder) -> LineBuffer:
        return LineBuffer(
            folder,
            self.clock,
            lambda why: self._handle_storage_failure(
                "lines", self.state.setup.out or "", why, "lines of steps and events"
            ),
            lambda dropped: self._storage_health.record_recovery("lines", dropped),
        )

    def _handle_commit_failure(self, delayed: str, why: str) -> None:
        self._handle_storage_failure("commit", self._folder.checkpoints or "", why, delayed)

    def _handle_storage_failure(self, name: str, path: str, why: str, delayed: str) -> None:
        """Record that a write fails. The run goes on, unless that lasts longer than the limits allow."""
        watched = self._storage_health.is_failing
        self._storage_health.record_failure(name, path, why, delayed)
        if self._folder.is_open:
            self._folder.creates = self._storage_health.failing_s(path) > MISSING_FOLDER_S
        if not watched:
            self._start_task(self._watch_storage())

    async def _watch_storage(self) -> None:
        """While a write fails: end the run when that has lasted too long."""
        while self._storage_health.is_failing:
            members = self.state.members
            self._storage_health.forget_workers(members.workers_of(members.departed_nodes))
            self._storage_health.note_training(done=self.state.all_steps_committed)
            if (why := self._storage_health.give_up_reason(self.state.setup.storage_timeout)) is not None:
                self.inbox.put_nowait(RunError(why))
                return
            await self.clock.sleep(_STORAGE_CHECK_S)

    def _log_storage_event(self, kind: str, **fields: Any) -> None:
        """Log a change of the storage's health, and show it to the launcher."""
        self.log_event(kind, **fields)
        self._store_writer.enqueue("storage", encode({"kind": kind, **fields}), keep_every_value=True)

    async def _sync_run_folder(self) -> None:
        """Copy lines to a run folder that is a URL, in the background, if this node is still the leader: a replaced
        leader would overwrite the lines of the new one."""
        if self._line_buffer.has_unsynced_lines and await self._store_accepts_writes():
            self._line_buffer.sync()

    async def _store_accepts_writes(self) -> bool:
        """Whether the store accepts a write of this node. It accepts none of a node whose lease has expired."""
        with contextlib.suppress(RunError, TimeoutError):
            async with asyncio.timeout(self.state.timeouts.store_call):
                await self.store.put("lines", str(self._node).encode())
            return True
        return False

    async def _close(self) -> None:
        """Close writers and tasks. Lines that cannot be written are lost: the result of the run is in the store."""
        for task in self._tasks:
            task.cancel()
        try:
            await self._close_input_log()
            await self._close_writers(None, _HANDOVER_TIMEOUT_S)
            await self._sync_run_folder()
            await self._line_buffer.flush(_HANDOVER_TIMEOUT_S)
        finally:
            self._line_buffer.close()
            self._committer.close()
            await self._store_writer.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Do not look for garbage meanwhile: planning for a thousand workers creates hundreds of thousands of values and no
    cycles, and looking through them takes longer than planning itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _to_event(item: LeaderInput) -> LeaderEvent:
    return ErrorRaised.from_error(item) if isinstance(item, CulmError) else item
