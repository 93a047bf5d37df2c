"""LeaderState: the leader as a state machine. It takes events and the time, and returns instructions. Pure.

No await, no I/O, no clock, store or transport. `Leader` (leader.py) executes the instructions and feeds the results
back as events. Everything that the leader knows is here. After every commit a snapshot of it is written to the store,
so that another node can take over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from culm import errors
from culm.cluster.leader.checkpoints.checkpoint_tracker import CheckpointTracker
from culm.cluster.leader.epoch_parts import COLLECT_FROM_WORKERS, LARGE_EPOCH_BYTES, epoch_digest, split_epoch
from culm.cluster.leader.evaluation_monitor import EvaluationMonitor
from culm.cluster.leader.event_handlers import EventHandlers
from culm.cluster.leader.events import (
    Call,
    CallBody,
    CommitStep,
    Completed,
    EndLeading,
    ErrorRaised,
    EvictNode,
    ExpectHeartbeats,
    Instruction,
    KeyChanged,
    LeaderEvent,
    LeaveNode,
    PlanRecovery,
    PlanReshape,
    PublishEpoch,
    PutKey,
    PutSnapshot,
    RewindLines,
    SendMessage,
    SendToAll,
    Started,
    StartTimer,
    TimerEvent,
    WaitForStore,
    WriteEvent,
    WriteStep,
)
from culm.cluster.leader.leader_snapshot import LeaderProgress, LeaderSnapshot, SnapshotHistory, decode_snapshot
from culm.cluster.leader.member_registry import MemberRegistry
from culm.cluster.leader.phases import Phase, PhaseHistory
from culm.cluster.leader.recovery_metrics import RecoveryMetrics
from culm.cluster.leader.reshaped_epoch import setup_with_shape
from culm.cluster.leader.spending import Spending
from culm.cluster.leader.stored_snapshot import EncodedSnapshot
from culm.cluster.leader.timed_steps import TimedSteps
from culm.cluster.run_setup import decode_node_record, encode
from culm.cluster.timeouts import derive_timeouts
from culm.errors import CulmError, NodeLost, RunError, unexpected_failure
from culm.metric import Metric, Reduction, declared_metrics
from culm.monitor import EarlyStop, EvaluationInterval, Monitor, to_monitor
from culm.observe.ledger import Ledger
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.run_setup import NodeRecord, RunSetup
    from culm.job import Job
    from culm.observe.step_metrics import StepMetrics

T = TypeVar("T")
Flow: TypeAlias = Generator[CallBody, Any, T]
"""A handler that may need results of calls: it yields a call and continues with its result, in a later event."""
_AHEAD_S = 1.0
_MIN_STEPS_AHEAD, _MAX_STEPS_AHEAD = 2, 256
"""Under strategies that do not keep outputs: how far workers may run ahead of the commit, in seconds and in steps."""


class JobFacts(msgspec.Struct, frozen=True):
    """The fields of a job that the leader's decisions depend on."""

    exact: bool
    micro_batch: int
    evaluation: EvaluationInterval
    early_stop: EarlyStop | None = None
    keep_best: Monitor | None = None
    reductions: dict[str, Reduction] = {}
    """The values of Job.metrics, and how each is reduced."""
    transformed: tuple[str, ...] = ()
    """Those of them to which the job applies a function."""

    @classmethod
    def from_job(cls, job: Job) -> JobFacts:
        metrics = declared_metrics(job.metrics)
        return cls(
            job.exact,
            job.micro_batch,
            job.evaluation_interval,
            job.early_stop,
            None if job.keep_best is None else to_monitor(job.keep_best),
            {name: metric.reduce for name, metric in metrics.items()},
            tuple(name for name, metric in metrics.items() if metric.transform is not None),
        )


class EventTime:
    """The time of the current event, and the times at which nodes were killed, where an event had one."""

    def __init__(self, now: float) -> None:
        self.now_s = now
        self.killed: dict[int, float] = {}

    def now(self) -> float:
        return self.now_s

    def killed_at(self, node: int) -> float | None:
        return self.killed.get(node)


