"""From one epoch to the next: nodes come, have notice and vanish, and the run goes on with those that are there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.baselines import back_to, more_pipelines, rewinds
from culm.cluster.growth import Growth
from culm.cluster.regroup import Regrouped, first_epoch, homeless, protected, regroup, restart, seats, world_of
from culm.cluster.relayout import shape_now
from culm.cluster.toll import Halting, Recovering
from culm.errors import RunError
from culm.plan.layout import ahead
from culm.plan.lineage import Standing
from culm.plan.relayout import seating, written
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.setup import NodeRecord
    from culm.cluster.tenure import Tenure


@dataclass
class Doubt:
    """Somebody missed somebody in an epoch, some time ago."""

    epoch: int
    message: letters.Failed


@dataclass
class Stall:
    """Nothing has moved in an epoch for too long."""

    epoch: int


@dataclass
class Lull:
    """Look again whether the next epoch can begin."""

    epoch: int
    over: bool = True
    """Nodes have been waited for, in place of the lost, for as long as one may."""


class Turnover:
    """Ends epochs and makes new ones. A loss, a notice, a newcomer or a silence begins a halt: everyone who is left
    leaves the epoch and reports; when all have, the next is decided and published."""

    def __init__(
        self, tenure: Tenure, remind: Callable[[Doubt | Stall | Lull], None], relieved: asyncio.Event | None = None
    ) -> None:
        self.tenure, self._remind = tenure, remind
        self.growth = Growth(tenure)
        self.halting: Halting | None = None
        self.recovering: Recovering | None = None
        self.evacuated = False
        """Whether the run ends because every node has notice."""
        self._relieved = relieved or asyncio.Event()
        """Set when the node that leads has nothing more to give and may go."""
        self._beats: dict[int, int] = {}
        self._builders: set[int] = set()
        """Who builds or loads its layers, and will say when it has."""

    # Nodes come, have notice, and vanish.

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
        roll.nodes[record.node] = record
        tenure.event("node_joined" if not record.life else "worker_renewed", node=record.node)
        self._note_renewed(record.node)
        await self._open_if_complete()

    async def _open_if_complete(self) -> None:
        """The run begins when all nodes are there, but for those that came and had to go again."""
        roll = self.tenure.roll
        if self.tenure.epoch is None and len(roll.nodes) + len(roll.gone) >= self.tenure.setup.nodes:
            if not roll.nodes:
                raise self.tenure.all_left()
            await self._open()
        await self._proceed()

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
        tenure.event("epoch", number=1, members=[member.node for member in first.alive], segments=setup.segments)
        await tenure.publish()
        if setup.keeps:
            tenure.aside(self._plan_ahead(_whole(first), setup.start, None))

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
        roll.strike(nodes)
        if not mourned:
            return
        if not tenure.setup.survives:
            raise tenure.lost(mourned[0])
        for node in mourned:
            tenure.event("lost", node=node, step=tenure.ledger.next_step)
        roll.gone |= set(mourned)
        await tenure.write_record()
        if epoch is None:
            await self._open_if_complete()
        else:
            self.halt(mourned)

    async def _drain(self, record: NodeRecord, seconds: float) -> None:
        """A node has notice: the others go on without it before it goes. Who leaves when the run ends anyway, stays."""
        tenure, roll, epoch, node = self.tenure, self.tenure.roll, self.tenure.epoch, record.node
        if node in roll.gone or node in roll.leaving:
            return  # it has said so before
        tenure.event("notice", node=node, seconds=seconds)
        if epoch is None or epoch.slot_of(node) is None:  # the run begins, or goes on, without it
            if epoch is None and tenure.setup.strategy == "none":
                raise tenure.lost(node)
            roll.strike([node])
            self._let_go(record)
            await self._open_if_complete()
            return
        roll.nodes[node] = record
        if not epoch.kept or tenure.finish is not None:
            return
        roll.leaving[node] = tenure.clock.now() + seconds
        if roll.all_leave(epoch):
            self._evacuate()
        elif self.halting is None:
            self.halt()

    def _evacuate(self) -> None:
        """Everybody has notice: end after the steps that are open, with a checkpoint if there is a place for it."""
        tenure = self.tenure
        tenure.roll.leaving.clear()
        tenure.end_before(min(tenure.ledger.next_step + 2, tenure.setup.steps))
        self.evacuated = tenure.finish != tenure.setup.steps

    def inherited(self, message: letters.Inherited) -> None:
        """A worker has all that those with notice had for it. When everyone has, these may go."""
        recovering = self.recovering
        if recovering is None or self.halting is not None or message.epoch != self.tenure.number:
            return
        recovering.heirs.add(message.node)
        if recovering.heirs >= self.tenure.roll.crew:
            self._relieve(recovering)

    def _relieve(self, recovering: Recovering) -> None:
        """Whoever has notice and nothing more to give may go. If it is this node, the books are closed before."""
        epoch, roll = recovering.made.epoch, self.tenure.roll
        nodes = [node for node in roll.leaving if epoch.slot_of(node) in (None, *epoch.leaving)]
        recovering.left |= set(nodes)
        for node in nodes:
            self._let_go(roll.nodes[node])
        if self.tenure.node in nodes and self.recovering is recovering:
            self._made_good(recovering)

    def _let_go(self, record: NodeRecord) -> None:
        tenure = self.tenure
        tenure.roll.leaving.pop(record.node, None)
        tenure.roll.gone.add(record.node)
        tenure.event("left", node=record.node, step=tenure.ledger.next_step)
        if record.node == tenure.node:
            tenure.aside(self._step_down())
        else:
            tenure.transport.post(record.agent, letters.encode(letters.Stop("it has notice and may go")))

    async def _step_down(self) -> None:
        """This node goes: whoever leads next finds all that there is to know in the store."""
        await self.tenure.write_record()
        self._relieved.set()

    def grow(self) -> None:
        """At a commit: whoever waits comes in, and whoever has caught up takes its place, all in one new epoch. Where
        only a checkpoint can be gone on from: when one is complete, if there are nodes for another pipeline."""
        tenure, roll, epoch = self.tenure, self.tenure.roll, self.tenure.epoch
        if epoch is None or tenure.finish is not None or not self.calm:
            return
        if not tenure.setup.keeps:
            if more_pipelines(tenure.setup, epoch, len(roll.waiting(epoch))):
                self.halt()
            return
        draining = self.growth.intent is not None
        if self.growth.due or roll.arrived or (not draining and roll.empty(epoch) and roll.waiting(epoch)):
            self.halt()

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
        elif self.halting is None and (tenure.roll.leaving or any(each.moves and not each.fresh for each in shadows)):
            self.halt()  # its copy is complete: it can move, and whoever had to wait for it can go

    # The epoch is left, and the next is made.

    @property
    def calm(self) -> bool:
        """Whether nothing is being left or made good."""
        return self.halting is None and self.recovering is None

    def halt(self, lost: Sequence[int] = ()) -> None:
        """Let everyone who is left leave the epoch and report. A further loss meanwhile starts this over."""
        tenure, before = self.tenure, self._unfinished()
        assert tenure.epoch is not None
        number = 1 + (before.number if before is not None else tenure.epoch.number)
        gone = {*lost, *(before.lost if before is not None else ())}
        left = {member.node for member in tenure.roll.staying(tenure.epoch)} - gone
        began = before.began if before is not None else tenure.clock.now()
        detect_s = max(before.detect_s if before is not None else 0.0, tenure.toll.took_to_detect(lost))
        committed = before.committed if before is not None else tenure.ledger.next_step
        self.halting = Halting(number, gone, left, began, detect_s, max(committed, tenure.ledger.next_step))
        for node in left:
            self._note_renewed(node)
        self._tell_halt(self.halting)
        if not left:
            raise tenure.lost(min({*gone, *tenure.roll.gone}))
        if self.halting.complete:  # somebody who led before had all of them renewed
            self._remind(Lull(number, over=False))

    def _unfinished(self) -> Halting | None:
        """The halt that is under way, or what is still being made good after one: who was lost then counts on."""
        if self.halting is None and self.recovering is not None:
            return self.recovering.halting
        return self.halting

    def _tell_halt(self, halting: Halting) -> None:
        tenure = self.tenure
        assert tenure.epoch is not None
        halt = letters.encode(letters.Halt(halting.number, tenure.transport.address))
        for member in tenure.epoch.alive:
            if member.node not in halting.expected or member.node in halting.standings:
                continue
            if self._cold(halting):
                renew = letters.encode(letters.Renew(member.life))
                tenure.transport.post(tenure.roll.nodes[member.node].agent, renew)
            else:
                tenure.transport.post(member.address, halt)

    def _cold(self, halting: Halting) -> bool:
        """Whether workers do not leave the epoch but end, and others are started in their place."""
        return self.tenure.setup.renews and rewinds(self.tenure.setup, halting.lost)

    def _note_renewed(self, node: int) -> None:
        """Where all workers are started anew: one that has been stands there with empty hands."""
        halting, epoch, record = self.halting, self.tenure.epoch, self.tenure.roll.nodes.get(node)
        if halting is None or epoch is None or record is None or not self._cold(halting):
            return
        slot = epoch.slot_of(node)
        member = None if slot is None else epoch.members[slot]
        if member is not None and node in halting.expected and record.life > member.life:
            halting.standings[node] = Standing()

    async def report(self, report: letters.Report) -> None:
        """What a worker had when it left the epoch. When all have said so, the next begins."""
        halting = self.halting
        if halting is None or report.epoch < halting.number:
            return
        if report.epoch > halting.number:  # somebody who led before was further: begin above that
            halting.number = report.epoch
            self.halt()
            return
        halting.standings[report.node] = report.standing
        await self._proceed()

    async def _proceed(self) -> None:
        """When all have reported, and nobody more is waited for, the next epoch begins."""
        halting, tenure = self.halting, self.tenure
        if halting is None or not halting.complete:
            return
        seconds = halting.began + tenure.setup.replace_within - tenure.clock.now()
        if halting.waited or seconds <= 0 or not self._short_of_nodes(halting):
            await self._regroup(halting)
        elif not halting.waits:
            halting.waits = True
            tenure.event("waiting", seconds=seconds, why="a restart waits for nodes in place of the lost")
            tenure.aside(self._wait(halting.number, seconds))

    async def _wait(self, number: int, seconds: float) -> None:
        await self.tenure.clock.sleep(seconds)
        self._remind(Lull(number))

    async def waited(self, lull: Lull) -> None:
        """Nobody came in place of the lost: go on with what fits."""
        if self.halting is not None and self.halting.number == lull.epoch:
            self.halting.waited |= lull.over
            await self._proceed()

    def _short_of_nodes(self, halting: Halting) -> bool:
        """Whether a restart had better wait for a node in place of a lost one: as long as slots would stay empty."""
        tenure, epoch = self.tenure, self.tenure.epoch
        assert epoch is not None
        there = len(halting.standings) + len(tenure.roll.waiting(epoch))
        return bool(halting.lost) and rewinds(tenure.setup, halting.lost) and there < len(tenure.roll.posts)

    async def _regroup(self, halting: Halting) -> None:
        """All have reported: decide how the open steps are completed, and who does what from now on."""
        tenure, old = self.tenure, self.tenure.epoch
        assert old is not None
        slots = {member.node: slot for slot, member in enumerate(old.members) if member is not None}
        known = {node: each if each.shaped == old.shaped else Standing() for node, each in halting.standings.items()}
        standings = {slots[node]: standing for node, standing in known.items()}
        committed, ready_made = tenure.ledger.next_step, tenure.plans.hits
        made = await self._decide(halting, old, slots, standings)
        self.halting = None
        before = self.recovering
        self.recovering = Recovering(
            halting,
            tenure.clock.now(),
            made,
            max(0, halting.committed - tenure.ledger.next_step),
            lost={*halting.lost, *(before.lost if before is not None else ())},
            left=before.left if before is not None else set(),
        )
        self._beats.clear()
        self._builders.clear()
        tenure.adopt(made.epoch)
        tenure.toll.risk(not protected(made.epoch))
        tenure.event(
            "epoch",
            number=made.epoch.number,
            members=[member.node for member in made.epoch.alive],
            step=made.epoch.start,
            open_steps=made.epoch.recovery.steps,
            planned_ahead=tenure.plans.hits > ready_made,
            why=made.why,
        )
        if made.epoch.drops_any:
            tenure.event(
                "dropping",
                step=made.epoch.start,
                micro_batches=made.epoch.dropped,
                open_steps=made.epoch.recovery.dropped,
                why="training changes: samples are left out",
            )
        await tenure.publish()
        spared = [node for node in tenure.roll.leaving if made.epoch.slot_of(node) is None]
        for node in spared:
            self._let_go(tenure.roll.nodes[node])  # everyone builds its layers anew: nobody needs anything from it
        if spared:
            self.recovering.left |= set(spared)
            await tenure.write_record()
        if made.epoch.reshapes:
            tenure.aside(self._plan_ahead(_whole(made.epoch), committed, None))
        elif tenure.setup.keeps:
            tenure.aside(self._plan_ahead(standings, committed, old))

    async def _decide(
        self, halting: Halting, old: Epoch, slots: Mapping[int, int], standings: Mapping[int, Standing]
    ) -> Regrouped:
        """The next epoch: with what the survivors hold or, if a layer has no holder left, from a checkpoint."""
        tenure, setup, committed = self.tenure, self.tenure.setup, self.tenure.ledger.next_step
        number, address, zones = halting.number, tenure.transport.address, tenure.roll.zones
        come = seats(setup, old, standings, committed, tenure.roll.waiting(old), zones)
        leaving = [slots[node] for node in tenure.roll.leaving if node in halting.standings]
        stay = standings.keys() - set(leaving) or standings.keys()
        if rewinds(setup, halting.lost):
            there = {slot: tenure.roll.member(node) for node, slot in slots.items() if slot in stay}
            return back_to(setup, old, number, address, there, tenure.roll.waiting(old), *await self._rewound())
        orphans = homeless(setup, standings, committed)
        unbuilt = any(not standings[slot].versions for slot in stay)  # a notice may come before everyone has its layers
        if _nothing_learned(setup.start, halting.standings) and (orphans or unbuilt or not leaving):
            return restart(setup, old, number, address, stay, setup.start, setup.resume_from, come)
        other = self.growth.salvage(halting, old) if orphans else self.growth.remake(halting, old)
        if other is not None:
            return other
        if not orphans:
            made = regroup(
                setup,
                old,
                number,
                address,
                standings,
                committed,
                plans=tenure.plans,
                moving=_moving(old, standings),
                arrivals=come,
                leaving=leaving,
                zones=zones,
                patience=self._patience(halting),
            )
            return self.growth.complete_first(made) if setup.strategy == "templates" and halting.lost else made
        if await tenure.saves.newest(tenure.folder.checkpoints) is None:
            raise tenure.lost(min(halting.lost))
        return restart(setup, old, number, address, stay, *await self._rewound(), come)

    async def _rewound(self) -> tuple[int, str | None]:
        """Back to the newest checkpoint, or to how the run began if there is none: its step, and where it lies. The
        steps since then are taken back in the ledger: they will be run, and counted, again."""
        tenure, setup = self.tenure, self.tenure.setup
        found = await tenure.saves.newest(tenure.folder.checkpoints)
        step, saved = found if found is not None else (setup.start, setup.resume_from)
        before, samples = tenure.ledger.next_step, tenure.ledger.samples
        tenure.ledger.rewind(step)
        tenure.folder.rewind(step)
        if before > step:
            again = {"steps": before - step, "samples": samples - tenure.ledger.samples}
            tenure.event("rewound", step=step, **again, why="these steps are run, and counted, again")
        return step, saved

    def _patience(self, halting: Halting) -> float:
        """How many steps, as they usually are, those with notice can still work: until the first of them vanishes,
        less a fifth, and less what it takes to leave one epoch and begin another."""
        now, pace = self.tenure.clock.now(), self.tenure.toll.pace_s
        if not pace or not self.tenure.roll.leaving:
            return math.inf
        left = min(self.tenure.roll.leaving.values()) - now
        return max(0.0, 0.8 * left - (now - halting.began)) / pace

    async def _plan_ahead(self, standings: Mapping[int, Standing], committed: int, old: Epoch | None) -> None:
        """Plans for whoever may be lost next, one at a time and aside: when it happens they are there."""
        tenure = self.tenure
        made = ahead(world_of(tenure.setup, standings, committed, old, tenure.plans))
        while await tenure.clock.aside(next, made, None) is not None:
            pass

    def all_ready(self) -> None:
        """Everyone of the epoch has built what it holds; where no step was open, that was all there was to do."""
        tenure = self.tenure
        assert tenure.epoch is not None
        if self.recovering is not None:
            self.recovering.ready_at = tenure.clock.now()
            if tenure.epoch.reshapes:
                self._reshaped(self.recovering)
            if not tenure.epoch.recovery.steps and not (self.recovering.again or self.recovering.anew):
                self.recovered(tenure.epoch.start)

    def _reshaped(self, recovering: Recovering) -> None:
        """Everybody has its layers in the new shape."""
        epoch = recovering.made.epoch
        assert epoch.shape is not None
        seconds = self.tenure.toll.reshaped(recovering)
        moved = sum(len(move.layers) for move in epoch.moves)
        self.tenure.event("reshaped", layout=written(epoch.shape.depths), layers=moved, seconds=seconds)

    def recovered(self, step: int) -> None:
        """A step is committed. If it is the last of those that were open, the loss is made good."""
        recovering = self.recovering
        if recovering is None or step < recovering.last:
            return
        self.recovering = None
        self._relieve(recovering)
        self._made_good(recovering)

    def _made_good(self, recovering: Recovering) -> None:
        self.recovering = None
        if recovering.lost or recovering.left:
            self.tenure.event("recovered", **msgspec.to_builtins(self.tenure.toll.recovered(recovering)))

    # Silence.

    def suspect(self, message: letters.Failed) -> None:
        """A worker misses another one. Who is gone the store knows, in a moment. If nobody is, a connection broke:
        what was lost with it is sent again in a new epoch or, where nothing is kept, the run ends."""
        tenure, number = self.tenure, self.tenure.number
        tenure.event("suspected", node=message.node, why=message.message)
        tenure.toll.sign()

        async def believe() -> None:
            await tenure.clock.sleep(tenure.timeouts.doubt)
            self._remind(Doubt(number, message))

        tenure.aside(believe())

    def resolve(self, doubt: Doubt) -> None:
        if self.tenure.number == doubt.epoch and self.halting is None:
            self.halt()

    def beat(self, beat: letters.Beat) -> None:
        if beat.epoch == self.tenure.number:
            self._beats[beat.node] = beat.done
            (self._builders.add if beat.builds else self._builders.discard)(beat.node)

    async def watch_progress(self) -> None:
        """Nothing moves any more, nobody is gone and nobody builds: something got lost on the way. Then all is sent
        again."""
        tenure, seen = self.tenure, None
        while True:
            await tenure.clock.sleep(tenure.timeouts.progress + 5 * tenure.vigil.slowest_s)
            counts = (tenure.ledger.next_step, len(tenure.roll.ready), len(tenure.finals), len(tenure.saves))
            mark = (tenure.number, self.halting, dict(self._beats), counts)
            if mark == seen and not self._builders:
                self._remind(Stall(tenure.number))
            seen = mark

    def wake(self, stall: Stall) -> None:
        tenure = self.tenure
        if tenure.epoch is None or stall.epoch != tenure.number:
            return
        if self.halting is not None:
            self._tell_halt(self.halting)
        elif not self._waits_for_permission():
            why = "nothing moves and nobody is gone: all is sent again"
            tenure.event("stalled", step=tenure.ledger.next_step, why=why)
            self.halt()

    def _waits_for_permission(self) -> bool:
        """Whether it is the user's turn: a hook or a launcher has to let the next step begin."""
        tenure = self.tenure
        return tenure.roll.all_ready and tenure.finish is None and tenure.permitted <= tenure.ledger.next_step


def _whole(epoch: Epoch) -> dict[int, Standing]:
    """What everybody of an epoch has that begins with a new shape."""
    plan = Plan.from_text(epoch.plan)
    slots = [slot for slot, member in enumerate(epoch.members) if member is not None]
    return {slot: Standing(versions=dict.fromkeys(plan.stages_of(slot), epoch.start)) for slot in slots}


def _moving(epoch: Epoch, standings: Mapping[int, Standing]) -> list[int]:
    """The slots whose workers have a complete copy of the stage that they are to move to."""
    ready = [shadow for shadow in epoch.shadows if shadow.moves and not shadow.fresh]
    return [shadow.slot for shadow in ready if shadow.stage in standings.get(shadow.slot, Standing()).versions]


def _nothing_learned(start: int, standings: Mapping[int, Standing]) -> bool:
    """Whether no weight has moved since the run began: then anybody can build any layer, as it was."""
    versions = [version for standing in standings.values() for version in standing.versions.values()]
    return max(versions, default=start) == start
