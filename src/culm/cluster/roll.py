"""The roll: who is in the run, as its leader knows, and who has to report what in the current epoch."""

from __future__ import annotations

from collections.abc import Iterable

from culm.cluster.setup import NodeRecord
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan


class Roll:
    """Nodes that are there, that have notice and that are gone; of an epoch's members, who works and who follows."""

    def __init__(self) -> None:
        self.nodes: dict[int, NodeRecord] = {}
        self.gone: set[int] = set()
        """Nodes that were lost, or have gone after a notice."""
        self.leaving: dict[int, float] = {}
        """Members that have notice and are still there: when each may vanish."""
        self.posts: set[int] = set()
        """The slots that a worker is wanted for; pipelines of fewer workers than stages have others, too."""
        self.crew: set[int] = set()
        """The nodes that every step waits for: all members but newcomers that are not level yet."""
        self.savers: set[int] = set()
        """The nodes that have a part of every checkpoint."""
        self.arrived: set[int] = set()
        """Newcomers that are level."""
        self.ready: set[int] = set()
        """Those of the epoch that have built what they hold."""

    @property
    def all_ready(self) -> bool:
        return self.crew <= self.ready

    def muster(self, epoch: Epoch, full: Plan) -> None:
        """Who has to report what in an epoch: who runs something, or keeps a copy that counts. `full` is the plan with
        every post filled."""
        plan = Plan.from_text(epoch.plan)
        self.posts = {slot for slot in range(len(full.workers)) if slot not in full.failed}
        level = {shadow.slot for shadow in epoch.shadows if not shadow.fresh}
        members = {slot: member.node for slot, member in enumerate(epoch.members) if member is not None}
        self.savers = {node for slot, node in members.items() if plan.stages_of(slot)}
        self.crew = self.savers | {node for slot, node in members.items() if slot in level}
        self.arrived.clear()
        self.ready.clear()

    def arrive(self, node: int) -> bool:
        """A newcomer is level: from now on every step waits for it, too. False: it was no newcomer."""
        if node in self.crew:
            return False
        self.crew.add(node)
        self.arrived.add(node)
        return True

    def staying(self, epoch: Epoch) -> list[Member]:
        """The members that are not gone."""
        return [member for member in epoch.alive if member.node not in self.gone]

    def member(self, node: int) -> Member:
        """A node that is there, as an epoch has it."""
        record = self.nodes[node]
        return Member(node, record.worker, record.life)

    def strike(self, nodes: Iterable[int]) -> None:
        """Nodes that are not there any more."""
        for node in nodes:
            self.nodes.pop(node, None)
            self.leaving.pop(node, None)

    def empty(self, epoch: Epoch) -> bool:
        """Whether a post has nobody."""
        members = (epoch.members[slot] for slot in self.posts)
        return any(member is None or member.node in self.gone for member in members)

    def waiting(self, epoch: Epoch) -> list[Member]:
        """The nodes that could come in and have no slot, in the order of their numbers."""
        known = [record for record in self.nodes.values() if record.leaves_in is None and record.node not in self.gone]
        idle = [record for record in known if epoch.slot_of(record.node) is None]
        return [self.member(record.node) for record in sorted(idle, key=lambda record: record.node)]

    @property
    def zones(self) -> dict[int, str]:
        """By node that says so: where it is."""
        return {record.node: record.zone for record in self.nodes.values() if record.zone}

    def all_leave(self, epoch: Epoch) -> bool:
        """Whether everybody has notice, and nobody stands by to take a place."""
        staying = {member.node for member in self.staying(epoch)}
        return bool(self.leaving) and self.leaving.keys() >= staying and not self.waiting(epoch)

    def differs(self, record: NodeRecord) -> str | None:
        """How a node computes otherwise than those that are there, in words; None: it does not."""
        others = {other.fingerprint for other in self.nodes.values()}
        if others <= {record.fingerprint}:
            return None
        return f"it is {record.fingerprint}, the others {'; '.join(sorted(others))}: exact results need one kind"
