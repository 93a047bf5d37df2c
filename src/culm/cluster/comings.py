"""Comings and goings: nodes join, have notice and vanish. Each is a reason for another epoch, which turnover makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.baselines import more_pipelines
from culm.cluster.probation import Probation
from culm.cluster.regroup import first_epoch, protected, restart
from culm.cluster.relayout import shape_now
from culm.cluster.turnover import whole
from culm.errors import RunError
from culm.observe.posts import seats_of
from culm.plan.seating import seating
from culm.runtime import epoch as letters
from culm.runtime.epoch import Member

if TYPE_CHECKING:
    from culm.cluster.setup import NodeRecord
    from culm.cluster.turnover import Turnover


class Comings:
    """What the leader makes of who is there, who will go and who is gone."""

    def __init__(self, turnover: Turnover) -> None:
        self.turnover, self.tenure = turnover, turnover.tenure
        self._probation = Probation()
        self._aside: dict[int, NodeRecord] = {}
        """Nodes that have to wait until they count as there."""

    async def joined(self, record: NodeRecord) -> None:
        """An agent is up, and then its worker; when all are, the first epoch begins. Later it waits for a slot."""
        tenure, roll = self.tenure, self.tenure.roll
        if record.leaves_in is not None:
            await self._drain(record, record.leaves_in)
            return
        if not record.worker:
            return
        outside = tenure.epoch is not None and tenure.epoch.slot_of(record.node) is None
        differs = roll.differs(record) if tenure.job.exact and outside else None
        if differs is not None:  # those that train are not disturbed
            tenure.event("refused", node=record.node, why=differs)
            return
        seconds = self._probation.left_s(record.host, tenure.clock.now())
        if outside and seconds and not self._works(record.host):
            self._aside[record.node] = record
            why = "nodes of its machine were given up before: it is taken in when others have had time to work"
            tenure.event("on_probation", node=record.node, seconds=seconds, why=why)
            return
        self._take_in(record)
        await self._open_if_complete()

    def _take_in(self, record: NodeRecord) -> None:
        tenure, roll = self.tenure, self.tenure.roll
        roll.nodes[record.node] = record
        tenure.event("node_joined" if not record.life else "worker_renewed", node=record.node)
        self.turnover.note_renewed(record.node)

    def _works(self, host: str) -> bool:
        """Whether somebody of a machine is a member of the epoch: then it is not the machine's connections."""
        epoch, nodes = self.tenure.epoch, self.tenure.roll.nodes
        members = self.tenure.roll.staying(epoch) if epoch is not None else ()
        return any(member.node in nodes and nodes[member.node].host == host for member in members)

    def _let_in(self) -> None:
        """Those who have waited long enough."""
        now = self.tenure.clock.now()
        for node, record in list(self._aside.items()):
            if not self._probation.left_s(record.host, now):
                self._take_in(self._aside.pop(node))

    async def _open_if_complete(self) -> None:
        """The run begins when all nodes are there, but for those that came and had to go again."""
        roll = self.tenure.roll
        if self.tenure.epoch is None and len(roll.nodes) + len(roll.gone) >= self.tenure.setup.nodes:
            if not roll.nodes:
                raise self.tenure.all_left()
            await self._open()
        await self.turnover.proceed()

    async def _open(self) -> None:
        """The first epoch: the first D x P nodes by number fill the slots, so that holders of a layer are in different
        zones where there are any; the last slots may have nobody."""
        tenure, setup, roll = self.tenure, self.tenure.setup, self.tenure.roll
        slots = range(setup.pipelines * setup.stages)
        records = [roll.nodes[node] for node in self._seated(sorted(roll.nodes)[: len(slots)])]
        prints = {record.fingerprint for record in records}
        if tenure.job.exact and len(prints) > 1:
            raise RunError(
                f"nodes differ in what exact results depend on ({'; '.join(sorted(prints))}): "
                "use machines of one kind, or --set exact=false"
            )
        members: list[Member | None] = [tenure.roll.member(record.node) for record in records]
        filled, address = len(members), tenure.transport.address
        members += [None] * (len(slots) - filled)
        first = first_epoch(setup, address, tuple(members), tenure.folder.checkpoints, tenure.timeouts.beat)
        if filled < len(slots):
            first = restart(setup, first, 1, address, slots[:filled], setup.start, setup.resume_from).epoch
        tenure.adopt(first)
        tenure.event("epoch", number=1, **seats_of(first), segments=setup.segments)
        await tenure.publish()
        if setup.keeps:
            tenure.aside(self.turnover.plan_ahead(whole(first), setup.start, None))

    def _seated(self, nodes: Sequence[int]) -> list[int]:
        """Nodes in the order of the slots that they fill."""
        setup, zones = self.tenure.setup, self.tenure.roll.zones
        if len(nodes) < setup.pipelines * setup.stages:
            return list(nodes)
        seats = seating(shape_now(setup), setup.strategy, {node: zones.get(node, "") for node in nodes}, {}, ())
        return [seats[slot] for slot in sorted(seats)]

    async def lose(self, nodes: Sequence[int]) -> None:
        """Nodes are gone for good. What they ran and held, others run and hold from now on."""
        tenure, roll, epoch = self.tenure, self.tenure.roll, self.tenure.epoch
        members = list(nodes) if epoch is None else [member.node for member in epoch.alive]
        mourned = [node for node in nodes if node in members and node not in roll.gone]
        self._strike(nodes)
        halting = self.turnover.halting
        if not mourned:
            if halting is not None and not halting.expected.isdisjoint(nodes):
                self.turnover.halt()  # a node without a post was asked what it has, and will not say
            return
        if not tenure.setup.survives:
            raise tenure.lost(mourned[0])
        for node in mourned:
            tenure.event("lost", node=node, step=tenure.ledger.next_step)
        roll.gone |= set(mourned)
        if epoch is not None:
            tenure.toll.owed |= set(mourned)
        await tenure.write_record()
        if epoch is None:
            await self._open_if_complete()
        else:
            self.turnover.halt(mourned)

    def _strike(self, nodes: Sequence[int]) -> None:
        """They are not there any more. Who was as good as gone is not trusted at once when its machine comes back."""
        tenure, roll = self.tenure, self.tenure.roll
        for node in nodes:
            self._aside.pop(node, None)
            if node in roll.nodes and node in tenure.vigil.condemned:
                self._probation.fell(roll.nodes[node].host, tenure.clock.now(), tenure.timeouts.doubt)
        roll.strike(nodes)

    async def _drain(self, record: NodeRecord, seconds: float) -> None:
        """A node has notice: the others go on without it before it goes. Who leaves when the run ends anyway, stays."""
        tenure, roll, epoch, node = self.tenure, self.tenure.roll, self.tenure.epoch, record.node
        if node in roll.gone or node in roll.leaving:
            return  # it has said so before
        tenure.event("notice", node=node, seconds=seconds)
        if epoch is None or epoch.slot_of(node) is None:  # the run begins, or goes on, without it
            if epoch is None and tenure.setup.strategy == "none":
                raise tenure.lost(node)
            self._strike([node])
            tenure.let_go(record)
            await self._open_if_complete()
            return
        roll.nodes[node] = record
        if not epoch.kept or tenure.finish is not None:
            return
        roll.leaving[node] = tenure.clock.now() + seconds
        if not self._leave_if_all_do() and self.turnover.halting is None:
            self.turnover.halt()

    def _leave_if_all_do(self) -> bool:
        """Everybody has notice, and nobody stands by to go on: end after the steps that are open, with a checkpoint if
        there is a place for it."""
        tenure, epoch = self.tenure, self.tenure.epoch
        if epoch is None or tenure.finish is not None or not tenure.roll.all_leave(epoch):
            return False
        tenure.roll.leaving.clear()
        tenure.end_before(min(tenure.ledger.next_step + 2, tenure.setup.steps))
        tenure.evacuated = tenure.finish != tenure.setup.steps
        return True

    def grow(self) -> None:
        """At a commit: whoever waits comes in, and whoever has caught up takes its place, all in one new epoch. Where
        only a checkpoint can be gone on from: when one is complete, if there are nodes for another pipeline."""
        tenure, roll, epoch = self.tenure, self.tenure.roll, self.tenure.epoch
        if epoch is None or tenure.finish is not None or not self.turnover.calm or tenure.minutes.behind:
            return
        self._let_in()
        if self._leave_if_all_do():  # who stood by, or had no notice, may be gone since
            return
        if not tenure.setup.keeps:
            if more_pipelines(tenure.setup, epoch, len(roll.waiting(epoch))):
                self.turnover.halt()
            return
        draining = self.turnover.growth.intent is not None
        if self.turnover.growth.due or roll.arrived or (not draining and roll.empty(epoch) and roll.waiting(epoch)):
            self.turnover.halt()

    def level(self, message: letters.Level) -> None:
        """A new copy is complete: the layer has two holders again."""
        tenure, epoch = self.tenure, self.tenure.epoch
        if epoch is None or message.epoch != epoch.number:
            return
        shadows = tuple(
            msgspec.structs.replace(shadow, fresh=False)
            if shadow.stage == message.stage and epoch.slot_of(message.node) == shadow.slot
            else shadow
            for shadow in epoch.shadows
        )
        tenure.epoch = epoch = msgspec.structs.replace(epoch, shadows=shadows)
        tenure.toll.risk(not protected(epoch))
        tenure.event("protected", node=message.node, stage=message.stage)
        if tenure.roll.arrive(message.node):  # it takes its place at the next commit, which waits for it already
            tenure.ledger.workers = len(tenure.roll.crew)
        elif self.turnover.halting is None and (
            tenure.roll.leaving or any(each.moves and not each.fresh for each in shadows)
        ):
            self.turnover.halt()  # its copy is complete: it can move, and whoever had to wait for it can go
