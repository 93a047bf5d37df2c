"""Failure detector: broken connections and stalls of a run whose nodes are all still registered in the store."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from culm.cluster.leader.events import ProgressTimer, Suspicion
from culm.runtime import messages

if TYPE_CHECKING:
    from culm.cluster.leader.epoch_change import EpochChange


MAX_FRUITLESS_EPOCHS = 4
"""After this many new epochs in a row that committed no step, the node that reported the most failures is removed: its
connections will not recover."""


class FailureDetector:
    """Starts a new epoch when a worker reports an unreachable peer, or progress stops, and no node is lost."""

    def __init__(self, epoch_change: EpochChange) -> None:
        self.epoch_change, self.state = epoch_change, epoch_change.state
        self._progress_mark: object = None
        """The progress of the epoch at the last check."""
        self._epoch = 0
        self._actions_done: dict[int, int] = {}
        """Actions done in the epoch, by worker, from its last heartbeat."""
        self._step = 0
        self._fruitless_epochs = 0
        """Epochs started since that step although no node was lost."""
        self._reports_by_node: Counter[int] = Counter()
        """Failure reports in these epochs, by reporting node."""

    def handle_peer_unreachable(self, message: messages.FailureReport) -> None:
        """A worker cannot reach a peer. Wait until the store would have reported a lost node. If none is lost, a
        connection broke: resend what it carried in a new epoch, or end the run where no outputs are kept."""
        state, number = self.state, self.state.epoch_number
        self._reset_if_progressed()
        self._reports_by_node[state.members.node_of(message.worker)] += 1
        state.log_event("suspected", **state.members.event_fields(message.worker), why=message.message)
        state.recovery_metrics.note_suspicion()
        state.start_timer(state.timeouts.confirm_loss, Suspicion(number, message))

    def handle_suspicion(self, suspicion: Suspicion) -> None:
        if self.state.epoch_number == suspicion.epoch and self.epoch_change.halt_in_progress is None:
            self._resend_in_new_epoch()

    def _resend_in_new_epoch(self) -> None:
        """No node is lost: start a new epoch, in which everything is sent again. After several epochs without a step,
        evict the node with the most reports: two nodes that cannot reach each other cannot both stay."""
        self._reset_if_progressed()
        self._fruitless_epochs += 1
        members = (
            {member.node for member in self.state.epoch.present_members} if self.state.epoch is not None else set()
        )
        complaining = [(count, node) for node, count in self._reports_by_node.items() if node in members]
        if self._fruitless_epochs >= MAX_FRUITLESS_EPOCHS and complaining:
            _, node = max(complaining)
            why = f"no step in {self._fruitless_epochs} epochs, and the node cannot reach others; it is removed"
            self.state.log_event("given_up", node=node, why=why)
            self.state.evict_node(node)
            self._fruitless_epochs = 0  # the remaining nodes may work
            self._reports_by_node.clear()
        self.epoch_change.start_halt()

    def _reset_if_progressed(self) -> None:
        """Forget past failures once a step has been committed."""
        if self.state.ledger.next_step != self._step:
            self._step, self._fruitless_epochs = self.state.ledger.next_step, 0
            self._reports_by_node.clear()

    def handle_heartbeat(self, heartbeat: messages.Heartbeat) -> None:
        """Record how many actions a worker has done in the epoch, and how long the longest took."""
        self.state.slowest_action_s = max(self.state.slowest_action_s, heartbeat.slowest_action_s)
        if heartbeat.epoch == self.state.epoch_number:
            if heartbeat.epoch != self._epoch:
                self._epoch = heartbeat.epoch
                self._actions_done.clear()
            self._actions_done[heartbeat.worker] = heartbeat.actions_done

    def start_progress_timer(self) -> None:
        """Check the progress after a whole progress timeout."""
        state = self.state
        state.start_timer(state.timeouts.progress + 5 * state.slowest_action_s, ProgressTimer())

    def check_progress(self) -> None:
        """If nothing changed for a whole progress timeout, a message was lost: send everything again."""
        state, seen = self.state, self._progress_mark
        counts = (
            state.ledger.next_step,
            len(state.members.ready_workers),
            len(state.final_reports),
            len(state.checkpoints),
        )
        mark = (state.epoch_number, self.epoch_change.halt_in_progress, dict(self._actions_done), counts)
        self._progress_mark = mark
        self.start_progress_timer()
        if mark == seen and state.epoch is not None:
            self._handle_stall()

    def _handle_stall(self) -> None:
        state = self.state
        if self.epoch_change.halt_in_progress is not None:
            self.epoch_change.send_halt(self.epoch_change.halt_in_progress)
        elif not self._is_waiting_for_permission():
            why = "no progress and no node lost: everything is sent again in a new epoch"
            state.log_event("stalled", step=state.ledger.next_step, why=why)
            self._resend_in_new_epoch()

    def _is_waiting_for_permission(self) -> bool:
        """Whether the run waits for the user: a hook or a launcher has to permit the next step."""
        state = self.state
        if state.members.all_ready and state.pending_line is not None:
            return True
        return state.members.all_ready and state.end_step is None and state.permitted_steps <= state.ledger.next_step
