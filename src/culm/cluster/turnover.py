"""From one epoch to the next: all leave it and say what they have, and the run goes on with those that are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.baselines import back_to, rewinds
from culm.cluster.growth import Growth
from culm.cluster.regroup import Regrouped, homeless, protected, regroup, restart, seats, world_of
from culm.cluster.toll import Halting, Recovering
from culm.observe.posts import seats_of
from culm.plan.layout import ahead
from culm.plan.lineage import Standing
from culm.plan.relayout import written
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.tenure import Tenure


@dataclass
class Lull:
    """Look again whether the next epoch can begin."""

    epoch: int
    over: bool = True
    """Nodes have been waited for, in place of the lost, for as long as one may."""


class Turnover:
    """Ends epochs and makes new ones. A loss, a notice, a newcomer or a silence begins a halt: everyone who is left
    leaves the epoch and reports; when all have, the next is decided and published."""

    def __init__(self, tenure: Tenure, remind: Callable[[Lull], None]) -> None:
        self.tenure, self._remind = tenure, remind
        self.growth = Growth(tenure)
        self.halting: Halting | None = None
        self.recovering: Recovering | None = None

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
        left = {member.node for member in (*tenure.roll.staying(tenure.epoch), *self._spare)} - gone
        # A loss during a halt that had other reasons: until now nobody knew what was wrong.
        known = before if before is not None and (before.lost or not lost) else None
        began = known.began if known is not None else tenure.clock.now()
        detect_s = max(known.detect_s if known is not None else 0.0, tenure.toll.took_to_detect(lost))
        committed = before.committed if before is not None else tenure.ledger.next_step
        self.halting = Halting(number, gone, left, began, detect_s, max(committed, tenure.ledger.next_step))
        for node in left:
            self.note_renewed(node)
        self.tell_halt(self.halting)
        if not left:
            raise tenure.lost(min({*gone, *tenure.roll.gone}))
        if self.halting.complete:  # somebody who led before had all of them renewed
            self._remind(Lull(number, over=False))

    @property
    def _spare(self) -> list[Member]:
        """Nodes for which a new shape has no post. Until its first commit they have what may be lost on the way."""
        epoch = self.tenure.epoch
        if epoch is None or not epoch.reshapes or self.tenure.ledger.next_step > epoch.start:
            return []
        return self.tenure.roll.waiting(epoch)

    def _unfinished(self) -> Halting | None:
        """The halt that is under way, or what is still being made good after one: who was lost then counts on."""
        if self.halting is None and self.recovering is not None:
            return self.recovering.halting
        return self.halting

    def tell_halt(self, halting: Halting) -> None:
        """Whoever has not answered hears it again."""
        tenure = self.tenure
        assert tenure.epoch is not None
        halt = letters.encode(letters.Halt(halting.number, tenure.transport.address))
        for member in (*tenure.epoch.alive, *self._spare):
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

    def note_renewed(self, node: int) -> None:
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
        if report.record:
            self.tenure.learn(report.record)
        if halting is None or report.epoch < halting.number:
            return
        if report.epoch > halting.number:  # somebody who led before was further: begin above that
            halting.number = report.epoch
            self.halt()
            return
        halting.standings[report.node] = report.standing
        await self.proceed()

    async def proceed(self) -> None:
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
            await self.proceed()

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
        tenure.settle()
        slots = {member.node: slot for slot, member in enumerate(old.members) if member is not None}
        known = {node: each if each.shaped == old.shaped else Standing() for node, each in halting.standings.items()}
        standings = {slots[node]: standing for node, standing in known.items() if node in slots}
        committed, ready_made = tenure.ledger.next_step, tenure.plans.hits
        made = self._owing(await self._decide(halting, old, slots, standings))
        self.halting = None
        self.recovering = Recovering(
            halting,
            tenure.clock.now(),
            made,
            max(0, halting.committed - tenure.ledger.next_step),
            lost=set(tenure.toll.owed),
            left=self.recovering.left if self.recovering is not None else set(),
        )
        tenure.adopt(made.epoch)
        tenure.toll.risk(not protected(made.epoch))
        tenure.event(
            "epoch",
            number=made.epoch.number,
            **seats_of(made.epoch),
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
            tenure.let_go(tenure.roll.nodes[node])  # everyone builds its layers anew: nobody needs anything from it
        if spared:
            self.recovering.left |= set(spared)
            await tenure.write_record()
        if made.epoch.reshapes:
            tenure.aside(self.plan_ahead(whole(made.epoch), committed, None))
        elif tenure.setup.keeps:
            tenure.aside(self.plan_ahead(standings, committed, old))

    def _owing(self, made: Regrouped) -> Regrouped:
        """With the checkpoint that was due and came to nothing; or with one out of turn, where all that have the layers
        are about to go."""
        tenure, members = self.tenure, {member.node for member in made.epoch.alive}
        parting = tenure.folder.out is not None and members <= tenure.roll.leaving.keys()
        owes = tenure.saves.owed(made.epoch, tenure.roll.gone) or parting
        return replace(made, epoch=msgspec.structs.replace(made.epoch, owes=owes))

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
        if _nothing_learned(setup.start, halting.standings) and (orphans or unbuilt):
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
            raise tenure.lost(min({*halting.lost, *tenure.roll.gone}))
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
        if step >= setup.steps:  # whoever led before had all of it, and could not say so any more
            tenure.finish = step
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

    async def plan_ahead(self, standings: Mapping[int, Standing], committed: int, old: Epoch | None) -> None:
        """Plans for whoever may be lost next, one at a time and aside: when it happens they are there. They only save
        time then: what goes wrong here is an event, and the run goes on."""
        tenure = self.tenure
        try:
            made = ahead(world_of(tenure.setup, standings, committed, old, tenure.plans))
            while await tenure.clock.aside(next, made, None) is not None:
                pass
        except Exception as error:
            tenure.event("unplanned", why=f"no plans are made ahead: {type(error).__name__}: {error}")

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
            self.tenure.let_go(roll.nodes[node])
        if self.tenure.node in nodes and self.recovering is recovering:
            self._made_good(recovering)

    def _made_good(self, recovering: Recovering) -> None:
        self.recovering = None
        if recovering.lost or recovering.left:
            self.tenure.event("recovered", **msgspec.to_builtins(self.tenure.toll.recovered(recovering)))
        self.tenure.toll.resumed()


def whole(epoch: Epoch) -> dict[int, Standing]:
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
