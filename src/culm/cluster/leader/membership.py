"""Membership: nodes join, receive preemption notices and are lost. Each of these can start an epoch change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from culm.cluster.leader.epoch_change import inventories_at_start
from culm.cluster.leader.events import PrecomputePlans, StartAfterTimer
from culm.cluster.leader.leader_snapshot import RemovalRecord
from culm.cluster.leader.next_epoch import can_leave, can_move, every_stage_has_two_holders, first_epoch, restart_epoch
from culm.cluster.leader.reshaped_epoch import initial_shape
from culm.cluster.leader.slow_node_controller import REPLACE_WITHIN_S
from culm.errors import RunError
from culm.observe.slot_assignments import epoch_event_fields
from culm.plan.reshape.slot_assignment import WorkerPlace, assign_slots
from culm.plan.reshape.whole_pipelines import completes_another_pipeline
from culm.runtime import messages
from culm.runtime.epoch import Member

if TYPE_CHECKING:
    from culm.cluster.leader.epoch_change import EpochChange
    from culm.cluster.leader.leader_state import Flow
    from culm.cluster.run_setup import NodeRecord

_FIRST_WAIT_FACTOR = 8
"""The first wait of a host, as a multiple of the suspicion time. Each further wait is twice as long, so that the time
lost to a machine that never recovers grows only with the logarithm of the run time."""


class HostBackoff:
    """Makes hosts whose nodes were evicted more than once wait before their next node is admitted. Pure.

    Without it, a machine that can reach etcd but not all peers would rejoin at once and stall the run again.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """How many nodes of a host were evicted."""
        self.blocked_until: dict[str, float] = {}

    def restore(self, failures: Mapping[str, int], blocked_until: Mapping[str, float]) -> None:
        """Take over what the previous leader knew."""
        self.failures |= Counter(failures)
        self.blocked_until = {**blocked_until, **self.blocked_until}

    def record_failure(self, host: str, now: float, suspicion_s: float) -> None:
        """Record that a node of this host was evicted. The first time has no consequence: it may be an accident."""
        self.failures[host] += 1
        if self.failures[host] > 1:
            self.blocked_until[host] = now + _FIRST_WAIT_FACTOR * suspicion_s * 2.0 ** (self.failures[host] - 2)

    def remaining_s(self, host: str, now: float) -> float:
        """Seconds until the host's next node is admitted; 0: at once."""
        return max(0.0, self.blocked_until.get(host, now) - now)


