"""From what survivors report to the epoch they go on under. Pure: no clock, no store; the leader carries it out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from culm.cluster.setup import Setup
from culm.plan.ahead import Plans
from culm.plan.layout import Layout, World, arrange_around, first_layout, orphaned, vacant
from culm.plan.lineage import Standing
from culm.plan.place import Floor, place, whole_step
from culm.plan.recover import Recovery, Scene, recover
from culm.runtime.epoch import Epoch, Member, Shadow
from culm.schedule import UNIT, Costs, Kind, Plan
from culm.schedule.timing import timing

NOBODY: Mapping[int, Member] = {}
NOWHERE: Mapping[int, str] = {}
"""Nodes that do not say what zone they are in."""
_HOW = {
    "peers": "peers run its micro-batches",
    "shadow": "who kept a copy of its layers stands in",
    "drop": "its pipeline rests and the samples of that are dropped until it is whole again, which changes training",
}


@dataclass(frozen=True)
class Regrouped:
    """The next epoch, and what to say about it."""

    epoch: Epoch
    layout: Layout
    why: str
    source: str
    """Where the layers of the lost are now: peers, shadow, or a checkpoint."""


def first_shadows(setup: Setup) -> tuple[Shadow, ...]:
    """The copies that the strategy keeps from the first step on: every worker builds its own."""
    plan = Plan.from_text(setup.plan)
    return tuple(Shadow(r.stage, r.slot, r.source) for r in first_layout(plan, setup.strategy))


def first_epoch(
    setup: Setup, leader: str, members: tuple[Member | None, ...], storage: str | None, beat_s: float
) -> Epoch:
    """What everyone trains under until something happens."""
    return Epoch(
        number=1,
        leader=leader,
        members=members,
        segments=setup.segments,
        plan=setup.plan,
        evaluation=setup.evaluation,
        start=setup.start,
        steps=setup.steps,
        weighted=setup.weighted,
        checkpoint_every=setup.checkpoint_every,
        storage=storage,
        resume=setup.resume,
        resume_from=setup.resume_from,
        kept=setup.keeps,
        shadows=first_shadows(setup),
        eager=setup.eager,
        beat_s=beat_s if setup.survives else 0.0,
        committed=setup.start,
    )


def homeless(setup: Setup, standings: Mapping[int, Standing], committed: int) -> list[int]:
    """The stages that no survivor has a current copy of: only a checkpoint can bring them back."""
    return orphaned(world_of(setup, standings, committed, None, None))


def restart(
    setup: Setup,
    old: Epoch,
    number: int,
    leader: str,
    left: Collection[int],
    step: int,
    saved: str | None,
    arrivals: Mapping[int, Member] = NOBODY,
) -> Regrouped:
    """The epoch in which the workers of the slots that are left, and newcomers, build everything anew: from a
    checkpoint, or as the run began. A stage that has lost all its own goes to whoever has least."""
    full = Plan.from_text(setup.plan)
    left = {*left, *arrivals}
    held = {slot: set(full.stages_of(slot)) for slot in left}
    for shadow in first_shadows(setup):
        if shadow.slot in held:
            held[shadow.slot].add(shadow.stage)
    for stage in range(full.stages):
        if not any(stage in stages for stages in held.values()):
            held[min(held, key=lambda slot: (len(held[slot]), slot))].add(stage)
    world = World(
        plan=full,
        strategy=setup.strategy,
        held={slot: frozenset(stages) for slot, stages in held.items()},
        costs=_costs(setup),
        joint=setup.joint,
        memory=setup.activations,
    )
    layout = arrange_around(world)
    members = _members(old, left, arrivals)
    epoch = msgspec.structs.replace(
        old,
        number=number,
        leader=leader,
        members=members,
        plan=layout.plan.to_text(),
        evaluation=evaluation_around(setup.evaluation, layout),
        start=step,
        committed=step,
        reset=True,
        resume=None if saved is None else step,
        resume_from=saved,
        shadows=tuple(Shadow(r.stage, r.slot, r.source) for r in layout.replicas if not r.fresh),
        dropped=layout.dropped,
        leaving=(),
        recovery=Recovery(),
        moves=(),
        until=None,
    )
    whence = "as it began" if saved is None else f"from the checkpoint after step {step}"
    return Regrouped(epoch, layout, f"layers have no holder left: everyone goes on {whence}", "checkpoint")


def regroup(
    setup: Setup,
    old: Epoch,
    number: int,
    leader: str,
    standings: Mapping[int, Standing],
    committed: int,
    *,
    plans: Plans | None = None,
    moving: Collection[int] = (),
    arrivals: Mapping[int, Member] = NOBODY,
    leaving: Collection[int] = (),
    zones: Mapping[int, str] = NOWHERE,
    patience: float = math.inf,
) -> Regrouped:
    """The epoch in which the survivors, by slot, complete the open steps and then go on. Every stage has a holder.

    Workers in `moving` have a copy of another stage by now: they complete what is open where they were, and then leave
    their own stage for that one, unless nobody else has it any more. Who arrives gets a copy of a stage that misses a
    worker, to run it when level. Who is leaving ends what it has begun, so far as its patience (in steps) allows, and
    hands over what it has; it stays on only where others would lack a stage.
    """
    standings = {**standings, **{slot: Standing() for slot in arrivals}}
    members = _members(old, standings, arrivals)
    world = replace(world_of(setup, standings, committed, old, plans), zones=_by_slot(members, zones))
    moving = _movable(world, moving, leaving)
    going = _dispensable(_left(world, moving), leaving)
    world = _without(world, going, leaving)
    now = arrange_around(world)
    layout = arrange_around(_left(world, moving)) if moving else now
    full = world.plan
    scene = Scene(
        stages=full.stages,
        segments=full.segments,
        slots=len(full.workers),
        micro_batches=full.micro_batches,
        runners=now.runners,
        first=committed,
        split=layout.plan.halved,
        joint=setup.joint,
        costs=world.costs,
        home=now.home,
        leaving=going,
        patience=patience * timing(full, world.costs).makespan if going else math.inf,
        dropped=left_out(old, standings, committed, now.dropped),
    )
    kept = {slot: _pruned(slot, standing, (now, layout)) for slot, standing in standings.items()}
    recovery = recover(scene, kept)
    epoch = msgspec.structs.replace(
        old,
        number=number,
        leader=leader,
        members=members,
        plan=layout.plan.to_text(),
        evaluation=evaluation_around(setup.evaluation, layout),
        start=committed + len(recovery.steps),
        committed=committed,
        reset=False,
        resume=None,
        resume_from=None,
        shadows=tuple(Shadow(r.stage, r.slot, r.source, r.fresh, r.moves) for r in layout.replicas),
        dropped=layout.dropped,
        leaving=tuple(going),
        recovery=recovery,
        moves=(),
        until=None,
    )
    return Regrouped(epoch, layout, _why(old, members, layout, going), layout.source)


def left_out(
    old: Epoch, standings: Mapping[int, Standing], committed: int, dropped: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """By open step: the micro-batches that are left out of it. A step of which nothing is added up yet drops what the
    next epoch does. In any other some layer may have stepped with all that it was begun with, and so must the rest."""
    summed = {step for standing in standings.values() for step, _ in standing.sums}
    newest = max((v for standing in standings.values() for v in standing.versions.values()), default=committed)
    open_steps = range(committed, newest + 1)
    return {step: old.drops(step) if step in summed or step < newest else dropped for step in open_steps}


def seats(
    setup: Setup,
    old: Epoch,
    standings: Mapping[int, Standing],
    committed: int,
    waiting: Sequence[Member],
    zones: Mapping[int, str] = NOWHERE,
) -> dict[int, Member]:
    """By slot: who of those that wait comes in. First where nobody runs the stage of the slot in its place, and of
    those where the stage has the fewest holders; whose zone has the fewest holders of it, takes it. More nodes than
    slots: the rest goes on waiting."""
    world = world_of(setup, standings, committed, old, None)
    wanted = vacant(world)
    holders = Counter(stage for held in world.held.values() for stage in held)
    empty = [slot for slot in sorted(set(world.posts)) if slot not in standings]
    empty.sort(key=lambda slot: (slot not in wanted, holders[slot % setup.stages], slot))
    where = _by_slot(old.members, zones)
    left, found = list(waiting), {}
    for slot in empty[: len(left)]:
        beside = [other for other, held in world.held.items() if slot % setup.stages in held]
        near = Counter(where.get(other, "") for other in beside)
        found[slot] = min(left, key=lambda member: near[zones.get(member.node, "")])
        left.remove(found[slot])
    return found


def _by_slot(members: Sequence[Member | None], zones: Mapping[int, str]) -> dict[int, str]:
    """By slot: the zone of its node, where it has one."""
    return {slot: zones[m.node] for slot, m in enumerate(members) if m is not None and zones.get(m.node)}


def protected(epoch: Epoch) -> bool:
    """Whether every stage has two holders."""
    plan = Plan.from_text(epoch.plan)
    level = [(shadow.stage, shadow.slot) for shadow in epoch.shadows if not shadow.fresh]
    holders = [{*plan.holders_of(stage), *(slot for at, slot in level if at == stage)} for stage in range(plan.stages)]
    return all(len(each) > 1 for each in holders)


def _members(old: Epoch, left: Collection[int], arrivals: Mapping[int, Member]) -> tuple[Member | None, ...]:
    stay = (member if slot in left else None for slot, member in enumerate(old.members))
    return tuple(arrivals.get(slot, member) for slot, member in enumerate(stay))


def world_of(
    setup: Setup, standings: Mapping[int, Standing], committed: int, old: Epoch | None, plans: Plans | None
) -> World:
    """What is left, in the words of the planner."""
    return World(
        plan=Plan.from_text(setup.plan),
        strategy=setup.strategy,
        held=_held(standings, committed),
        running=None if old is None else Plan.from_text(old.plan),
        costs=_costs(setup),
        joint=setup.joint,
        memory=setup.activations,
        plans=plans or Plans(),
    )


def _left(world: World, moving: Collection[int]) -> World:
    """The world after some workers have left their own stage."""
    stages = world.plan.stages
    held = {
        slot: stage_set - {slot % stages} if slot in moving else stage_set for slot, stage_set in world.held.items()
    }
    return replace(world, held=held)


def _movable(world: World, moving: Collection[int], leaving: Collection[int]) -> list[int]:
    """Who of those that are to move can leave its own stage: one that stays has it, too."""
    staying = _without(world, leaving, leaving)
    found: list[int] = []
    for slot in sorted(moving):
        if orphaned(_left(staying, [*found, slot])) == orphaned(staying):
            found.append(slot)
    return found


def _dispensable(world: World, leaving: Collection[int]) -> list[int]:
    """Who of those that want to leave can go: whoever has the only copy of a stage has to stay a while."""
    going: list[int] = []
    for slot in sorted(leaving):
        if not orphaned(_without(world, [*going, slot], leaving)):
            going.append(slot)
    return going


def _without(world: World, going: Collection[int], leaving: Collection[int]) -> World:
    """The world after some workers have gone; others that want to can not yet."""
    held = {slot: stages for slot, stages in world.held.items() if slot not in going}
    return replace(world, held=held, leaving=frozenset(leaving) - set(going))


def _held(standings: Mapping[int, Standing], committed: int) -> dict[int, frozenset[int]]:
    """Who holds what. A copy that is behind what is committed can not catch up any more: its sums are gone. One that
    was made after a step that is still open could not run anything of it again."""
    return {
        slot: frozenset(
            stage
            for stage, version in standing.versions.items()
            if version >= committed >= standing.since.get(stage, committed)
        )
        for slot, standing in standings.items()
    }


def _pruned(slot: int, standing: Standing, layouts: Collection[Layout]) -> Standing:
    """Only copies that are kept, or needed until the open steps are complete, have steps to end."""
    kept: set[int] = set()
    for layout in layouts:
        kept |= {stage for stage, runners in layout.runners.items() if slot in runners}
        kept |= {replica.stage for replica in layout.replicas if replica.slot == slot and not replica.fresh}
    versions = {stage: version for stage, version in standing.versions.items() if stage in kept}
    return msgspec.structs.replace(standing, versions=versions)


def _costs(setup: Setup) -> Costs:
    if not setup.costs:
        return UNIT
    forward, inputs, weight = zip(*setup.costs, strict=True)
    return Costs(forward=forward, input=inputs, weight=weight)


def evaluation_around(evaluation: str | None, layout: Layout) -> str | None:
    """The F-only plan of an evaluation around the holes."""
    if evaluation is None or not (layout.plan.failed or layout.plan.held):
        return evaluation
    full = Plan.from_text(evaluation)
    floor = Floor(
        stages=full.stages, segments=full.segments, workers=len(layout.plan.workers), runners=layout.runners, ahead=None
    )
    lots = [lot._replace(kinds=(Kind.F,)) for lot in whole_step(full.segments, full.micro_batches, split=True)]
    rows = tuple(tuple(task.action for task in row) for row in place(lots, floor).lists)
    plan = layout.plan
    shape = (plan.pipelines, plan.stages, plan.segments, max(full.micro_batches, plan.pipelines))
    return Plan("evaluation", *shape, rows, plan.failed, plan.held).to_text()


def _why(old: Epoch, members: tuple[Member | None, ...], layout: Layout, going: Collection[int]) -> str:
    gone = [m.node for m, left in zip(old.members, members, strict=True) if m is not None and left is None]
    before = dict(Plan.from_text(old.plan).held)
    moved = [f"slot {slot} runs stage {stages[0]}" for slot, stages in layout.plan.held if before.get(slot) != stages]
    come = [*_go(members, going), *_come(old, members, layout)]
    if not gone and come:
        return "; ".join(come)
    if not gone and moved:
        return f"{', '.join(moved)} from now on: a hole hurts less where it was"
    if not gone:
        return "nobody is lost: what was on its way is sent again"
    nodes = f"node {gone[0]} is" if len(gone) == 1 else f"nodes {', '.join(map(str, gone))} are"
    how = _HOW[layout.source]
    fresh = [
        f"stage {r.stage} to slot {r.slot}"
        for r in layout.replicas
        if r.fresh and not r.moves and layout.plan.stages_of(r.slot)
    ]
    copies = f"; a new copy of {', '.join(fresh)} is made, as one holder would be left" if fresh else ""
    leaving = [f"slot {r.slot} to stage {r.stage}" for r in layout.replicas if r.moves]
    moves = f"; {', '.join(leaving)} will move, as a hole hurts less where it is" if leaving else ""
    return "; ".join([f"{nodes} gone: {how}{copies}{moves}", *come])


def _go(members: tuple[Member | None, ...], going: Collection[int]) -> list[str]:
    nodes = [member.node for slot, member in enumerate(members) if member is not None and slot in going]
    return [f"node {node} has notice: it ends what it has begun, hands over what it has, and goes" for node in nodes]


def _come(old: Epoch, members: tuple[Member | None, ...], layout: Layout) -> list[str]:
    """What there is to say of nodes that join, and of those that have caught up."""
    before, told = Plan.from_text(old.plan), []
    for slot, member in enumerate(members):
        stages = layout.plan.stages_of(slot)
        if member is None:
            continue
        if stages and old.slot_of(member.node) is not None and not before.stages_of(slot):
            told.append(f"node {member.node} has caught up and runs stage {stages[0]}")
        elif not stages and old.slot_of(member.node) is None:
            copies = [str(replica.stage) for replica in layout.replicas if replica.slot == slot]
            told.append(f"node {member.node} joins: it follows stage {' and '.join(copies)} until it is level")
    return told
