"""Returning nodes: members that run, have lost their sessions in the store, and come back with their state.

If all sessions end together, because the store or all machines stood still, the nodes open new ones. The first of them
becomes the leader, halts the epoch and waits for the others.

If only some sessions end, because these nodes cannot reach the store, the members among them go on computing as long
as the leader hears from them. The store is their way to a new epoch, so the leader sends it to them. If the leader
itself has lost its session, its node is halted with the others and awaited for a while. A node that the leader does not
hear from is lost, unless a layer has no other holder: then the leader waits for it, too.

A node that comes back after an epoch without it was published is fenced: it ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from culm.cluster.leader.events import (
    EndedWorkers,
    FindCheckpoint,
    ProbeWorkers,
    RecheckTimer,
    ReturnTimer,
    SessionTimer,
)
from culm.runtime import messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from culm.cluster.leader.epoch_change import EpochChange
    from culm.cluster.leader.leader_state import Flow
    from culm.cluster.leader.recovery_metrics import EpochHalt
    from culm.cluster.run_setup import NodeRecord

_WINDOW_LEASES, _MIN_WINDOW_S = 2.0, 10.0
"""How many leases, and at least how many seconds, nodes have to open new sessions, if the run can continue without
them."""
_PROBE_PERIOD_S = 1.0
"""Time between two checks whether the missing nodes still run."""
_ASK_PERIOD_S = 0.2
"""The same while a new leader waits for the former one: on a busy machine, a killed process listens until it gets a
core to end on."""
_SILENT_BEATS, _SILENT_ACTIONS = 3, 2
"""A node without a session is lost if it sends nothing for so many beats and actions of the longest kind. A machine
that is gone has usually been silent for longer when its session expires."""


class ReturningNodes:
    """The members that may come back with their state."""

    def __init__(self, epoch_change: EpochChange) -> None:
        self._epoch_change, self._state = epoch_change, epoch_change.state
        self.awaited: set[int] = set()
        """Members that have not opened a new session yet. They are not lost; no epoch begins meanwhile."""
        self.without_session: dict[int, float] = {}
        """Members that compute and have no session, and the time since when. One that is declared lost remains here
        until it has ended."""
        self._asked: set[int] = set()
        """Awaited members that have to answer the halt."""
        self._heard_at: dict[int, float] = {}
        """By worker: when its last heartbeat or halt report arrived."""
        self._expected_since = -math.inf
        """Since when signs of life are expected: the halt in progress or the epoch began then."""
        self._has_session_timer = False
        self._waiting_since: float | None = None
        """Since when lost holders are awaited; None: they are not."""
        self._has_returned = False
        """Whether a lost node has come back since then: the others may be about to."""

    @property
    def _window_s(self) -> float:
        state = self._state
        return min(state.setup.rejoin_within, max(_MIN_WINDOW_S, _WINDOW_LEASES * state.timeouts.lease))

    # All sessions have ended.

    def await_members(self, nodes: Sequence[int]) -> None:
        """All sessions have ended: halt the epoch, and wait for the members that have no new session yet."""
        state = self._state
        self.awaited = set(nodes)
        why = "the store or the nodes stood still; the nodes rejoin with their state"
        state.log_event("sessions_expired", step=state.ledger.next_step, nodes=sorted(nodes), why=why)
        state.show_incident(f"the sessions of the nodes in the store have expired: {why}")
        state.start_timer(self._window_s, ReturnTimer())
        self._epoch_change.start_halt()

    def take_overdue(self) -> list[int]:
        """The members that have not come back in time. They count as lost from now on."""
        overdue = sorted(self.awaited)
        self.forget(overdue)
        return overdue

    # Some sessions have ended, and the nodes compute.

    def note_message(self, message: messages.Heartbeat | messages.HaltReport) -> None:
        """A worker has sent a sign of life."""
        self._heard_at[message.worker] = self._state.now

    def expect_messages(self) -> None:
        """A halt or an epoch begins. Workers that had answered a halt were not expected to send anything since."""
        self._expected_since = self._state.now

    def keep(self, node: int) -> Flow[bool]:
        """The session of a node has ended. Whether it remains a member, because it computes."""
        state, epoch = self._state, self._state.epoch
        if (
            epoch is None
            or not self._can_return
            or not epoch.slots_of_node(node)
            or node not in state.members.nodes
            or node in state.members.departed_nodes | state.evicted_nodes | state.members.leave_deadlines.keys()
            or node in self._epoch_change.worker_failures.failing_nodes
            or self._is_silent(node)
            or (yield from self._has_ended([node]))
        ):
            return False
        self.without_session[node] = state.now
        seconds = state.setup.rejoin_within
        why = "it cannot reach the store; it computes and keeps its state"
        state.log_event("session_lost", node=node, seconds=seconds, why=why)
        state.show_incident(f"node {node} has lost its session: {why}, for {seconds:.0f} s")
        self._start_session_timer()
        yield from self._epoch_change.start_next_epoch_if_ready()  # the plan may have been abandoned
        return True

    def await_running(self, nodes: Sequence[int]) -> Flow[list[int]]:
        """This node has become the leader, and some members have no session. Expect those that run to answer the halt
        and to open a session. Returns the others, which are lost."""
        state = self._state
        gone = (yield from self._has_ended(nodes)) if self._can_return else list(nodes)
        if running := [node for node in nodes if node not in gone and node not in state.evicted_nodes]:
            self.awaited |= set(running)
            self._asked |= set(running)
            why = "they have no session in the store, and their processes run"
            state.log_event("awaiting", nodes=running, seconds=self._window_s, why=why)
            state.start_timer(self._window_s, ReturnTimer())
            self._start_session_timer()
        return [node for node in nodes if node not in running]

    def check_sessions(self) -> Flow[list[int]]:
        """The nodes without a session that are lost: they have ended, are silent, or their time is over."""
        state, epoch = self._state, self._state.epoch
        assert epoch is not None
        self._has_session_timer = False
        watched = self.without_session.keys() | self._asked
        over = {
            node
            for node, since in self.without_session.items()
            if state.now - since >= state.setup.rejoin_within or not epoch.slots_of_node(node)
        }
        lost = over | {node for node in watched if self._is_silent(node)}
        if others := sorted(watched - lost):  # a machine that is gone would not answer the probe
            lost.update((yield from self._has_ended(others)))
        if watched - lost:
            self._start_session_timer()
        return sorted(lost)

    def has_no_session(self, node: int) -> bool:
        """Whether a node has no session, and the leader waits for it or receives its messages."""
        return node in self.awaited or node in self.without_session

    def forget(self, nodes: Iterable[int]) -> None:
        """Nodes are lost."""
        for node in nodes:
            self.without_session.pop(node, None)
            self._asked.discard(node)
            self.awaited.discard(node)

    def begin_epoch(self, body: bytes) -> None:
        """An epoch was published: send it to the members that cannot read it from the store."""
        state, epoch = self._state, self._state.epoch
        self.expect_messages()
        assert epoch is not None
        for member in epoch.present_members:
            if member.node in self.without_session:
                state.send(member.address, body)

    @property
    def _can_return(self) -> bool:
        """Whether nodes may lose their sessions and keep their state. A worker that is to be restarted has none."""
        setup = self._state.setup
        return setup.survives_losses and setup.rejoin_within > 0 and not setup.restarts_workers

    def _is_silent(self, node: int) -> bool:
        """Whether some worker of a node has sent nothing for too long. One that has answered the halt, or has completed
        the run, has nothing more to send."""
        state, halt = self._state, self._epoch_change.halt_in_progress
        reported = state.final_reports.keys() if halt is None else halt.inventories.keys()
        limit = _SILENT_BEATS * state.timeouts.heartbeat + _SILENT_ACTIONS * state.slowest_action_s
        waiting = state.members.workers_of([node]) - reported
        heard_at = (max(self._expected_since, self._heard_at.get(worker, -math.inf)) for worker in waiting)
        return any(state.now - at > limit for at in heard_at)

    def _has_ended(self, nodes: Collection[int]) -> Flow[list[int]]:
        """Those of the nodes of which some process has ended."""
        addresses = {node: self._addresses(node) for node in nodes}
        probed: EndedWorkers = yield ProbeWorkers(tuple(at for found in addresses.values() for at in sorted(found)))
        return [node for node, found in addresses.items() if not found.isdisjoint(probed.addresses)]

    def _addresses(self, node: int) -> set[str]:
        """The addresses of the processes of a member, as far as they are known."""
        epoch, record = self._state.epoch, self._state.members.nodes.get(node)
        workers = {member.address for member in epoch.present_members if member.node == node} if epoch else set()
        return workers if record is None else workers | {record.agent}

    def _start_session_timer(self) -> None:
        if not self._has_session_timer:
            self._has_session_timer = True
            self._state.start_timer(_ASK_PERIOD_S if self._asked else _PROBE_PERIOD_S, SessionTimer())

    # Some sessions have ended, and layers have no other holder.

    def wait_for_holders(self, halt: EpochHalt, lost_stages: Collection[int]) -> Flow[bool]:
        """Whether the next epoch has to wait for lost nodes that may come back: the survivors do not hold every layer,
        or some nodes are just coming back."""
        state = self._state
        missing = self._nodes_that_may_return(halt) if state.setup.rejoin_within else {}
        if not missing or not (lost_stages or self._has_returned):
            self._stop_waiting()
            return False
        since = self._waiting_since if self._waiting_since is not None else state.now
        falls_back = not lost_stages or (yield FindCheckpoint()) is not None
        left = since + (self._window_s if falls_back else state.setup.rejoin_within) - state.now
        probed: EndedWorkers = yield ProbeWorkers(tuple(at for addresses in missing.values() for at in addresses))
        alive = [node for node, addresses in missing.items() if not set(addresses) & set(probed.addresses)]
        if left <= 0 or not alive:
            self._stop_waiting()
            return False
        if self._waiting_since is None:
            self._log_wait(alive, left, falls_back=falls_back)
        self._waiting_since = since
        state.start_timer(min(left, _PROBE_PERIOD_S), RecheckTimer(halt.next_number, wait_expired=False))
        return True

    def _nodes_that_may_return(self, halt: EpochHalt) -> dict[int, list[str]]:
        """The addresses of the workers of lost members that were not removed on purpose, by node. Includes those that a
        previous leader had lost: no epoch without them was published. A node that was let go has handed over its state,
        and does not return."""
        state, found = self._state, dict[int, list[str]]()
        lost = halt.lost_nodes | (state.members.departed_nodes & state.recovery_metrics.unrecovered_nodes)
        for member in state.epoch.present_members if state.epoch is not None else ():
            if member.node in lost and member.node not in state.evicted_nodes:
                found.setdefault(member.node, []).append(member.address)
        return found

    def _log_wait(self, nodes: Sequence[int], seconds: float, *, falls_back: bool) -> None:
        otherwise = "returns to a checkpoint" if falls_back else "ends"
        why = f"no other node holds their layers, and their processes run; otherwise the run {otherwise}"
        self._state.log_event("awaiting", nodes=sorted(nodes), seconds=seconds, why=why)
        listed = ", ".join(map(str, sorted(nodes)))
        self._state.show_incident(f"waiting up to {seconds:.0f} s for the sessions of nodes {listed}: {why}")

    def _stop_waiting(self) -> None:
        self._waiting_since, self._has_returned = None, False

    # A node comes back.

    def admit(self, record: NodeRecord) -> bool:
        """Take back a member that has opened a new session. Returns False if it is not one."""
        state, node = self._state, record.node
        is_member = self.has_no_session(node) and node not in state.members.departed_nodes
        self.forget([node])
        if not is_member and not self._take_back(record):
            return False
        state.members.nodes[node] = record
        why = "it has opened a new session before an epoch without it began, and keeps its state"
        state.log_event("returned", node=node, why=why)
        return True

    def _take_back(self, record: NodeRecord) -> bool:
        """Expect a lost node again, if no epoch without it has been decided yet."""
        state, node, halt = self._state, record.node, self._epoch_change.halt_in_progress
        if halt is None or node not in self._nodes_that_may_return(halt):
            return False
        if record.leaves_in_s is not None and node not in halt.lost_nodes:
            return False  # it was not lost: it has handed over what it held, and goes
        self._has_returned = self._waiting_since is not None
        halt.lost_nodes.discard(node)
        state.members.departed_nodes.discard(node)
        state.recovery_metrics.unrecovered_nodes.discard(node)
        return True
