"""Member registry: the nodes of a run as the leader knows them, and what each has to report in the current epoch."""

from __future__ import annotations

from collections.abc import Iterable

from culm.cluster.run_setup import NodeRecord
from culm.runtime.epoch import Epoch, Member, worker_label
from culm.schedule import Plan


class MemberRegistry:
    """Nodes that are present, leaving or gone; of an epoch's members, which are required and which still catch up."""

    def __init__(self, workers_per_node: int = 1) -> None:
        self.workers_per_node = workers_per_node
        self.nodes: dict[int, NodeRecord] = {}
        self.departed_nodes: set[int] = set()
        """Nodes that were lost, or have left after a notice."""
        self.leave_deadlines: dict[int, float] = {}
        """Nodes of members that have received a notice and are still present: when each may vanish (clock time)."""
        self.wanted_slots: set[int] = set()
        """Slots that should have a worker. Pipelines of unequal depth also have slots that stay empty."""
        self.required_workers: set[int] = set()
        """Workers that every step waits for: all members except joining workers that have not caught up."""
        self.checkpoint_writers: set[int] = set()
        """Workers that write a shard of every checkpoint."""
        self.caught_up_workers: set[int] = set()
        """Joining workers that have caught up."""
        self.ready_workers: set[int] = set()
        """Members of the epoch that have built their layers."""

    @property
    def all_ready(self) -> bool:
        return self.required_workers <= self.ready_workers

    def assign_roles(self, epoch: Epoch, full_plan: Plan) -> None:
        """Set which members are required and which write checkpoints: a member is required if it runs a stage or keeps
        a complete copy. `full_plan` is the plan with every slot filled."""
        plan = Plan.from_text(epoch.plan)
        self.wanted_slots = {slot for slot in range(len(full_plan.workers)) if slot not in full_plan.failed}
        complete_copies = {shadow.slot for shadow in epoch.shadows if not shadow.needs_copy}
        members = {slot: member.worker for slot, member in enumerate(epoch.members) if member is not None}
        self.checkpoint_writers = {worker for slot, worker in members.items() if plan.stages_of(slot)}
        self.required_workers = self.checkpoint_writers | {
            worker for slot, worker in members.items() if slot in complete_copies
        }
        self.caught_up_workers.clear()
        self.ready_workers.clear()

    def mark_caught_up(self, worker: int) -> bool:
        """Require a joining worker that has caught up from now on. Returns False if it was required already."""
        if worker in self.required_workers:
            return False
        self.required_workers.add(worker)
        self.caught_up_workers.add(worker)
        return True

    def node_of(self, worker: int) -> int:
        """The node of a worker."""
        return worker // self.workers_per_node

    def workers_of(self, nodes: Iterable[int]) -> set[int]:
        """The workers of some nodes."""
        K = self.workers_per_node
        return {node * K + index for node in nodes for index in range(K)}

    def agent_of(self, worker: int) -> str | None:
        """The address of a worker's agent; None: its node is not registered."""
        record = self.nodes.get(self.node_of(worker))
        return None if record is None else record.agent

    def describe_worker(self, worker: int) -> str:
        """A worker as text: 'node 3', or 'node 3 worker 1' if nodes have several workers."""
        return worker_label(worker, self.workers_per_node)

    def event_fields(self, worker: int) -> dict[str, int]:
        """The fields of an event that name a worker: its node and, if nodes have several workers, its number there."""
        node, index = divmod(worker, self.workers_per_node)
        return {"node": node} if self.workers_per_node == 1 else {"node": node, "worker": index}

    def present_members(self, epoch: Epoch) -> list[Member]:
        """The members that have not departed."""
        return [member for member in epoch.present_members if member.node not in self.departed_nodes]

    def member_of(self, worker: int) -> Member:
        """The `Member` entry for a worker of a registered node. Its address is empty while it is being restarted."""
        node, index = divmod(worker, self.workers_per_node)
        record = self.nodes[node]
        address = record.workers[index] if record.workers else ""
        return Member(worker, address, record.incarnation, self.workers_per_node)

    def remove_nodes(self, nodes: Iterable[int]) -> None:
        """Forget nodes that have disappeared."""
        for node in nodes:
            self.nodes.pop(node, None)
            self.leave_deadlines.pop(node, None)

    def has_empty_slot(self, epoch: Epoch) -> bool:
        """Whether a wanted slot has no present member."""
        members = (epoch.members[slot] for slot in self.wanted_slots)
        return any(member is None or member.node in self.departed_nodes for member in members)

    def waiting_members(self, epoch: Epoch) -> list[Member]:
        """The workers that could join and have no slot, by number."""
        known = [
            record.node
            for record in self.nodes.values()
            if record.leaves_in_s is None and record.node not in self.departed_nodes
        ]
        idle = self.workers_of(known) - {member.worker for member in epoch.present_members}
        return [self.member_of(worker) for worker in sorted(idle)]

    @property
    def zones(self) -> dict[int, str]:
        """Zone by node, for the nodes that report one."""
        return {record.node: record.zone for record in self.nodes.values() if record.zone}

    def all_are_leaving(self, epoch: Epoch) -> bool:
        """Whether all members have received a notice and no node waits for a slot."""
        staying = {member.node for member in self.present_members(epoch)}
        return bool(self.leave_deadlines) and self.leave_deadlines.keys() >= staying and not self.waiting_members(epoch)

    def fingerprint_difference(self, record: NodeRecord) -> str | None:
        """How a node's numerics fingerprint differs from the others', as a sentence; None: it does not."""
        others = {other.fingerprint for other in self.nodes.values()}
        if others <= {record.fingerprint}:
            return None
        return f"it is {record.fingerprint}, the others {'; '.join(sorted(others))}: exact results need one kind"
