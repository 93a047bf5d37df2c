"""Epoch change: halt the current epoch, collect an inventory from every worker, decide and publish the next epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.checkpoints.checkpoint_epoch import checkpoint_epoch, returns_to_checkpoint
from culm.cluster.leader.events import (
    FindCheckpoint,
    FoundCheckpoint,
    PlannedEpoch,
    PlanRecovery,
    PrecomputePlans,
    RecheckTimer,
    ReturnToVerified,
    RewindLines,
)
from culm.cluster.leader.next_epoch import (
    NextEpoch,
    assign_waiting_nodes,
    current,
    every_stage_has_two_holders,
    restart_epoch,
    stages_lost,
)
from culm.cluster.leader.recovery_metrics import EpochHalt, OpenRecovery
from culm.cluster.leader.reshape_controller import ReshapeController
from culm.cluster.leader.returning_nodes import ReturningNodes
from culm.cluster.leader.slow_node_controller import SlowNodeController
from culm.cluster.leader.worker_failures import WorkerFailures
from culm.observe.slot_assignments import epoch_event_fields
from culm.plan.recover.lineage import WorkerInventory
from culm.plan.reshape.pipeline_shape import format_depths
from culm.runtime import messages
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.leader.leader_snapshot import LeaderSnapshot
    from culm.cluster.leader.leader_state import Flow, LeaderState


class EpochChange:
    """Ends epochs and starts new ones.

    A loss, a preemption notice, a join or a stall starts a halt: every remaining worker leaves the epoch and reports
    its inventory. When all have reported, the next epoch is decided and published.
    """

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self.reshape_controller = ReshapeController(state)
        self.slow_nodes = SlowNodeController(state)
        self.worker_failures = WorkerFailures(self)
        self.returning_nodes = ReturningNodes(self)
        self.returns_to_verified = False
        """Whether the next epoch starts from the newest verified checkpoint, because holders of a layer differ."""
        self.halt_in_progress: EpochHalt | None = None
        self.open_recovery: OpenRecovery | None = None
        self._planned_ahead = False
        """Whether the plan of the next epoch was in the cache."""

    @property
    def is_idle(self) -> bool:
        """Whether no halt and no recovery is in progress."""
        return self.halt_in_progress is None and self.open_recovery is None

    def restore(self, snapshot: LeaderSnapshot) -> None:
        """Take over what the previous leader knew."""
        self.returns_to_verified = snapshot.returns_to_verified
        self.worker_failures.restore(snapshot)

    def return_to_verified(self) -> None:
        """Start an epoch from the newest verified checkpoint. What the workers hold is not used."""
        self.returns_to_verified = True
        if self.halt_in_progress is None:
            self.start_halt()

    def start_halt(self, lost: Sequence[int] = ()) -> None:
        """Ask all remaining workers to leave the epoch and report. A loss during a halt restarts the halt."""
        state, before = self.state, self._unfinished_halt()
        assert state.epoch is not None
        number = 1 + (before.next_number if before is not None else state.epoch.number)
        lost_nodes = {*lost, *(before.lost_nodes if before is not None else ())}
        remaining_members = [
            member
            for member in (*state.members.present_members(state.epoch), *self._members_without_slot)
            if member.node not in lost_nodes
        ]
        remaining_workers = {member.worker for member in remaining_members}
        # A loss during a halt that had another cause is detected only now: its times start now.
        known = before if before is not None and (before.lost_nodes or not lost) else None
        started_at = known.started_at if known is not None else state.now
        detect_s = max(known.detect_s if known is not None else 0.0, state.recovery_metrics.detection_time(lost))
        committed = before.committed_steps if before is not None else state.ledger.next_step
        self.halt_in_progress = EpochHalt(
            number, lost_nodes, remaining_workers, started_at, detect_s, max(committed, state.ledger.next_step)
        )
        for node in {member.node for member in remaining_members}:
            self.handle_restarted_node(node)
        self.returning_nodes.expect_messages()
        self.send_halt(self.halt_in_progress)
        if self.halt_in_progress.is_deserted:
            if returns_to_checkpoint(state.setup, lost_nodes):
                raise state.node_lost_error(min({*lost_nodes, *state.members.departed_nodes}))
            # Nodes without a slot can continue, and members with new sessions. A new leader does not know them yet.
            others = state.members.waiting_members(state.epoch)
            state.start_timer(0.0 if others else state.timeouts.confirm_loss, RecheckTimer(number))
        elif self.halt_in_progress.is_complete:  # a previous leader had already restarted all workers
            state.start_timer(0.0, RecheckTimer(number, wait_expired=False))

    def handle_admitted(self, node: int) -> None:
        """A node was admitted. If it may hold layers of the old shape, the halt in progress waits for its report,
        too."""
        halt = self.halt_in_progress
        workers = {member.worker for member in self._members_without_slot if member.node == node}
        if halt is not None and not workers <= halt.expected_workers:
            self.start_halt()

    @property
    def _members_without_slot(self) -> list[Member]:
        """Workers without a slot in the new shape. Until its first commit they may hold the only copy of a layer."""
        epoch = self.state.epoch
        if epoch is None or not epoch.shape_epoch or self.state.ledger.next_step > epoch.shape_start:
            return []
        return self.state.members.waiting_members(epoch)

    def _unfinished_halt(self) -> EpochHalt | None:
        """The current halt, or the halt of an unfinished recovery: its lost nodes belong to the next halt too."""
        if self.halt_in_progress is None and self.open_recovery is not None:
            return self.open_recovery.halt
        return self.halt_in_progress

    def send_halt(self, halt: EpochHalt) -> None:
        """Send the halt to every expected worker that has not reported yet."""
        state = self.state
        assert state.epoch is not None
        members = [
            member
            for member in (*state.epoch.present_members, *self._members_without_slot)
            if member.worker in halt.expected_workers and member.worker not in halt.inventories
        ]
        if self._restarts_workers(halt):
            for node, incarnation in {member.node: member.incarnation for member in members}.items():
                renew = messages.encode(messages.RestartWorker(incarnation))
                state.send(state.members.nodes[node].agent, renew)
        else:
            state.send_to_all((m.address for m in members), messages.Halt(halt.next_number, state.address))

    def _restarts_workers(self, halt: EpochHalt) -> bool:
        """Whether this halt ends the worker processes and starts new ones instead of keeping them."""
        return self.state.setup.restarts_workers and returns_to_checkpoint(self.state.setup, halt.lost_nodes)

    def handle_restarted_node(self, node: int) -> None:
        """Where a halt restarts workers: record empty inventories for a node whose new workers are up."""
        halt, epoch, record = self.halt_in_progress, self.state.epoch, self.state.members.nodes.get(node)
        if halt is None or epoch is None or record is None or not self._restarts_workers(halt):
            return
        for member in epoch.present_members:
            own = member.node == node and member.worker in halt.expected_workers
            if own and record.incarnation > member.incarnation:
                halt.inventories[member.worker] = WorkerInventory()

    def handle_report(self, report: messages.HaltReport) -> Flow[None]:
        """Record what a worker held when it left the epoch. When all have reported, start the next epoch."""
        halt, epoch, inventory = self.halt_in_progress, self.state.epoch, report.inventory
        if epoch is None or inventory.rebuild_epoch != epoch.rebuild_epoch:
            # It has not begun to rebuild: what it holds is of steps that the run has returned from.
            inventory = WorkerInventory()
        elif report.leader_snapshot:
            self.state.merge_snapshot(report.leader_snapshot)
        if halt is None or report.epoch < halt.next_number:
            return
        if report.epoch > halt.next_number:  # a previous leader had used higher epoch numbers: start above them
            halt.next_number = report.epoch
            self.start_halt()
            return
        halt.inventories[report.worker] = inventory
        yield from self.start_next_epoch_if_ready()

    def start_next_epoch_if_ready(self) -> Flow[None]:
        """Start the next epoch if all workers have reported and no replacement node is awaited."""
        halt, state = self.halt_in_progress, self.state
        if halt is None or not halt.is_complete or self.returning_nodes.awaited:
            return
        if halt.is_deserted and not halt.wait_expired:
            return
        seconds = halt.started_at + state.setup.replace_within - state.now
        if halt.wait_expired or seconds <= 0 or not self._needs_replacements(halt):
            yield from self._start_next_epoch(halt)
        elif not halt.waits_for_nodes:
            halt.waits_for_nodes = True
            state.log_event("waiting", seconds=seconds, why="waiting for replacement nodes before the restart")
            state.start_timer(seconds, RecheckTimer(halt.next_number))

    def handle_recheck(self, timer: RecheckTimer) -> Flow[None]:
        """The wait for replacements is over, or the halt was complete at once: start the next epoch if possible."""
        if self.halt_in_progress is not None and self.halt_in_progress.next_number == timer.epoch:
            self.halt_in_progress.wait_expired |= timer.wait_expired
            yield from self.start_next_epoch_if_ready()

    def _needs_replacements(self, halt: EpochHalt) -> bool:
        """Whether a restart should wait for replacement nodes: some were lost and slots would stay empty."""
        state, epoch = self.state, self.state.epoch
        assert epoch is not None
        present = len(halt.inventories) + len(state.members.waiting_members(epoch))
        return (
            bool(halt.lost_nodes)
            and returns_to_checkpoint(state.setup, halt.lost_nodes)
            and present < len(state.members.wanted_slots)
        )

    def _start_next_epoch(self, halt: EpochHalt) -> Flow[None]:
        """All workers have reported: decide how open steps are completed and which slot runs what, then publish."""
        state, old = self.state, self.state.epoch
        assert old is not None
        slots = {member.worker: slot for slot, member in enumerate(old.members) if member is not None}
        known = {
            worker: each if each.shape_epoch == old.shape_epoch else WorkerInventory()
            for worker, each in halt.inventories.items()
        }
        inventories = {slots[worker]: inventory for worker, inventory in known.items() if worker in slots}
        self.worker_failures.remove_impossible(slots, inventories)
        committed = state.ledger.next_step
        failed = self.worker_failures.slots(slots)
        others = {slot: inventory for slot, inventory in inventories.items() if slot not in failed}
        if (yield from self._waits_for_holders(halt, others)):
            return
        state.confirm_commits()
        self._planned_ahead = False
        decided = yield from self._decide_next_epoch(halt, old, slots, inventories)
        next_epoch = self._with_timed_steps(self._with_overdue_checkpoint(decided))
        self.slow_nodes.reason = ""
        if next_epoch.epoch.rebuild or next_epoch.epoch.changes_shape:
            self.slow_nodes.forget()
        self.halt_in_progress = None
        self.open_recovery = OpenRecovery(
            halt,
            state.now,
            next_epoch,
            max(0, halt.committed_steps - state.ledger.next_step),
            lost_nodes=set(state.recovery_metrics.unrecovered_nodes),
            left_nodes=self.open_recovery.left_nodes if self.open_recovery is not None else set(),
        )
        state.adopt_epoch(next_epoch.epoch)
        state.recovery_metrics.set_at_risk(not every_stage_has_two_holders(next_epoch.epoch))
        state.log_event(
            "epoch",
            number=next_epoch.epoch.number,
            **epoch_event_fields(next_epoch.epoch),
            step=next_epoch.epoch.start,
            open_steps=next_epoch.epoch.recovery.steps,
            planned_ahead=self._planned_ahead,
            why=next_epoch.why,
        )
        if next_epoch.epoch.drops_samples:
            state.log_event(
                "dropping",
                step=next_epoch.epoch.start,
                micro_batches=next_epoch.epoch.dropped_micro_batches,
                open_steps=next_epoch.epoch.recovery.dropped_micros,
                why="training changes: the samples of these micro-batches are left out",
            )
        yield from state.publish_epoch()
        spared = [node for node in state.members.leave_deadlines if not next_epoch.epoch.slots_of_node(node)]
        for node in spared:
            # Every worker rebuilds its layers, so nothing is needed from a node that leaves.
            self._release(node)
        self.worker_failures.handle_new_epoch({member.node for member in next_epoch.epoch.present_members})
        if spared:
            self.open_recovery.left_nodes |= set(spared)
            yield from state.write_snapshot()
        if next_epoch.epoch.changes_shape:
            state.emit(PrecomputePlans(inventories_at_start(next_epoch.epoch), committed, None))
        elif state.setup.keeps_action_outputs:
            state.emit(PrecomputePlans(inventories, committed, old))

    def _waits_for_holders(self, halt: EpochHalt, inventories: Mapping[int, WorkerInventory]) -> Flow[bool]:
        """Whether the next epoch waits for lost nodes that may come back with layers that no other node holds."""
        setup = self.state.setup
        if (
            not (halt.lost_nodes or self.state.members.departed_nodes)
            or self.returns_to_verified
            or returns_to_checkpoint(setup, halt.lost_nodes)
            or self._no_weights_changed(halt)
        ):
            return False
        lost_stages = stages_lost(setup, inventories, self.state.ledger.next_step)
        return (yield from self.returning_nodes.wait_for_holders(halt, lost_stages))

    def _with_overdue_checkpoint(self, next_epoch: NextEpoch) -> NextEpoch:
        """The epoch with a checkpoint requested if the last due one was not completed, or if all members that hold
        the layers are about to leave."""
        state, members = self.state, {member.node for member in next_epoch.epoch.present_members}
        parting = state.setup.out is not None and members <= state.members.leave_deadlines.keys()
        departed = state.members.workers_of(state.members.departed_nodes)
        owes = (
            state.checkpoints.is_checkpoint_overdue(next_epoch.epoch, departed, state.checkpoint_schedule.chosen)
            or parting
        )
        return replace(next_epoch, epoch=msgspec.structs.replace(next_epoch.epoch, checkpoint_overdue=owes))

    def _with_timed_steps(self, next_epoch: NextEpoch) -> NextEpoch:
        """The epoch with the evaluations and checkpoints that were chosen by time."""
        state, epoch = self.state, next_epoch.epoch
        evaluations = state.evaluation_schedule.from_step(epoch.start)
        checkpoints = state.checkpoint_schedule.from_step(epoch.start)
        return replace(
            next_epoch, epoch=msgspec.structs.replace(epoch, evaluations=evaluations, checkpoints=checkpoints)
        )

    def _decide_next_epoch(  # noqa: PLR0911
        self, halt: EpochHalt, old: Epoch, slots: Mapping[int, int], inventories: dict[int, WorkerInventory]
    ) -> Flow[NextEpoch]:
        """Decide the next epoch: from the layers that survivors hold or, if a layer has no holder, from a
        checkpoint."""
        state, setup, committed = self.state, self.state.setup, self.state.ledger.next_step
        number, address, zones = halt.next_number, state.address, state.members.zones
        arrivals = assign_waiting_nodes(setup, old, inventories, committed, state.members.waiting_members(old), zones)
        failed = yield from self._slots_to_leave_out(slots, inventories)
        noticed = {
            slot
            for node in state.members.leave_deadlines
            for worker in sorted(state.members.workers_of([node]))
            if worker in halt.inventories and (slot := slots.get(worker)) is not None
        }
        if not inventories and not arrivals:
            raise state.node_lost_error(min({*halt.lost_nodes, *state.members.departed_nodes}))
        leaving = [*failed, *sorted(noticed.difference(failed))]
        stay = inventories.keys() - set(leaving) or inventories.keys()
        if self.returns_to_verified and not returns_to_checkpoint(setup, halt.lost_nodes):
            restart = yield from self._rewind_to_checkpoint()
            return restart_epoch(setup, old, number, address, stay, *restart, arrivals)
        if returns_to_checkpoint(setup, halt.lost_nodes):
            present = {slot: state.members.member_of(worker) for worker, slot in slots.items() if slot in stay}
            restart = yield from self._rewind_to_checkpoint()
            return checkpoint_epoch(
                setup,
                old,
                number,
                address,
                present,
                state.members.waiting_members(old),
                *restart,
            )
        lost_stages = stages_lost(setup, inventories, committed)
        if failed and not lost_stages:
            others = {slot: inventory for slot, inventory in inventories.items() if slot not in failed}
            if stages_lost(setup, others, committed):
                self.worker_failures.record_return()
                restart = yield from self._rewind_to_checkpoint()
                return restart_epoch(setup, old, number, address, others.keys(), *restart, arrivals)
        # A notice can arrive before every worker has built its layers.
        unbuilt = any(not inventories[slot].weight_versions for slot in stay)
        if self._no_weights_changed(halt) and (lost_stages or unbuilt):
            return restart_epoch(setup, old, number, address, stay, setup.start, setup.resume_from, arrivals)
        other = yield from self._decide_reshaped_epoch(halt, old, lost_stages=bool(lost_stages), failed=bool(failed))
        if other is not None:
            return other
        if not lost_stages:
            relief = self.worker_failures.relief_factors(slots)
            planned: PlannedEpoch = yield PlanRecovery(
                number=number,
                inventories=inventories,
                committed=committed,
                moving_slots=tuple(_slots_ready_to_move(old, inventories, committed)),
                arrivals=dict(arrivals),
                leaving_slots=tuple(leaving),
                zones=zones,
                departure_steps=0.0 if failed else self._steps_until_departure(halt),
                failed_slots=tuple(failed),
                slow_slots={**self.slow_nodes.factors_by_slot(slots), **relief},
                limits_activations=bool(relief),
                slow_reason=self.slow_nodes.reason,
            )
            self._planned_ahead = planned.planned_ahead
            next_epoch = NextEpoch(planned.epoch, planned.why, planned.source)
            if setup.strategy_object.rebuilds_pipelines and halt.lost_nodes:
                return self.reshape_controller.complete_open_step_first(next_epoch)
            return self.reshape_controller.complete_before_smaller_stages(next_epoch)
        if (yield FindCheckpoint()) is None:
            raise state.node_lost_error(min({*halt.lost_nodes, *state.members.departed_nodes}))
        restart = yield from self._rewind_to_checkpoint()
        return restart_epoch(setup, old, number, address, stay, *restart, arrivals)

    def _decide_reshaped_epoch(
        self, halt: EpochHalt, old: Epoch, *, lost_stages: bool, failed: bool
    ) -> Flow[NextEpoch | None]:
        """The epoch with another shape, if the shape changes."""
        controller = self.reshape_controller
        if lost_stages:
            return (yield from controller.reshape_from_layers(halt, old))
        if failed:
            return None
        found = yield from controller.reshape_for_memory(halt, old)
        return found or (yield from controller.reshape_if_due(halt, old))

    def _slots_to_leave_out(
        self, slots: Mapping[int, int], inventories: Mapping[int, WorkerInventory]
    ) -> Flow[list[int]]:
        """The slots of failing nodes. None if a layer has no other holder and no checkpoint: then they repeat what
        failed."""
        failed, committed = self.worker_failures.slots(slots), self.state.ledger.next_step
        others = {slot: inventory for slot, inventory in inventories.items() if slot not in failed}
        if failed and not self.returns_to_verified and not stages_lost(self.state.setup, inventories, committed):
            needed = bool(stages_lost(self.state.setup, others, committed))
            if needed and (not others or (yield FindCheckpoint()) is None):
                self.worker_failures.repeat_in_place()
                return []
        return failed

    def _no_weights_changed(self, halt: EpochHalt) -> bool:
        """Whether no weight has changed since the run started: then any worker can build any layer from scratch."""
        start = self.state.setup.start
        versions = [
            version for inventory in halt.inventories.values() for version in inventory.weight_versions.values()
        ]
        return max(versions, default=start) == start == self.state.ledger.next_step

    def _rewind_to_checkpoint(self) -> Flow[tuple[int, str | None]]:
        """Rewind the ledger to the newest checkpoint, or to the start of the run if there is none.

        Returns the step and the checkpoint's folder (None: initial weights). The steps after it are run and counted
        again.
        """
        state, setup = self.state, self.state.setup
        found: FoundCheckpoint | None
        if self.returns_to_verified:
            found = yield ReturnToVerified()
            state.checkpoints.keep_verified(None if found is None else found.step)
            self.returns_to_verified = False
        else:
            found = yield FindCheckpoint()
        step, saved = (found.step, found.folder) if found is not None else (setup.start, setup.resume_from)
        before, samples = state.ledger.next_step, state.ledger.samples
        state.ledger.rewind(step)
        state.emit(RewindLines(step))
        if state.pending_line is not None and state.pending_line.step >= step:
            state.pending_line = None  # the step is run again
        if step >= setup.steps:  # a previous leader completed all steps but could not write the result
            state.end_step = step
        if before > step:
            again = {"steps": before - step, "samples": samples - state.ledger.samples}
            state.log_event("rewound", step=step, **again, why="these steps are run and counted again")
        return step, saved

    def _steps_until_departure(self, halt: EpochHalt) -> float:
        """How many steps of usual length the leaving nodes can still work: the time until the first of them vanishes,
        minus a fifth, minus the duration of the halt so far."""
        now, pace = self.state.now, self.state.recovery_metrics.usual_step_s
        if not pace or not self.state.members.leave_deadlines:
            return math.inf
        left = min(self.state.members.leave_deadlines.values()) - now
        return max(0.0, 0.8 * left - (now - halt.started_at)) / pace

    def handle_all_ready(self) -> None:
        """All required members have built their layers. If no step was open, the recovery is complete."""
        state = self.state
        assert state.epoch is not None
        if self.open_recovery is not None:
            self.open_recovery.ready_at = state.now
            if state.epoch.changes_shape:
                self._log_reshape(self.open_recovery)
            if not state.epoch.recovery.steps and not (
                self.open_recovery.rerun_steps or self.open_recovery.restarts_open_step
            ):
                self.handle_committed(state.epoch.start)

    def _log_reshape(self, recovery: OpenRecovery) -> None:
        """Log that all members hold their layers in the new shape."""
        epoch = recovery.next_epoch.epoch
        assert epoch.shape is not None
        seconds = self.state.recovery_metrics.record_reshape(recovery)
        moved = sum(len(move.layers) for move in epoch.layer_moves)
        self.state.log_event("reshaped", layout=format_depths(epoch.shape.depths), layers=moved, seconds=seconds)

    def handle_committed(self, step: int) -> None:
        """A step is committed. If it is the last of the open steps, the recovery is complete."""
        recovery = self.open_recovery
        if recovery is None or step < recovery.last_step:
            return
        self.open_recovery = None
        self._release_leaving_nodes(recovery)
        self._finish_recovery(recovery)

    def handle_handoff_received(self, message: messages.HandoffReceived) -> None:
        """A worker has received everything that leaving nodes hand to it. When all have, the leaving nodes may go."""
        recovery = self.open_recovery
        if recovery is None or self.halt_in_progress is not None or message.epoch != self.state.epoch_number:
            return
        recovery.handoff_recipients.add(message.worker)
        if recovery.handoff_recipients >= self.state.members.required_workers:
            self._release_leaving_nodes(recovery)

    def _release_leaving_nodes(self, recovery: OpenRecovery) -> None:
        """Let leaving nodes go that hold nothing more to hand over. If the leader's own node is among them, finish the
        recovery record first."""
        epoch, members = recovery.next_epoch.epoch, self.state.members
        nodes = [
            node for node in members.leave_deadlines if set(epoch.slots_of_node(node)).issubset(epoch.leaving_slots)
        ]
        recovery.left_nodes |= set(nodes)
        for node in nodes:
            self._release(node)
        if self.state.node in nodes and self.open_recovery is recovery:
            self._finish_recovery(recovery)

    def _release(self, node: int) -> None:
        """Let a node with notice go. If a worker of it has failed, too, the node has handed over its state now."""
        self.worker_failures.forget([node])
        self.state.release_node(self.state.members.nodes[node])

    def _finish_recovery(self, recovery: OpenRecovery) -> None:
        self.open_recovery = None
        if recovery.lost_nodes or recovery.left_nodes:
            self.state.log_event(
                "recovered", **msgspec.to_builtins(self.state.recovery_metrics.record_recovery(recovery))
            )
        self.state.recovery_metrics.restart_step_timer()


def inventories_at_start(epoch: Epoch) -> dict[int, WorkerInventory]:
    """The inventory of every member at the start of an epoch with a new shape, by slot."""
    plan = Plan.from_text(epoch.plan)
    slots = [slot for slot, member in enumerate(epoch.members) if member is not None]
    return {slot: WorkerInventory(weight_versions=dict.fromkeys(plan.stages_of(slot), epoch.start)) for slot in slots}


def _slots_ready_to_move(epoch: Epoch, inventories: Mapping[int, WorkerInventory], committed: int) -> list[int]:
    """The slots whose workers can move: their copy of the target stage is complete, and no newer than the first open
    step."""
    ready = [
        shadow
        for shadow in epoch.shadows
        if shadow.takes_over_stage and not shadow.needs_copy and shadow.slot in inventories
    ]
    held = {slot: current(inventory, committed) for slot, inventory in inventories.items()}
    return [shadow.slot for shadow in ready if shadow.stage in held[shadow.slot]]