class LeaderState:
    """The state of a leader and its transitions.

    Events are handled one at a time and in order. A handler that needs the result of a call is suspended until the
    event `Completed` with the number of that call; events that arrive meanwhile wait. The one exception is the loss of
    a node while the next epoch is planned: the plan is abandoned, the loss is handled, and the result of the plan is
    ignored when it arrives.
    """

    def __init__(
        self,
        job: JobFacts,
        setup: RunSetup,
        node: int,
        address: str,
        now: float,
        *,
        slowest_action_s: float = 0.0,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        """`address`: where workers send their reports. `slowest_action_s`: the longest action known before the run.
        `metrics`: those of the job; default: its reductions without transforms."""
        self.job, self.setup, self.node, self.address = job, setup, node, address
        self.initial_setup = setup
        """The setup that the run started with; `setup` has the current shape."""
        self.time = EventTime(now)
        self.timeouts = derive_timeouts(setup.suspect_after, blocked_after=setup.blocked_after)
        self.evaluation_schedule = TimedSteps(job.evaluation.seconds)
        self.checkpoint_schedule = TimedSteps(setup.checkpoint_interval_s)
        self.ledger = Ledger(
            workers=setup.pipelines * setup.stages,
            micro_batch=job.micro_batch,
            evaluate_every=job.evaluation.steps,
            chosen_evaluations=self.evaluation_schedule.chosen,
            evaluation_parts=setup.evaluation_parts,
            metrics={name: Metric(None, how) for name, how in job.reductions.items()} if metrics is None else metrics,
            next_step=setup.start,
            evaluation_values=dict(setup.earlier_evaluations),
            started_at=now,
        )
        self.spending = Spending(setup)
        self.evaluation_monitor = EvaluationMonitor(job.early_stop, job.keep_best)
        self.members, self.recovery_metrics, self.checkpoints = (
            MemberRegistry(setup.workers_per_node),
            RecoveryMetrics(self.time),
            CheckpointTracker(setup),
        )
        self.epoch: Epoch | None = None
        self.final_reports: dict[int, messages.FinalReport] = {}
        """The final reports of the epoch's workers, by worker."""
        self.end_step: int | None = None
        """The run ends before this step; None: not decided yet."""
        self.all_nodes_leaving = False
        """Whether the run ends early because every node has notice."""
        self.pending_line: StepMetrics | None = None
        """The last committed step while its line waits for the values of a hook."""
        self.previous_hook_result: bytes | None = None
        """The last result of the hook that the previous leader wrote to the store."""
        self.corruptions = 0
        """Damaged frames and replicas that were found, by this leader and those before."""
        self.permitted_steps = 0
        self.last_step_s = math.inf
        """Duration of the last step."""
        self.first_step_at: float | None = None
        self.slowest_action_s = slowest_action_s
        """The longest action that any worker has reported."""
        self.evicted_nodes: set[int] = set()
        """Nodes that were removed because they hung or were given up."""
        self.store_unreachable = False
        """Whether the store was out of reach at the last commit."""
        self.commits_confirmed = True
        """False: another node was the leader, and workers may know of commits that the store lacks."""
        self.ended = False
        self.handlers = EventHandlers(self)
        self._phases = PhaseHistory()
        self._history, self._encoded_history = SnapshotHistory(), encode(SnapshotHistory())
        self._instructions: list[Instruction] = []
        self._waiting_events: deque[LeaderEvent] = deque()
        self._flow: Flow[None] | None = None
        """The handler that waits for the result of a call."""
        self._call: Call | None = None
        self._calls = 0

    # The state machine.

    def handle(self, event: LeaderEvent, now: float) -> list[Instruction]:
        """Handle an event at a time. Returns the instructions to execute, in this order; at most one is a Call, and it
        is the last. After EndLeading there are no more instructions."""
        self.time.now_s = now
        if self.ended:
            return []
        try:
            if isinstance(event, Completed):
                if self._call is None or event.number != self._call.number:
                    return []  # the plan of a halt that a loss has restarted
                self._resume(event)
            else:
                self._abandon_plan_after_loss(event)
                self._waiting_events.append(event)
            while self._flow is None and self._waiting_events:
                self._begin(self._waiting_events.popleft())
            self.handlers.costs.handle_event(event)
            if self._flow is None and self.handlers.is_finished:
                self._end(None)
        except CulmError as error:
            self._end(ErrorRaised.from_error(error))
        except Exception as error:
            self._end(ErrorRaised.from_error(unexpected_failure("the leader", error)))
        instructions, self._instructions = self._instructions, []
        return instructions

    def _begin(self, event: LeaderEvent) -> None:
        if isinstance(event, Started | KeyChanged):
            self.time.killed.update(event.killed_at)
        flow = self.handlers.dispatch(event)
        self._advance(flow, lambda: next(flow))

    def _resume(self, event: Completed) -> None:
        flow, self._flow, self._call = self._flow, None, None
        assert flow is not None
        if event.error is None:
            self._advance(flow, lambda: flow.send(event.result))
        else:
            error = to_error(event.error)
            self._advance(flow, lambda: flow.throw(error))

    def _advance(self, flow: Flow[None], run: Any) -> None:
        """Run a handler until it ends or needs the result of a call."""
        try:
            body = run()
        except StopIteration:
            return
        self._calls += 1
        self._flow, self._call = flow, Call(self._calls, body)
        self._instructions.append(self._call)

    def _abandon_plan_after_loss(self, event: LeaderEvent) -> None:
        """While the next epoch is planned: if a node is lost whose state the plan uses, abandon the plan."""
        halt = self.handlers.epoch_change.halt_in_progress
        if self._flow is None or self._call is None or not is_planning(self._call) or halt is None:
            return
        lost = _lost_node(event) if isinstance(event, KeyChanged) else None
        if lost is not None and halt.expected_workers.intersection(self.members.workers_of([lost])):
            self._flow.close()
            self._flow = self._call = None

    def _end(self, error: ErrorRaised | None) -> None:
        if self._flow is not None:
            self._flow.close()
        self.ended, self._flow, self._call = True, None, None
        self._instructions.append(EndLeading(error))

    @property
    def checkpoint_folder(self) -> str | None:
        """The folder of the run's checkpoints."""
        return None if self.setup.out is None else f"{self.setup.out.rstrip('/')}/checkpoints"

    @property
    def phase(self) -> Phase:
        """What the leader waits for."""
        if self.ended:
            return Phase.ENDED
        if self.epoch is None:
            return Phase.WAITING if self.handlers.started else Phase.STARTING
        halt = self.handlers.epoch_change.halt_in_progress
        return self._epoch_phase if halt is None else halt.phase

    @property
    def _epoch_phase(self) -> Phase:
        """The phase within an epoch."""
        if self.all_steps_committed:
            return Phase.FINISHING
        if not self.members.all_ready:
            return Phase.BUILDING
        return Phase.TRAINING if self.handlers.epoch_change.open_recovery is None else Phase.RECOVERING

    def validate(self, event: LeaderEvent) -> None:
        """Check the transition that an event has made, and the invariants. Raises InvalidTransition or AssertionError.

        Simulated clusters call it after every event.
        """
        self._phases.record(type(event).__name__, self.phase)
        if self.ended:
            return
        change, members = self.handlers.epoch_change, self.members
        assert (self._flow is None) == (self._call is None), "a suspended handler waits for exactly one call"
        assert self._flow is not None or not self._waiting_events, "events wait although no handler is suspended"
        assert self.end_step is None or self.end_step <= self.setup.steps, "the run ends after its last step"
        assert self.ledger.next_step >= self.setup.start, "a step before the start of the run is open"
        if self.epoch is None:
            assert change.halt_in_progress is None, "there is a halt without an epoch"
            return
        workers = {member.worker for member in self.epoch.present_members}
        known = workers | members.workers_of({*members.departed_nodes, *members.nodes})
        assert members.required_workers <= workers, "a step waits for a worker that is not a member"
        assert self.final_reports.keys() <= known, "a stranger reported"
        failing = change.worker_failures.failing_nodes.keys()
        assert not failing & members.departed_nodes, "a node that is gone is to hand over its state"
        staying = {member.node for member in members.present_members(self.epoch)}
        quarantined = self.handlers.membership.quarantined_nodes
        assert self._flow is not None or not staying & quarantined, "a quarantined node is a member"
        kept = change.returning_nodes.without_session.keys()
        assert kept <= members.nodes.keys(), "a node without a session is not known"
        halt = change.halt_in_progress
        if halt is not None:
            assert halt.next_number > self.epoch.number, "a halt leads to an older epoch"
            assert not halt.expected_workers & members.workers_of(halt.lost_nodes), "a lost node is expected to report"
            assert halt.inventories.keys() <= halt.expected_workers | workers, "an inventory came from a stranger"
        if self.pending_line is not None:
            assert self.setup.waits_for_hook, "a line waits for a hook that the run does not have"
            assert self.pending_line.step < self.ledger.next_step, "the line of an open step is pending"

    # Instructions.

    def emit(self, instruction: Instruction) -> None:
        self._instructions.append(instruction)

    @property
    def now(self) -> float:
        """The time of the event that is being handled."""
        return self.time.now_s

    def send(self, address: str, body: bytes) -> None:
        self.emit(SendMessage(address, body))

    def put_snapshot(self) -> None:
        """Write the snapshot to the store in the background."""
        self.emit(PutSnapshot(self.encode_snapshot()))

    def put_key(self, key: str, value: bytes, *, keep_every_value: bool = False) -> None:
        self.emit(PutKey(key, value, keep_every_value))

    def start_timer(self, seconds: float, event: TimerEvent) -> None:
        self.emit(StartTimer(seconds, event))

    def log_event(self, kind: str, node: int | None = None, **fields: Any) -> None:
        """Pass an event to the run folder and the other writers."""
        self.emit(WriteEvent({"t": round(self.now - self.started_at, 6), "kind": kind, "node": node, **fields}))

    def show_incident(self, sentence: str) -> None:
        """Show a sentence in the terminals of the run."""
        self.put_key("incident", sentence.encode(), keep_every_value=True)

    def write_step(self, metrics: StepMetrics) -> None:
        """Pass a committed step to the run folder and the other writers."""
        self.emit(WriteStep(metrics))

    def show_step(self, metrics: StepMetrics) -> None:
        """Write a step to the store for launchers and pages."""
        self.put_key("step", encode(metrics.to_fields()), keep_every_value=True)

    def broadcast(self, message: messages.Message) -> None:
        """Send a message to every worker of the epoch."""
        members = self.epoch.present_members if self.epoch is not None else ()
        self.send_to_all([member.address for member in members], message)

    def send_to_all(self, addresses: Iterable[str], message: messages.Message) -> None:
        """Send the same message to several agents or workers."""
        if to := tuple(addresses):
            self.emit(SendToAll(to, messages.encode(message)))

    def publish_epoch(self) -> Flow[None]:
        """Write the epoch to the store. Raises RunError if another leader has written one meanwhile."""
        assert self.epoch is not None
        self.epoch = msgspec.structs.replace(self.epoch, report_collectors=self._choose_report_collectors(self.epoch))
        body = messages.encode(self.epoch)
        digest, is_large = epoch_digest(body), len(body) > LARGE_EPOCH_BYTES
        for group in split_epoch(self.epoch) if is_large else ():
            known = dict.fromkeys(self.members.agent_of(worker) for worker in group.workers)
            agents = sorted((agent for agent in known if agent is not None), key=self.address.__eq__)
            if agents:  # its own agent is the last: the others do the forwarding
                part = messages.EpochPart(digest, group.workers, messages.encode(group.part), tuple(agents[1:]))
                self.send(agents[0], messages.encode(part))
        if not (yield PublishEpoch(self.epoch.number, body, digest, is_large)):
            raise RunError("another node leads this run, because this one was declared lost")
        self.handlers.epoch_change.returning_nodes.begin_epoch(body)
        self.expect_heartbeats(self.epoch)

    def _choose_report_collectors(self, epoch: Epoch) -> tuple[str, ...]:
        """By pipeline: the agent of its first worker that stays. Without one, or in a small cluster: the leader's."""
        if len(epoch.present_members) < COLLECT_FROM_WORKERS:
            return ()
        plan, staying = Plan.from_text(epoch.plan), set(epoch.staying_slots)
        found = []
        for first in range(0, plan.pipelines * plan.stages, plan.stages):
            workers = [epoch.members[slot] for slot in range(first, first + plan.stages) if slot in staying]
            agents = (self.members.agent_of(member.worker) for member in workers if member is not None)
            found.append(next((agent for agent in agents if agent is not None), self.address))
        return tuple(found)

    def expect_heartbeats(self, epoch: Epoch) -> None:
        workers = tuple(member.worker for member in epoch.present_members)
        self.emit(ExpectHeartbeats(epoch.number, workers, self.slowest_action_s))

    def write_snapshot(self) -> Flow[None]:
        """Write the snapshot to the store and wait until it is there, without a timeout."""
        self.put_snapshot()
        yield WaitForStore()

    def write_commit(self, metrics: StepMetrics) -> Flow[bytes]:
        """Store a commit. Returns an empty value, or the snapshot if the store is out of reach: then the workers keep
        it, and hand it to the next leader."""
        record = self.encode_snapshot()
        shown = None if self.setup.gate == "hook" else encode(metrics.to_fields())  # else with the hook's values, later
        stored = record if self.setup.survives_losses else None
        waits = not self.setup.keeps_action_outputs
        there: bool = yield CommitStep(stored, shown, waits, self.store_unreachable)
        if self.store_unreachable is there:
            self.store_unreachable = not there
            why = "workers keep the commits until it is back, and membership does not change"
            self.log_event("store_back") if there else self.log_event("store_away", why=why)
        return b"" if there else record.join()

    def evict_node(self, node: int) -> None:
        """End the session of a node that was given up."""
        self.evicted_nodes.add(node)
        self.emit(EvictNode(node))

    def release_node(self, record: NodeRecord) -> None:
        """Let a node with notice go, which has handed over everything."""
        self.members.leave_deadlines.pop(record.node, None)
        self.members.departed_nodes.add(record.node)
        self.log_event("left", node=record.node, step=self.ledger.next_step)
        if record.node == self.node:
            self.emit(LeaveNode())
        else:
            self.send(record.agent, messages.encode(messages.StopNow("it has notice and may go")))

    def dismiss_node(self, record: NodeRecord, why: str) -> None:
        """Make a node end that is declared lost."""
        if record.node == self.node:
            self.emit(LeaveNode(dismissed=True))
        else:
            self.send(record.agent, messages.encode(messages.Dismiss(why)))

    # Progress of the run.

    @property
    def started_at(self) -> float:
        """When the run started, by the clock."""
        return self.ledger.started_at

    @property
    def holders_are_comparable(self) -> bool:
        """Whether holders of a layer compute the same bits: in exact runs, and where all machines are of one kind."""
        members = self.epoch.present_members if self.epoch is not None else ()
        records = [self.members.nodes[member.node] for member in members if member.node in self.members.nodes]
        return self.job.exact or len({record.fingerprint for record in records}) == 1

    def epoch_drops(self, step: int) -> bool:
        """Whether the strategy gave up samples of a step on purpose."""
        return self.epoch is not None and bool(self.epoch.dropped_in(step))

    @property
    def all_steps_committed(self) -> bool:
        """Whether the last step of the run is committed."""
        return self.end_step is not None and self.ledger.next_step >= self.end_step

    @property
    def is_complete(self) -> bool:
        """Whether the last step of the job is committed."""
        return self.ledger.next_step >= self.setup.steps

    @property
    def epoch_number(self) -> int:
        """The number of the epoch; 0 before the first."""
        return 0 if self.epoch is None else self.epoch.number

    def adopt_epoch(self, epoch: Epoch) -> None:
        """Make this the current epoch. Reports of the previous one are dropped, except for checkpoint shards."""
        self.epoch = epoch
        if epoch.rebuild and self.setup.gate == "open":
            self.permitted_steps = 0  # workers that rebuild have dropped their permits
        self.setup = setup_with_shape(self.initial_setup, epoch.shape)
        self.members.assign_roles(epoch, Plan.from_text(self.setup.plan))
        self.ledger.start_epoch(len(self.members.required_workers))
        departed = self.members.workers_of(self.members.departed_nodes)
        self.checkpoints.begin_epoch(epoch, self.members.checkpoint_writers, departed)
        self.final_reports.clear()
        self.recovery_metrics.begin_epoch()

    def load(self, event: Started) -> bool:
        """Load the state of a previous leader. False: the run has no epoch yet."""
        if event.epoch is None:
            if event.record is not None:
                self._restore_snapshot(decode_snapshot(event.record))
            return False
        found = messages.decode(event.epoch)
        assert isinstance(found, Epoch)
        self.adopt_epoch(found)
        self.expect_heartbeats(found)
        if event.record is not None:
            self._restore_snapshot(decode_snapshot(event.record))
        self.commits_confirmed = False
        self.previous_hook_result = event.hook_result
        self.members.nodes |= {node: decode_node_record(record) for node, record in event.nodes.items()}
        notices = {node: there.leaves_in_s for node, there in self.members.nodes.items()}
        self.members.leave_deadlines = {
            node: self.now + seconds for node, seconds in notices.items() if seconds is not None
        }
        return True

    def merge_snapshot(self, snapshot: bytes) -> None:
        """Take over a snapshot that a worker kept while the store was out of reach, if it is newer.

        Workers drop it in the next epoch, which is published after the snapshot is in the store.
        """
        found = decode_snapshot(snapshot)
        if found.next_step > self.ledger.next_step:
            self._restore_snapshot(found)
            self.put_snapshot()

    def confirm_commits(self) -> None:
        """Remove lines of steps that are not committed, once all workers have reported the commits they know of."""
        if not self.commits_confirmed:
            pending = self.pending_line
            self.emit(RewindLines(self.ledger.next_step if pending is None else pending.step))
            self.commits_confirmed = True
            self.handlers.hook_calls.resolve_previous_line()

    def _restore_snapshot(self, snapshot: LeaderSnapshot) -> None:
        ledger, history = self.ledger, snapshot.history
        ledger.started_at, self.first_step_at = snapshot.started_at, snapshot.first_step_at
        ledger.next_step, ledger.steps, ledger.samples = snapshot.next_step, snapshot.steps, snapshot.samples
        ledger.samples_lost, ledger.samples_duplicated, ledger.skipped_steps = (
            snapshot.lost_samples,
            snapshot.duplicated_samples,
            snapshot.skipped_steps,
        )
        last_run = () if snapshot.last_run is None else (snapshot.last_run,)
        ledger.samples_redone, ledger.step_ranges = snapshot.redone_samples, [*history.runs, *last_run]
        ledger.last_step, ledger.evaluations = snapshot.last_step, dict(history.evaluations)
        ledger.evaluation_values = dict(history.evaluation_values)
        self.evaluation_schedule.restore(history.chosen_evaluations, snapshot.evaluation_waited_s, self.now)
        self.checkpoint_schedule.restore(snapshot.chosen_checkpoints, snapshot.checkpoint_waited_s, self.now)
        self.checkpoints.completed_steps = list(history.checkpoints)
        self.members.departed_nodes |= set(history.departed_nodes)
        self.recovery_metrics.restore(
            history.recoveries, snapshot.unrecovered_nodes, snapshot.last_commit_at, snapshot.usual_step_s
        )
        self.corruptions = max(self.corruptions, snapshot.corruptions)
        self.recovery_metrics.at_risk_s = snapshot.at_risk_s
        self.handlers.epoch_change.restore(snapshot)
        self.handlers.membership.restore(snapshot.removals)
        self.handlers.integrity.restore(snapshot)
        self.slowest_action_s = max(self.slowest_action_s, snapshot.slowest_action_s)
        self.end_step = snapshot.end_step if snapshot.next_step < self.setup.steps else snapshot.next_step
        self.all_nodes_leaving = snapshot.all_nodes_leaving
        self.pending_line = snapshot.pending_line
        if snapshot.spending is not None:
            self.spending.restore(snapshot.spending, history.ended_rentals, self.now)

    def encode_snapshot(self) -> EncodedSnapshot:
        """The state that the next leader needs."""
        ledger = self.ledger
        progress = LeaderProgress(
            started_at=self.started_at,
            first_step_at=self.first_step_at,
            next_step=ledger.next_step,
            steps=ledger.steps,
            samples=ledger.samples,
            lost_samples=ledger.samples_lost,
            duplicated_samples=ledger.samples_duplicated,
            skipped_steps=ledger.skipped_steps,
            redone_samples=ledger.samples_redone,
            last_step=ledger.last_step,
            last_run=ledger.step_ranges[-1] if ledger.step_ranges else None,
            evaluation_waited_s=self.evaluation_schedule.waited_s(self.now),
            checkpoint_waited_s=self.checkpoint_schedule.waited_s(self.now),
            chosen_checkpoints=self.checkpoint_schedule.from_step(0),
            at_risk_s=self.recovery_metrics.at_risk_s,
            unrecovered_nodes=tuple(sorted(self.recovery_metrics.unrecovered_nodes)),
            end_step=self.end_step,
            all_nodes_leaving=self.all_nodes_leaving,
            corruptions=self.corruptions,
            returns_to_verified=self.handlers.epoch_change.returns_to_verified,
            returned_causes=self.handlers.epoch_change.worker_failures.returned_causes,
            failing_nodes=self.handlers.epoch_change.worker_failures.failing_nodes,
            removals=self.handlers.membership.removals,
            out_of_memory=self.handlers.epoch_change.worker_failures.out_of_memory,
            memory_relief=self.handlers.epoch_change.worker_failures.memory_relief,
            impossible_stages=tuple(sorted(self.handlers.epoch_change.worker_failures.impossible_stages)),
            unresolved=self.handlers.integrity.unresolved,
            returns=self.handlers.integrity.returns,
            last_commit_at=self.recovery_metrics.last_commit_at,
            usual_step_s=self.recovery_metrics.usual_step_s,
            pending_line=self.pending_line,
            slowest_action_s=self.slowest_action_s,
            spending=self.spending.snapshot(self.now),
        )
        return EncodedSnapshot(encode(progress), self._encode_history())

    def _encode_history(self) -> bytes:
        """Encode the history if it has changed. Its entries never change, so that comparing takes about 10 ns each."""
        history = SnapshotHistory(
            recoveries=tuple(self.recovery_metrics.recoveries),
            departed_nodes=tuple(sorted(self.members.departed_nodes)),
            checkpoints=tuple(self.checkpoints.completed_steps),
            evaluations=dict(self.ledger.evaluations),
            evaluation_values=dict(self.ledger.evaluation_values),
            chosen_evaluations=tuple(sorted(self.evaluation_schedule.chosen)),
            runs=tuple(self.ledger.step_ranges[:-1]),
            failures=self.handlers.epoch_change.worker_failures.records,
            ended_rentals=self.spending.ended_rentals,
        )
        if history != self._history:
            self._history, self._encoded_history = history, encode(history)
        return self._encoded_history

    def end_before_step(self, step: int) -> None:
        self.end_step = step
        self.broadcast(messages.EndRun(step))

    def open_gate_permit(self) -> int:
        """The permit of an open gate. Workers that keep outputs wait for commits, so that all steps are permitted.
        Others could run ahead without a limit, and no step could be chosen to end the run at."""
        evaluated = self._next_evaluation() if self.evaluation_monitor.may_end_the_run else None
        limit = min(self.setup.steps, evaluated or self.setup.steps)
        if self.setup.keeps_action_outputs:
            return limit
        ahead = max(_MIN_STEPS_AHEAD, min(_MAX_STEPS_AHEAD, math.ceil(_AHEAD_S / max(self.last_step_s, 1e-9))))
        return min(limit, self.ledger.next_step + ahead)

    def _next_evaluation(self) -> int | None:
        """The steps that are completed at the next evaluation, as far as it is known."""
        every, next_step = self.job.evaluation.steps, self.ledger.next_step
        return (next_step // every + 1) * every if every else self.evaluation_schedule.next_after(next_step)

    def choose_evaluation(self) -> None:
        """If evaluations are due by time and it has come: choose a step that no worker has begun, and tell the workers
        that an evaluation follows it. They know before they may begin the step. Call before a commit is stored."""
        end = self.setup.steps if self.end_step is None else self.end_step
        chosen = self.evaluation_schedule.choose(self.now, self.ledger.next_step, self.earliest_end_step, end)
        if chosen is not None:
            self.broadcast(messages.EvaluateAfter(self.epoch_number, chosen))

    def choose_checkpoint(self) -> None:
        """The same for a checkpoint. One after the last step is written anyway."""
        end = self.setup.steps if self.end_step is None else self.end_step
        next_step = self.ledger.next_step
        chosen = self.checkpoint_schedule.choose(self.now, next_step, self.earliest_end_step, end - 1)
        if chosen is not None:
            self.checkpoint_schedule.record(self.now)
            self.checkpoint_schedule.forget_before(next_step)
            self.broadcast(messages.SaveAfter(self.epoch_number, chosen))

    @property
    def earliest_end_step(self) -> int:
        """The first step that no worker can have begun."""
        open_steps = 2 if self.setup.keeps_action_outputs else self.setup.steps
        begun = min(self.permitted_steps, self.ledger.next_step + open_steps, self.setup.steps)
        return max(self.ledger.next_step, begun)

    def permit_steps(self, below_step: int) -> None:
        """Permit steps below a number. Workers that join later get the permit when all are ready."""
        self.permitted_steps = max(self.permitted_steps, below_step)
        self.broadcast(messages.StepPermit(self.permitted_steps))

    def node_lost_error(self, node: int) -> NodeLost:
        """The error that ends the run when a node is lost for good."""
        saved, why = self._newest_checkpoint_folder(), self.setup.why_losses_are_final
        fix = f"resume it with --resume {saved}" if saved else "it had no checkpoint yet"
        return NodeLost(f"node {node} was lost in step {self.ledger.next_step} and {why}: {fix}")

    def all_nodes_left_error(self) -> NodeLost:
        """The error that ends the run when every node has notice."""
        saved = (
            f"resume it with --resume {self._newest_checkpoint_folder()}"
            if self._newest_checkpoint_folder()
            else "nothing of it was saved"
        )
        return NodeLost(f"every node has notice: the run ended before step {self.ledger.next_step}; {saved}")

    def budget_message(self) -> str:
        """The message of the error that ends the run when its budget is spent."""
        saved = self._newest_checkpoint_folder()
        fix = f"continue with --resume {saved} and a higher --budget" if saved else "nothing of it was saved"
        return f"{self.spending.stop_reason}: the run ended before step {self.ledger.next_step}; {fix}"

    def _newest_checkpoint_folder(self) -> str | None:
        """The run folder of the newest checkpoint: of this run, or of the one that it was resumed from."""
        return (
            self.setup.out
            if self.checkpoints.completed_steps
            else (self.setup.resume_from or "").removesuffix("/checkpoints")
        )


def is_planning(call: Call) -> bool:
    """Whether a call plans an epoch. It may take long, and a loss ends it."""
    return isinstance(call.body, PlanRecovery | PlanReshape)


def to_error(raised: ErrorRaised) -> CulmError:
    """The error of an event, to be raised."""
    kind: type[CulmError] = getattr(errors, raised.error_class, RunError)
    error = kind(raised.message)
    error.trace = raised.trace
    return error


def _lost_node(event: KeyChanged) -> int | None:
    """The node that is lost according to a changed key."""
    kind, _, name = event.key.partition("/")
    lost = (kind == "nodes" and event.value is None) or kind == "missing"
    return int(name) if lost else None