class Membership:
    """Handles joins, notices and losses on behalf of the leader."""

    def __init__(self, epoch_change: EpochChange) -> None:
        self.epoch_change, self.state = epoch_change, epoch_change.state
        self._host_backoff = HostBackoff()
        self._quarantined_nodes: dict[int, str] = {}
        """The reason, by node."""
        self._quarantined_hosts: dict[str, str] = {}
        """Machines with a quarantined node, and the reason. Another node there is refused, unless a member of the run
        is there, too: then the node is one of several on it."""
        self._delayed_nodes: dict[int, NodeRecord] = {}
        """Nodes whose host is in backoff: they are admitted later."""
        self._awaits_all: bool | None = None
        """Whether the run can only begin with all nodes; None: the time for them has not begun yet."""

    def handle_join(self, record: NodeRecord) -> Flow[None]:
        """Handle a node record: its agent is up, then its workers. When all are up, the first epoch starts; a node that
        joins later waits for a slot."""
        state, members = self.state, self.state.members
        if self.epoch_change.returning_nodes.admit(record):
            halt = self.epoch_change.halt_in_progress
            if halt is not None and not members.workers_of([record.node]) <= halt.expected_workers:
                self.epoch_change.start_halt()
        elif record.node in members.departed_nodes and record.leaves_in_s is None:
            state.dismiss_node(record, "the run continues without this node")
            return
        if record.leaves_in_s is not None:
            yield from self._handle_notice(record, record.leaves_in_s)
            yield from self.epoch_change.start_next_epoch_if_ready()  # it may have been the last one awaited
            return
        if not record.workers:
            return
        outside = state.epoch is not None and not state.epoch.slots_of_node(record.node)
        differs = members.fingerprint_difference(record) if state.job.exact and outside else None
        if differs is not None:  # refuse the new node; the running ones continue
            state.log_event("refused", node=record.node, why=differs)
            return
        if record.node in self._quarantined_nodes or (
            record.host in self._quarantined_hosts and not self._host_has_member(record.host)
        ):
            reason = self._quarantined_nodes.get(record.node) or self._quarantined_hosts[record.host]
            state.log_event("refused", node=record.node, why=f"its machine is quarantined: {reason}")
            return
        seconds = self._host_backoff.remaining_s(record.host, state.now)
        if outside and seconds and not self._host_has_member(record.host):
            self._delayed_nodes[record.node] = record
            why = "nodes of this host were removed before; it is admitted after a backoff"
            state.log_event("on_probation", node=record.node, seconds=seconds, why=why)
            return
        if members.nodes.get(record.node) != record:
            self._admit_node(record)
        yield from self._start_if_complete()

    @property
    def removals(self) -> RemovalRecord:
        """The removed nodes and machines, for the snapshot."""
        return RemovalRecord(
            tuple(sorted(self.state.evicted_nodes)),
            dict(self._host_backoff.failures),
            self._host_backoff.blocked_until,
            self._quarantined_nodes,
            self._quarantined_hosts,
        )

    def restore(self, removals: RemovalRecord) -> None:
        """Take over what the previous leader knew."""
        self.state.evicted_nodes |= set(removals.evicted_nodes)
        self._host_backoff.restore(removals.failures_by_host, removals.blocked_until)
        self._quarantined_nodes = {**removals.quarantined_nodes, **self._quarantined_nodes}
        self._quarantined_hosts = {**removals.quarantined_hosts, **self._quarantined_hosts}

    @property
    def quarantined_nodes(self) -> frozenset[int]:
        """Nodes that are refused from now on, and leave the run if they are members."""
        return frozenset(self._quarantined_nodes)

    def removed_members(self) -> list[int]:
        """The members that the previous leader has removed, without having ended the epoch."""
        state = self.state
        members = state.members.present_members(state.epoch) if state.epoch is not None else []
        removed = state.evicted_nodes | self._quarantined_nodes.keys()
        return sorted(
            {member.node for member in members} & removed - self.epoch_change.worker_failures.failing_nodes.keys()
        )

    def quarantine(self, node: int) -> Flow[None]:
        """Continue without a node, and refuse it and its machine from now on."""
        self.refuse_wrong_machine(node)
        yield from self.handle_lost_nodes([node])

    def refuse_wrong_machine(self, node: int) -> None:
        """Refuse a node and its machine from now on, because its results were wrong."""
        self.refuse_machine(node, "its results were wrong")

    def refuse_machine(self, node: int, reason: str) -> None:
        """Refuse a node and its machine from now on."""
        self._quarantined_nodes[node] = reason
        record = self.state.members.nodes.get(node)
        if record is not None:
            self._quarantined_hosts[record.host] = reason

    def _admit_node(self, record: NodeRecord) -> None:
        state, members = self.state, self.state.members
        members.nodes[record.node] = record
        state.log_event("node_joined" if not record.incarnation else "worker_renewed", node=record.node)
        self.epoch_change.handle_restarted_node(record.node)
        self.epoch_change.handle_admitted(record.node)

    def _host_has_member(self, host: str) -> bool:
        """Whether a member of the epoch runs on this host: then the host's connections work."""
        epoch, nodes = self.state.epoch, self.state.members.nodes
        members = self.state.members.present_members(epoch) if epoch is not None else ()
        return any(member.node in nodes and nodes[member.node].host == host for member in members)

    def _admit_delayed_nodes(self) -> None:
        """Admit the nodes whose backoff has ended."""
        now = self.state.now
        for node, record in list(self._delayed_nodes.items()):
            if not self._host_backoff.remaining_s(record.host, now):
                self._admit_node(self._delayed_nodes.pop(node))

    def _start_if_complete(self) -> Flow[None]:
        """Start the run when all nodes have joined, not counting those that have departed again, or when a complete
        pipeline has and the others had their time."""
        state, members, setup = self.state, self.state.members, self.state.setup
        if state.epoch is None:
            if self._awaits_all is None and members.nodes and setup.start_after is not None:
                self._awaits_all = True
                state.start_timer(setup.start_after, StartAfterTimer())
            if len(members.nodes) + len(members.departed_nodes) >= setup.nodes:
                if not members.nodes:
                    raise state.all_nodes_left_error()
                yield from self._start_first_epoch()
            elif self._awaits_all is False and len(members.workers_of(members.nodes)) >= setup.stages:
                joined = f"{len(members.nodes)} of {setup.nodes} nodes have joined within {setup.start_after:g} s"
                why = f"{joined}: the others get their slots when they join"
                yield from self._start_first_epoch(why)
                state.show_incident(f"the run begins, because {why}")
        yield from self.epoch_change.start_next_epoch_if_ready()

    def handle_start_after(self) -> Flow[None]:
        """From now on the run may begin without the nodes that have not joined yet."""
        self._awaits_all = False
        yield from self._start_if_complete()

    def _start_first_epoch(self, why: str | None = None) -> Flow[None]:
        """Start the first epoch. `why`: the reason, if it begins without some nodes.

        The first D x P workers by number fill the slots, with the holders of a layer on different nodes and, if there
        are several zones, in different zones. If nodes are missing, the last slots stay empty."""
        state, setup, members = self.state, self.state.setup, self.state.members
        slots = range(setup.pipelines * setup.stages)
        workers = self._workers_by_slot(sorted(members.workers_of(members.nodes))[: len(slots)])
        prints = {members.nodes[members.node_of(worker)].fingerprint for worker in workers}
        if state.job.exact and len(prints) > 1:
            raise RunError(
                f"nodes differ in what exact results depend on ({'; '.join(sorted(prints))}): "
                "use machines of one kind, or --set exact=false"
            )
        slot_members: list[Member | None] = [members.member_of(worker) for worker in workers]
        filled, address = len(slot_members), state.address
        slot_members += [None] * (len(slots) - filled)
        first = first_epoch(
            setup, address, tuple(slot_members), state.checkpoint_folder, state.timeouts.heartbeat, members.zones
        )
        if filled < len(slots):
            first = restart_epoch(setup, first, 1, address, slots[:filled], setup.start, setup.resume_from).epoch
        state.adopt_epoch(first)
        reason: dict[str, Any] = {} if why is None else {"why": why}
        state.log_event("epoch", number=1, **epoch_event_fields(first), segments=setup.segments, **reason)
        yield from state.publish_epoch()
        if setup.keeps_action_outputs:
            state.emit(PrecomputePlans(inventories_at_start(first), setup.start, None))

    def _workers_by_slot(self, workers: Sequence[int]) -> list[int]:
        """The workers in the order of the slots that they fill."""
        setup, members = self.state.setup, self.state.members
        if len(workers) < setup.pipelines * setup.stages:
            return list(workers)
        places = {
            worker: WorkerPlace(members.node_of(worker), members.zones.get(members.node_of(worker), ""))
            for worker in workers
        }
        worker_by_slot = assign_slots(initial_shape(setup), setup.strategy_object, places, {}, ())
        return [worker_by_slot[slot] for slot in sorted(worker_by_slot)]

    def handle_lost_nodes(self, nodes: Sequence[int]) -> Flow[None]:
        """Handle nodes that are lost for good: start an epoch in which other nodes take over their work and layers."""
        state, members, epoch = self.state, self.state.members, self.state.epoch
        epoch_nodes = list(nodes) if epoch is None else [member.node for member in epoch.present_members]
        lost_members = [node for node in nodes if node in epoch_nodes and node not in members.departed_nodes]
        self._remove_nodes(nodes)
        halt = self.epoch_change.halt_in_progress
        if not lost_members:
            if halt is not None and not halt.expected_workers.isdisjoint(members.workers_of(nodes)):
                self.epoch_change.start_halt()  # a node without a slot was asked for its inventory and cannot answer
            return
        if not state.setup.survives_losses:
            raise state.node_lost_error(lost_members[0])
        for node in lost_members:
            state.log_event("lost", node=node, step=state.ledger.next_step)
        members.departed_nodes |= set(lost_members)
        if epoch is not None:
            state.recovery_metrics.unrecovered_nodes |= set(lost_members)
        yield from state.write_snapshot()
        if epoch is None:
            yield from self._start_if_complete()
        else:
            self.epoch_change.start_halt(lost_members)

    def _remove_nodes(self, nodes: Sequence[int]) -> None:
        """Unregister nodes. If a node was evicted, its host enters backoff before its next node is admitted."""
        state, members = self.state, self.state.members
        for node in nodes:
            self._delayed_nodes.pop(node, None)
            if node in members.nodes and node in state.evicted_nodes:
                self._host_backoff.record_failure(members.nodes[node].host, state.now, state.timeouts.confirm_loss)
        members.remove_nodes(nodes)
        self.epoch_change.worker_failures.forget(nodes)
        self.epoch_change.returning_nodes.forget(nodes)

    def _handle_notice(self, record: NodeRecord, notice_s: float) -> Flow[None]:
        """Handle a preemption notice: start an epoch without the node before it goes. If the run is ending, it
        stays."""
        state, members, epoch, node = self.state, self.state.members, self.state.epoch, record.node
        if node in members.departed_nodes or node in members.leave_deadlines:
            return  # the notice is known
        state.log_event("notice", node=node, seconds=notice_s)
        if epoch is None or not epoch.slots_of_node(node):  # it has no slot: the run starts, or continues, without it
            if epoch is None and not state.setup.survives_losses:
                raise state.node_lost_error(node)
            self._remove_nodes([node])
            state.release_node(record)
            yield from self._start_if_complete()
            return
        members.nodes[node] = record
        if not epoch.keeps_outputs or state.end_step is not None:
            return
        members.leave_deadlines[node] = state.now + notice_s
        if not self._end_run_if_all_leave() and self.epoch_change.halt_in_progress is None:
            self.epoch_change.start_halt()

    def _end_run_if_all_leave(self) -> bool:
        """If all members have received a notice and no node waits, end the run after the open steps, with a checkpoint
        if the run has a folder. Returns whether the run ends."""
        state, epoch = self.state, self.state.epoch
        if epoch is None or state.end_step is not None or not state.members.all_are_leaving(epoch):
            return False
        state.members.leave_deadlines.clear()
        state.end_before_step(min(state.ledger.next_step + 2, state.setup.steps))
        state.all_nodes_leaving = state.end_step != state.setup.steps
        return True

    def admit_waiting_nodes(self) -> None:
        """After a commit: start one new epoch in which waiting nodes join and caught-up nodes take their stage. Under
        strategies that restart from a checkpoint, only if the nodes suffice for another pipeline."""
        state, members, epoch = self.state, self.state.members, self.state.epoch
        if epoch is None or state.end_step is not None or not self.epoch_change.is_idle or state.store_unreachable:
            return
        self._admit_delayed_nodes()
        if self._end_run_if_all_leave():  # the nodes that could have continued may be gone by now
            return
        if not state.setup.keeps_action_outputs:
            filled = {slot for slot, member in enumerate(epoch.members) if member is not None}
            waiting = len(members.waiting_members(epoch))
            if completes_another_pipeline(state.setup.pipelines, state.setup.stages, filled, waiting):
                self.epoch_change.start_halt()
            return
        draining = self.epoch_change.reshape_controller.intent is not None
        wanted = not draining and (
            (members.has_empty_slot(epoch) and members.waiting_members(epoch)) or self._can_move() or self._can_leave()
        )
        if self.epoch_change.reshape_controller.is_due or members.caught_up_workers or wanted:
            self.epoch_change.start_halt()

    def handle_slow_nodes(self) -> None:
        """After a commit: start an epoch in which slow nodes get less work, or leave because another node waits."""
        state, epoch = self.state, self.state.epoch
        if epoch is None or not self.epoch_change.is_idle or self.epoch_change.reshape_controller.intent is not None:
            return
        decision = self.epoch_change.slow_nodes.decide()
        if decision is None:
            return
        members = {slot: epoch.members[slot] for slot in (*decision.factors, *decision.replaced_slots)}
        for slot in decision.replaced_slots:
            if (member := members[slot]) is not None:
                state.log_event("slow_node_replaced", node=member.node, why=decision.why)
                state.members.leave_deadlines[member.node] = state.now + REPLACE_WITHIN_S
        slow = decision.factors if decision.verdict == "share" else decision.reported_slots
        for slot in slow:
            if (member := members[slot]) is not None:
                kind = "slow_node" if decision.verdict == "share" else "slow_node_stays"
                fields, factor = state.members.event_fields(member.worker), round(decision.factors[slot], 2)
                state.log_event(kind, **fields, slot=slot, factor=factor, why=decision.why)
        if not slow and decision.verdict != "replace":
            state.log_event("slow_nodes_over", why=decision.why)
        if decision.verdict != "report":
            self.epoch_change.start_halt()

    def handle_caught_up(self, message: messages.ShadowCaughtUp) -> None:
        """A new shadow replica is complete: its stage has two holders again."""
        state, epoch = self.state, self.state.epoch
        if epoch is None or message.epoch != epoch.number:
            return
        shadows = tuple(
            msgspec.structs.replace(shadow, needs_copy=False)
            if shadow.stage == message.stage and epoch.slot_of(message.worker) == shadow.slot
            else shadow
            for shadow in epoch.shadows
        )
        state.epoch = epoch = msgspec.structs.replace(epoch, shadows=shadows)
        state.recovery_metrics.set_at_risk(not every_stage_has_two_holders(epoch))
        state.log_event("protected", **state.members.event_fields(message.worker), stage=message.stage)
        if state.members.mark_caught_up(
            message.worker
        ):  # it takes its stage at the next commit, which now waits for it
            state.ledger.workers = len(state.members.required_workers)
        elif self.epoch_change.halt_in_progress is None and (self._can_leave() or self._can_move()):
            # With this copy complete, a worker can move, or a leaving node that had to wait for it can go.
            self.epoch_change.start_halt()

    def _can_leave(self) -> bool:
        """Whether a node with notice, which had to stay, can leave. Not before the open steps are committed: until then
        a new copy does not count, and a new epoch would only make it again."""
        state, epoch = self.state, self.state.epoch
        if epoch is None or state.ledger.next_step < epoch.start:
            return False
        return can_leave(epoch, state.members.leave_deadlines)

    def _can_move(self) -> bool:
        """Whether a worker can move to another stage. Not before the open steps are committed: until then a new copy
        does not count."""
        state, epoch = self.state, self.state.epoch
        if epoch is None or state.end_step is not None or not self.epoch_change.is_idle:
            return False
        leaving = [slot for node in state.members.leave_deadlines for slot in epoch.slots_of_node(node)]
        return can_move(state.setup.strategy_object, epoch, leaving)
