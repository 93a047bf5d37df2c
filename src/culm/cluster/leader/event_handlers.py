"""Event handlers of the leader: what each event means for the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from culm import errors
from culm.cluster.leader.checkpoints.integrity_check import IntegrityCheck
from culm.cluster.leader.cost_handlers import CostHandlers
from culm.cluster.leader.epoch_change import EpochChange
from culm.cluster.leader.events import (
    BudgetTimer,
    CheckpointWritten,
    CommitCheckpoint,
    CommittedCheckpoint,
    Completed,
    DeleteKey,
    ErrorRaised,
    FlushLines,
    HookTimer,
    KeyChanged,
    LeaderEvent,
    NodeEvicted,
    OpenWriters,
    PlanSearched,
    ProgressTimer,
    ReachCommit,
    RecheckTimer,
    ReshapeDecided,
    ReturnTimer,
    SessionTimer,
    ShapeBuilt,
    StartAfterTimer,
    Started,
    Suspicion,
    SyncFolder,
)
from culm.cluster.leader.failure_detector import FailureDetector
from culm.cluster.leader.membership import Membership
from culm.cluster.leader.output.hook_calls import HookCalls
from culm.cluster.leader.output.hook_runner import HookResult
from culm.cluster.run_setup import decode_hook_values, decode_node_record, decode_rental_terms
from culm.errors import CulmError, RunError
from culm.observe.step_metrics import StepMetrics
from culm.runtime import messages
from culm.text_format import format_bytes

if TYPE_CHECKING:
    from culm.cluster.leader.leader_state import Flow, LeaderState


class EventHandlers:
    """Dispatches events to the parts of the leader: `EpochChange` replaces the epoch; `Membership`, `FailureDetector`
    and `HookCalls` decide when."""

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self.epoch_change = EpochChange(state)
        self.membership = Membership(self.epoch_change)
        self.epoch_change.worker_failures.connect(self.membership)
        self.integrity = IntegrityCheck(self.epoch_change, self.membership)
        self.failure_detector = FailureDetector(self.epoch_change)
        self.hook_calls = HookCalls(state)
        self.costs = CostHandlers(state)
        self.started = False
        self._finish_requested = False
        """Whether the run is to end at the next step boundary."""
        self._reduce_fallback = ""
        """Why gradients are not summed by NCCL, as it was shown last."""
        self._shows_shadow_memory = False
        """Whether it was shown that forwards of shadows are left out."""
        self._last_t = 0.0
        """When the last step was committed, since the start of the run."""

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete: all steps are committed, and everything about them has been reported."""
        state = self.state
        if (
            not state.all_steps_committed
            or state.epoch is None
            or self.epoch_change.halt_in_progress is not None
            or state.pending_line is not None
            or state.checkpoints
        ):
            return False
        return state.members.required_workers <= state.final_reports.keys()

    def dispatch(self, event: LeaderEvent) -> Flow[None]:  # noqa: PLR0912
        """Handle an event."""
        match event:
            case messages.StepReport() | messages.EvaluationReport():  # first: one of each worker in every step
                yield from self._handle_step_report(event)
            case messages.ReportBundle(reports):
                for report in reports:
                    yield from self._handle_step_report(report)
            case Started():
                yield from self._start(event)
            case ErrorRaised():
                raise _raised_error(event)
            case KeyChanged(key, value):
                yield from self._handle_store_change(key, value)
            case Suspicion():
                if not self.state.setup.survives_losses:
                    raise self._error_from_worker(event.message)
                self.failure_detector.handle_suspicion(event)
            case ProgressTimer():
                self.failure_detector.check_progress()
            case BudgetTimer():
                self.costs.check_budget()
            case HookResult():
                self.hook_calls.handle_result(event)
            case HookTimer():
                self.hook_calls.handle_timer(event)
            case CheckpointWritten():
                yield from self._complete_checkpoint(self.state.ledger.next_step)
            case ReturnTimer():
                overdue = self.epoch_change.returning_nodes.take_overdue()
                if overdue:
                    yield from self.membership.handle_lost_nodes(overdue)
            case SessionTimer():
                yield from self._lose_nodes((yield from self.epoch_change.returning_nodes.check_sessions()))
            case StartAfterTimer():
                yield from self.membership.handle_start_after()
            case RecheckTimer():
                yield from self.epoch_change.handle_recheck(event)
            case PlanSearched():
                self.epoch_change.reshape_controller.plan_improver.handle_search(event)
            case ReshapeDecided():
                self.epoch_change.reshape_controller.handle_decided(event)
            case ShapeBuilt():
                self.epoch_change.reshape_controller.handle_requested_shape(event)
            case NodeEvicted(node):
                self.state.evicted_nodes.add(node)
                if self.epoch_change.returning_nodes.has_no_session(node):  # it has no key that would be deleted
                    yield from self._lose_nodes([node])
            case Completed():
                raise AssertionError("results of calls are not dispatched")
            case _:
                yield from self._handle_worker_message(event)

    def _start(self, event: Started) -> Flow[None]:
        """This node has become the leader: start the run, or continue it."""
        state = self.state
        self.started = True
        if state.setup.survives_losses:
            self.failure_detector.start_progress_timer()
        yield from self._take_over_run(event) if state.load(event) else self._start_new_run(event.previous_leader)
        self.costs.start(event.absent_nodes)

    def _start_new_run(self, previous_leader: int | None) -> Flow[None]:
        """Start a run that has no epoch yet. A previous leader that is gone counts as lost before the start."""
        state, setup = self.state, self.state.setup
        yield OpenWriters(new_run=True)
        if setup.survives_losses:  # so that the next leader knows when the run started
            state.put_snapshot()
        if previous_leader is not None:
            yield from self.membership.handle_lost_nodes([previous_leader])
        if setup.start >= setup.steps:
            state.end_step = setup.start

    def _take_over_run(self, event: Started) -> Flow[None]:
        """Continue a run that another node led: handle lost members, and halt the epoch so that all workers report
        here."""
        state = self.state
        assert state.epoch is not None
        yield OpenWriters(new_run=False)
        state.log_event("leader", node=None, why="the previous leader is gone: this node continues from the store")
        present_nodes = dict.fromkeys(member.node for member in state.members.present_members(state.epoch))
        removed = self.membership.removed_members()
        for node in removed:
            state.evict_node(node)
        lost = [node for node in present_nodes if node not in state.members.nodes and node not in removed]
        if event.sessions_expired and state.setup.rejoin_within and not removed:
            self.epoch_change.returning_nodes.await_members(lost)
            return
        gone = (yield from self.epoch_change.returning_nodes.await_running(lost)) if lost else []
        if gone or removed:
            yield from self.membership.handle_lost_nodes([*removed, *gone])
        else:
            self.epoch_change.start_halt()

    def _handle_worker_message(self, message: messages.Message) -> Flow[None]:
        """Handle a message of a worker about its progress."""
        match message:
            case messages.FailureReport(error_class="NodeLost"):
                self.failure_detector.handle_peer_unreachable(message)
            case messages.FailureReport(action=messages.FailedAction()):
                yield from self.epoch_change.worker_failures.handle_failure(message)
            case messages.FailureReport():
                raise self._error_from_worker(message)
            case messages.LayersReady():
                self._handle_ready(message)
            case messages.HaltReport():
                self.epoch_change.returning_nodes.note_message(message)
                yield from self.epoch_change.handle_report(message)
            case messages.Heartbeat():
                self.epoch_change.returning_nodes.note_message(message)
                self.failure_detector.handle_heartbeat(message)
            case messages.ShadowCaughtUp() | messages.ShadowMemoryFull():
                self._handle_shadow_message(message)
            case messages.HandoffReceived():
                self.epoch_change.handle_handoff_received(message)
            case messages.ShardReport():
                yield from self._handle_shard_report(message)
            case messages.DamageReport():
                self._handle_damage_report(message)
            case messages.FinalReport():
                if self.epoch_change.halt_in_progress is None:
                    self.state.final_reports[message.worker] = message

    def _handle_step_report(self, report: messages.StepReport | messages.EvaluationReport) -> Flow[None]:
        """Handle a worker's report of a step or of an evaluation after it."""
        if self._is_current_report(report):
            if isinstance(report, messages.StepReport):
                self.epoch_change.slow_nodes.record(report)
            for done in self.state.ledger.add_report(report):
                yield from self._handle_committed_step(done)

    def _handle_damage_report(self, report: messages.DamageReport) -> None:
        """Count a frame that arrived damaged. It is sent again, or its connection was closed."""
        state = self.state
        members = state.epoch.present_members if state.epoch is not None else ()
        source = next((member.node for member in members if member.address == report.sender), None)
        why = f"{report.frame} arrived damaged and is sent again" if report.frame else "a header arrived damaged"
        state.corruptions += 1
        fields = state.members.event_fields(report.worker)
        state.log_event("corruption", **fields, source=source, frame=report.frame, why=why)

    def _is_current_report(self, report: messages.StepReport | messages.EvaluationReport) -> bool:
        """Whether a report counts. Reports of an epoch that is being replaced do not: workers send them again."""
        if self.epoch_change.halt_in_progress is not None or report.worker not in self.state.members.required_workers:
            return False
        return isinstance(report, messages.EvaluationReport) or report.epoch == self.state.epoch_number

    def _handle_store_change(self, key: str, value: bytes | None) -> Flow[None]:  # noqa: PLR0912
        """Handle a changed key of the store."""
        name = key.rpartition("/")[2]
        if key == "wish/layout":
            if value is not None:  # deleted, so that the next leader does not handle it again
                self.epoch_change.reshape_controller.request_layout(value.decode(errors="replace"))
                yield DeleteKey(key)
        elif key == "gate/values":
            if value is not None:
                found = decode_hook_values(value)
                self.hook_calls.handle_result(HookResult(found.step, found.values))
        elif key == "gate/finish":
            self._handle_finish_request(int(value or b"0"))
        elif key == "gate/permit":
            self.state.permit_steps(int(value or b"0"))
        elif key == "wish/fleet":
            if value is not None:
                self.costs.handle_fleet_decision(value)
                yield DeleteKey(key)
        elif key.startswith("rentals/"):
            if value is not None:
                self.costs.handle_rental(int(name), decode_rental_terms(value))
        elif key.startswith("prices/"):
            self.costs.handle_price(int(name), value)
        elif key.startswith("missing/"):
            yield from self._lose_nodes([int(name)])
        elif value is None:
            if not (yield from self.epoch_change.returning_nodes.keep(int(name))):
                yield from self._lose_nodes([int(name)])
        else:
            record = decode_node_record(value)
            self.costs.handle_node(record.node, record)
            yield from self.membership.handle_join(record)

    def _lose_nodes(self, nodes: Sequence[int]) -> Flow[None]:
        """Nodes have ended, or count as ended."""
        for node in nodes:
            self.costs.handle_node(node, None)
        if nodes:
            yield from self.membership.handle_lost_nodes(nodes)

    def _handle_finish_request(self, before_step: int) -> None:
        """End the run before a step; 0: before the first step that no worker can have begun, which is known when all
        workers of the epoch are ready."""
        if before_step:
            self.state.end_before_step(before_step)
            return
        self._finish_requested = True
        if self.state.members.all_ready and self.epoch_change.halt_in_progress is None:
            self._finish_early()

    def _finish_early(self) -> None:
        state = self.state
        if state.end_step is None:
            state.end_before_step(state.earliest_end_step)
            state.log_event("stopped", step=state.earliest_end_step - 1, why="the run was interrupted")

    def _announce_reduce(self, message: messages.LayersReady, where: Mapping[str, Any]) -> None:
        """Say once that gradients are not summed over NCCL, where that could be expected."""
        why = message.reduce_fallback
        if not why and message.reduce not in ("", "nccl") and self.state.setup.config.get("reduce") == "nccl":
            why = "the workers compute on the CPU"
        if why and why != self._reduce_fallback:
            self._reduce_fallback = why
            self.state.log_event("reduce_fallback", **where, reduce=message.reduce, why=why)
            way = "Gloo" if message.reduce == "gloo" else "encrypted connections"
            self.state.show_incident(f"gradients are summed over {way} instead of NCCL: {why}")

    def _handle_shadow_message(self, message: messages.ShadowCaughtUp | messages.ShadowMemoryFull) -> None:
        """A shadow has caught up, or runs fewer forwards in advance, which is said once."""
        if isinstance(message, messages.ShadowCaughtUp):
            self.membership.handle_caught_up(message)
            return
        where = self.state.members.event_fields(message.worker)
        self.state.log_event("shadow_memory_full", **where, needed=message.needed, lent=message.lent, cap=message.cap)
        if not self._shows_shadow_memory:
            self._shows_shadow_memory = True
            self.state.show_incident(
                "page-locked memory is full: some forwards of shadows are not run in advance, and are run after a loss "
                f"(one needs {format_bytes(message.needed)}; {format_bytes(message.lent)} of "
                f"{format_bytes(message.cap)} are in use)"
            )

    def _handle_ready(self, message: messages.LayersReady) -> None:
        state = self.state
        if message.epoch != state.epoch_number or self.epoch_change.halt_in_progress is not None:
            return
        where = state.members.event_fields(message.worker)
        state.log_event("ready", **where, seconds=message.seconds, reduce=message.reduce or None)
        self._announce_reduce(message, where)
        state.members.ready_workers.add(message.worker)
        if not state.members.all_ready:
            return
        state.first_step_at = state.first_step_at or state.now
        state.evaluation_schedule.start(state.now)
        state.checkpoint_schedule.start(state.now)
        self.epoch_change.handle_all_ready()
        if state.end_step is not None:
            state.end_before_step(state.end_step)
        hook_permit = state.ledger.next_step + (state.pending_line is None)
        first = {"open": state.open_gate_permit(), "hook": hook_permit, "caller": 0, "outside": 0}
        state.permit_steps(first[state.setup.gate])
        if self._finish_requested:
            self._finish_early()

    def _handle_committed_step(self, metrics: StepMetrics) -> Flow[None]:
        """Handle a step that every replica has completed: pass the metrics to the writers, store the commit and permit
        the next step. With a hook, the line is written and the next step permitted when it has returned."""
        state, step = self.state, metrics.step
        self.hook_calls.begin_step(metrics)
        if not state.setup.waits_for_hook:
            state.write_step(metrics)
        if metrics.skipped:
            state.log_event("skipped", step=step, why="the loss or a gradient is not finite")
        stop_reason = None
        if metrics.eval_loss is not None:
            named = state.ledger.evaluation_values.get(step, {})
            values: dict[str, Any] = {name: value for name, value in named.items() if name != "eval_loss"}
            state.log_event("evaluation", step=step, loss=metrics.eval_loss, **values)
            stop_reason = state.evaluation_monitor.stop_reason(state.ledger.evaluation_values)
            state.evaluation_schedule.record(state.now)
        if metrics.samples_duplicated or (metrics.samples_lost and not state.epoch_drops(step)):
            state.log_event(
                "samples_wrong",
                step=step,
                lost=metrics.samples_lost,
                duplicated=metrics.samples_duplicated,
                why="the gradient of this step does not contain every sample once: please report this",
            )
        ends = stop_reason is not None or step + 1 >= state.setup.steps
        if stop_reason is not None:
            state.log_event("stopped", step=step, why=stop_reason)
        state.end_step = step + 1 if ends else state.end_step
        state.choose_evaluation()
        state.choose_checkpoint()
        yield FlushLines()  # the next leader does not have these lines
        yield from self._commit_step(metrics)
        self.hook_calls.call_hook(metrics)
        if ends:
            state.end_before_step(step + 1)
        elif state.setup.gate == "open" and state.permitted_steps < state.setup.steps:
            self._permit_more_steps(metrics)
        if state.setup.keeps_action_outputs:
            self.membership.admit_waiting_nodes()
            self.membership.handle_slow_nodes()
        yield from self._complete_checkpoint(step + 1)

    def _permit_more_steps(self, metrics: StepMetrics) -> None:
        """Permit steps ahead of the commit, if half of those that were permitted are done."""
        state = self.state
        state.last_step_s, self._last_t = metrics.t - self._last_t, metrics.t
        permit = state.open_gate_permit()
        if 2 * (permit - state.permitted_steps) >= permit - state.ledger.next_step:
            state.permit_steps(permit)

    def _commit_step(self, metrics: StepMetrics) -> Flow[None]:
        """Store a commit, then tell the workers, which may drop what they kept for the step: from then on the next
        leader knows that the step is complete."""
        state, step = self.state, metrics.step
        self.costs.handle_commit(step, failure_free=self.epoch_change.is_idle)
        if not state.setup.survives_losses:
            yield from state.write_commit(metrics)
            return
        if self.epoch_change.is_idle:
            state.recovery_metrics.record_commit()
        self.epoch_change.handle_committed(step)
        self.epoch_change.worker_failures.handle_committed(step)
        record = yield from state.write_commit(metrics)
        if self.epoch_change.is_idle and state.end_step is None and not record:
            self.epoch_change.reshape_controller.consider_reshape(step)
        yield ReachCommit(step)
        state.broadcast(messages.Commit(step, state.epoch_number, record))

    def _handle_shard_report(self, report: messages.ShardReport) -> Flow[None]:
        state = self.state
        state.checkpoints.add_shard(report)
        if state.holders_are_comparable:
            found = state.checkpoints.compare_holders(report.epoch, report.step)
            if found is not None:
                yield from self.integrity.handle_comparison(found)
        yield from self._complete_checkpoint(self.state.ledger.next_step)

    def _complete_checkpoint(self, committed_steps: int) -> Flow[None]:
        """Commit the newest checkpoint that has all of its shards, if it holds no step that is not committed."""
        state = self.state
        state.checkpoints.best = state.evaluation_monitor.best(state.ledger.evaluation_values)
        state.checkpoints.decisive_evaluations = partial(
            state.evaluation_monitor.decisive_values, state.ledger.evaluation_values
        )
        made: CommittedCheckpoint | None = yield CommitCheckpoint(committed_steps)
        if made is not None:
            state.checkpoints.record_commit(made)
            state.spending.record_checkpoint(made.step, state.now)
            self.costs.write_record_at_checkpoint()
            state.log_event("checkpoint", step=made.step, bytes=made.size, verified=made.verified, path=made.path)
            if made.prune_failed:
                state.log_event("prune_failed", why=made.prune_failed)
            state.emit(SyncFolder())
            if not state.setup.keeps_action_outputs:
                self.membership.admit_waiting_nodes()

    def _error_from_worker(self, message: messages.FailureReport) -> CulmError:
        """The error of a worker as an exception that names the node."""
        where = self.state.members.describe_worker(message.worker)
        return _raised_error(ErrorRaised(message.error_class, f"{where}: {message.message}", message.traceback))


def _raised_error(raised: ErrorRaised) -> CulmError:
    kind: type[CulmError] = getattr(errors, raised.error_class, RunError)
    error = kind(raised.message)
    error.trace = raised.trace
    return error
