"""Who runs, and who shadows, each stage when slots are empty: the strategies as one pure function. Pure.

Peers of a lost worker can run its micro-batches (`reroute`), or the worker that shadowed it stands in (`shadow`).
Where the preferred way is closed, any other holder will do. Only a stage that nobody holds has no answer.
"""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from culm.errors import ScheduleError
from culm.plan.ahead import Plans
from culm.plan.failures import Case, Memory, Slot
from culm.plan.greedy import Rerouted
from culm.plan.place import Floor, place, whole_step
from culm.schedule import UNIT, Action, Costs, Kind, Plan
from culm.schedule.action import RELEASE
from culm.schedule.walk import walk

SHADOWING = ("shadow", "shadow-lazy")
"""Strategies in which the predecessor of a lost worker stands in for it."""
_HEEDLESS = ("none", "checkpoint", "drop", "migrate")
"""Strategies that do nothing ahead of a loss: a stage may have one holder alone, unless that one is about to go."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What is left, and what is wanted."""

    plan: Plan
    """The plan of the run with every slot filled."""
    strategy: str
    held: Mapping[int, frozenset[int]]
    """By slot that is filled: the stages whose state is there, complete."""
    running: Plan | None = None
    """The plan until now: who stands in for somebody goes on doing so."""
    costs: Costs = UNIT
    joint: bool = False
    memory: Memory = None
    leaving: frozenset[int] = frozenset()
    """Slots whose workers are about to go, and can not be done without yet."""
    plans: Plans = field(default_factory=Plans)
    """Plans that were made before, some of them ahead of the loss."""
    zones: Mapping[int, str] = field(default_factory=dict)
    """By slot that is filled: where its node is, if it says so."""

    @cached_property
    def posts(self) -> tuple[int, ...]:
        """By (pipeline, stage), numbered like slots: the slot whose worker runs it when nobody is missing. In pipelines
        of fewer workers than stages a worker has several."""
        full = self.plan
        every = range(len(full.workers))
        if not full.held:
            return tuple(every)
        own = {(slot // full.stages, stage): slot for slot in every for stage in full.stages_of(slot)}
        return tuple(own[divmod(slot, full.stages)] for slot in every)


@dataclass(frozen=True)
class Replica:
    """A copy of a stage on a worker that does not run it, and who sends the sums for it."""

    stage: int
    slot: int
    source: int
    fresh: bool = False
    moves: bool = False
    """Once the copy is complete the worker leaves its own stage for this one: a hole hurts less there."""


@dataclass(frozen=True)
class Layout:
    """The answer: the plan from now on, and the copies beside it."""

    plan: Plan
    runners: Mapping[int, tuple[int, ...]]
    """By stage."""
    replicas: tuple[Replica, ...]
    home: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (segment, micro-batch): who runs it; what has none is shared by the runners."""
    source: str = "peers"
    """Where the lost layers are now: peers, or shadow; drop: nobody runs what they ran."""
    dropped: tuple[int, ...] = ()
    """Micro-batches that nobody runs."""


def orphaned(world: World) -> list[int]:
    """The stages that nobody holds."""
    found = {stage for held in world.held.values() for stage in held}
    return [stage for stage in range(world.plan.stages) if stage not in found]


def arrange_around(world: World) -> Layout:
    """Fill the holes, or leave them. Every stage has a holder (see `orphaned`)."""
    whole = _whole(world) if world.strategy == "drop" else []
    return _leave_out(world, whole) if whole else _filled(world)


def _whole(world: World) -> list[int]:
    """The pipelines that miss nobody."""
    D, P = world.plan.pipelines, world.plan.stages
    return [d for d in range(D) if all(_own(world, slot) for slot in range(d * P, (d + 1) * P))]


def _leave_out(world: World, whole: Collection[int]) -> Layout:
    """Whole pipelines alone go on, each with its own micro-batches. Those of the others are dropped, and their workers
    only follow, until somebody has taken the empty place."""
    full, P = world.plan, world.plan.stages
    resting = tuple(slot for slot in range(len(full.workers)) if slot // P not in whole)
    rows = tuple(() if slot in resting else row for slot, row in enumerate(full.workers))
    runners = {stage: tuple(d * P + stage for d in whole) for stage in range(P)}
    shares = full.by_pipeline
    home = {(g, m): d * P + g % P for d in whole for m in shares[d] for g in range(full.segments)}
    copies = (*_replicas(world, runners), *_fresh(world, runners, _arrivals(world, runners)))
    dropped = tuple(micro for d, share in enumerate(shares) for micro in share if d not in whole)
    return Layout(replace(full, workers=rows, failed=resting), runners, copies, home, "drop", dropped)


def _fresh(world: World, runners: Mapping[int, tuple[int, ...]], wanted: Iterable[tuple[int, int]]) -> list[Replica]:
    """Copies for newcomers, (worker, stage), to be made."""
    return [Replica(stage, worker, _source(world, runners[stage], worker), fresh=True) for worker, stage in wanted]


def _filled(world: World) -> Layout:
    """Every micro-batch is run by somebody."""
    stand_ins = _stand_ins(world)
    runners = {stage: _runners(world, stage, stand_ins) for stage in range(world.plan.stages)}
    plan = _plan(world, runners, stand_ins)
    home = _home(world, stand_ins)
    replicas = _replicas(world, runners)
    known = {(replica.slot, replica.stage) for replica in replicas}
    more = [
        Replica(stage, worker, _source(world, runners[stage], worker), fresh=True, moves=moves)
        for found, moves in ((_arrivals(world, runners), False), (_moves(world, stand_ins), True))
        for worker, stage in found
        if (worker, stage) not in known
    ]
    return Layout(plan, runners, (*replicas, *more), home, "shadow" if stand_ins else "peers")


def _home(world: World, stand_ins: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """By (segment, micro-batch): the worker of its pipeline, or who stands in; peers share the others."""
    full = world.plan
    home: dict[tuple[int, int], int] = {}
    for pipeline, micros in enumerate(full.by_pipeline):
        for segment in range(full.segments):
            slot = pipeline * full.stages + segment % full.stages
            worker = world.posts[slot] if _own(world, slot) else stand_ins.get(slot)
            home |= {(segment, micro): worker for micro in micros} if worker is not None else {}
    return home


def first_layout(plan: Plan, strategy: str) -> tuple[Replica, ...]:
    """The copies that a strategy keeps from the beginning: of each worker's successor, and of the first by the last."""
    if strategy not in SHADOWING or plan.stages < 2:
        return ()
    found = []
    for first in range(0, len(plan.workers), plan.stages):
        chain = [slot for slot in range(first, first + plan.stages) if slot not in plan.failed]
        for slot, after in zip(chain, [*chain[1:], chain[0]], strict=True):
            found += [Replica(stage, slot, after) for stage in plan.stages_of(after) if after != slot]
    return tuple(found)


def _own(world: World, slot: int) -> bool:
    """Whether the worker of a slot is there and has its own stage."""
    return slot % world.plan.stages in world.held.get(world.posts[slot], ())


def _moved(world: World) -> dict[int, int]:
    """By empty slot: the worker that has left its own stage to fill it."""
    P = world.plan.stages
    found: dict[int, int] = {}
    for worker, held in sorted(world.held.items()):
        if world.running is None or _has_some(world, worker):
            continue
        empty = [slot for slot in range(len(world.plan.workers)) if slot % P in held and not _own(world, slot)]
        chosen = next((slot for slot in empty if slot not in found), None)
        if chosen is not None:
            found[chosen] = worker
    return found


def vacant(world: World) -> list[int]:
    """The slots that nobody is there for, neither the worker of the slot nor one that has moved."""
    moved = _moved(world)
    return [slot for slot in range(len(world.plan.workers)) if not _own(world, slot) and slot not in moved]


def newcomers(world: World) -> list[int]:
    """The slots of workers that are there and hold nothing yet."""
    return [slot for slot, held in sorted(world.held.items()) if not held]


def _arrivals(world: World, runners: Mapping[int, tuple[int, ...]]) -> list[tuple[int, int]]:
    """(worker, stage): the copies that newcomers get, to run once they have caught up: of the stage of their own slot
    or, if somebody has moved there, of the one that has the fewest runners."""
    free, found = vacant(world), []
    for worker in newcomers(world):
        slot = min(free, key=lambda slot: (slot != worker, len(runners[slot % world.plan.stages]), slot))
        theirs = [other for other in free if world.posts[other] == world.posts[slot]]
        free = [other for other in free if other not in theirs]
        found += [(worker, other % world.plan.stages) for other in theirs]
    some = [slot for slot in free if _has_some(world, world.posts[slot])]  # who has some of its stages gets the others
    return found + [(world.posts[slot], slot % world.plan.stages) for slot in some]


def _has_some(world: World, worker: int) -> bool:
    return not world.held.get(worker, frozenset()).isdisjoint(world.plan.stages_of(worker))


def _stand_ins(world: World) -> dict[int, int]:
    """By empty slot: the worker that stands in for it, where one has to or the strategy wants it so."""
    P = world.plan.stages
    found = _moved(world)
    load: Counter[int] = Counter(found.values())
    for slot in range(len(world.plan.workers)):
        stage = slot % P
        if _own(world, slot) or slot in found:
            continue
        peers = any(_own(world, peer) for peer in range(stage, len(world.plan.workers), P))
        if world.strategy not in SHADOWING and peers:
            continue
        taken = {worker for full, worker in found.items() if full % P == stage}
        posted = world.posts[stage::P]
        able = [w for w, held in world.held.items() if stage in held and w not in posted and w not in taken]
        if able:
            found[slot] = min(able, key=lambda other: (_stranger(world, slot, other), load[other], other))
            load[found[slot]] += 1
    return found


def _stranger(world: World, slot: int, other: int) -> tuple[bool, bool, int]:
    """How far a worker is from the natural one to stand in: who does so already, then the nearest predecessor."""
    P = world.plan.stages
    does = world.running is not None and slot % P in world.running.stages_of(other) and other // P == slot // P
    return not does, other // P != slot // P, (slot - other) % P


def _runners(world: World, stage: int, stand_ins: Mapping[int, int]) -> tuple[int, ...]:
    P = world.plan.stages
    own = [world.posts[slot] for slot in range(stage, len(world.plan.workers), P) if _own(world, slot)]
    return tuple(sorted({*own, *(worker for slot, worker in stand_ins.items() if slot % P == stage)}))


def _plan(world: World, runners: Mapping[int, tuple[int, ...]], stand_ins: Mapping[int, int]) -> Plan:
    """Peers alone: the re-routing planner, with split backward. Else whatever list scheduling makes of it."""
    full = world.plan
    failed = tuple(slot for slot in range(len(full.workers)) if not _own(world, slot))
    if not failed:
        return full
    moved = _moved(world)
    if stand_ins == moved and _plain(full):
        left = set(failed) - set(moved)
        return _renamed(world.plans.best(_case(world, left)).plan if left else full, world, moved)
    return merged(full, runners, _home(world, stand_ins), world.costs, halved=full.halved)


def _plain(full: Plan) -> bool:
    """Whether every worker has one segment: what the re-routing planner plans for."""
    return full.segments == full.stages and not full.held


def _case(world: World, failed: Collection[int]) -> Case:
    full = world.plan
    return Case(
        pipelines=full.pipelines,
        stages=full.stages,
        micro_batches=full.micro_batches,
        costs=world.costs,
        failed=frozenset(Slot(*divmod(slot, full.stages)) for slot in failed),
        stagger=not world.joint,
        memory=world.memory,
    )


def _renamed(plan: Plan, world: World, moved: Mapping[int, int]) -> Plan:
    """The same plan, in which workers that have moved run the lists of the slots that they fill."""
    rows = [() if slot in moved else row for slot, row in enumerate(plan.workers)]
    for slot, worker in moved.items():  # whose own slot may have been filled by another one that has moved
        rows[worker] = plan.workers[slot]
    fills = moved.values()
    failed = tuple(slot for slot in range(len(rows)) if not _own(world, slot) and slot not in fills)
    held = tuple(sorted((worker, (slot % plan.stages,)) for slot, worker in moved.items()))
    return replace(plan, workers=tuple(rows), failed=failed, held=held)


def ahead(world: World) -> Iterator[Rerouted]:
    """Plans for the loss of any one more worker, made one at a time: then they are there when it happens. None where a
    stage has lost all of its own: whoever has a copy stands in, and then peers alone are no answer."""
    full = world.plan
    if world.strategy in SHADOWING or not _plain(full) or full.pipelines == 1:
        return
    failed = {slot for slot in range(len(full.workers)) if not _own(world, slot)} - set(_moved(world))
    if any(failed.issuperset(range(stage, len(full.workers), full.stages)) for stage in range(full.stages)):
        return
    yield from world.plans.next(_case(world, failed))


def _moves(world: World, stand_ins: Mapping[int, int]) -> list[tuple[int, int]]:
    """(worker, stage): who should leave its stage for another, so that the holes are where they hurt least."""
    full = world.plan
    if world.strategy in SHADOWING or not _plain(full) or full.pipelines == 1 or stand_ins:
        return []
    if newcomers(world):
        return []
    failed = {slot for slot in range(len(full.workers)) if not _own(world, slot)}
    if len(failed) < 2:
        return []
    _, normal = world.plans.normal(_case(world, failed))
    return [(move.source.pipeline * full.stages + move.source.stage, move.target.stage) for move in normal.moves]


def merged(
    full: Plan,
    runners: Mapping[int, tuple[int, ...]],
    home: Mapping[tuple[int, int], int],
    costs: Costs,
    *,
    halved: bool,
) -> Plan:
    """A plan of the shape of another, in which workers run several stages. Backward is split where it was (`halved`),
    and where that makes it shorter."""
    floor = Floor(
        stages=full.stages, segments=full.segments, workers=len(full.workers), runners=runners, costs=costs, ahead=0
    )
    steps = (whole_step(full.segments, full.micro_batches, split=split) for split in sorted({halved, True}))
    placed = min((place(lots, floor, home) for lots in steps), key=lambda placed: placed.makespan)
    stages = [tuple(stage for stage, who in runners.items() if slot in who) for slot in range(len(full.workers))]
    lists = [[task.action for task in row] for row in placed.lists]
    try:
        plan = _with_updates(full, lists, stages, early=True)
        collections.deque(walk(plan), maxlen=0)
    except ScheduleError:  # sums that wait for each other in a circle can be added up in order at the end
        plan = _with_updates(full, lists, stages, early=False)
    return plan


def _with_updates(full: Plan, lists: list[list[Action]], stages: list[tuple[int, ...]], *, early: bool) -> Plan:
    """The lists of all slots with R and S, as a plan: a worker that runs nothing has failed."""
    rows = tuple(_row(actions, held, full, early) for actions, held in zip(lists, stages, strict=True))
    others = tuple((slot, held) for slot, held in enumerate(stages) if held and held != (slot % full.stages,))
    failed = tuple(slot for slot, row in enumerate(rows) if not row)
    shape = (full.pipelines, full.stages, full.segments, full.micro_batches)
    return Plan("merged", *shape, rows, failed, others, full.shares)


def _row(actions: list[Action], stages: tuple[int, ...], full: Plan, early: bool) -> tuple[Action, ...]:
    """R after the last gradient of each segment that is run here (at once where there is none) or, if not early, after
    everything; and S at the end."""
    segments = [segment for segment in range(full.segments) if segment % full.stages in stages]
    last = {action.segment: index for index, action in enumerate(actions) if action.kind in RELEASE} if early else {}
    out = [Action(segment, Kind.R) for segment in segments if early and segment not in last]
    for index, action in enumerate(actions):
        out.append(action)
        if last.get(action.segment) == index:
            out.append(Action(action.segment, Kind.R))
    out += [Action(segment, Kind.R) for segment in segments if not early]
    return (*out, *(Action(segment, Kind.S) for segment in segments))


def _replicas(world: World, runners: Mapping[int, tuple[int, ...]]) -> tuple[Replica, ...]:
    """The copies that are there beside the runners', and new ones: where a stage would have one holder alone, and where
    all of them are in one zone, which may go as a whole, and somebody elsewhere has nothing but its own stage."""
    found = [
        Replica(stage, slot, _source(world, runners[stage], slot))
        for slot, held in sorted(world.held.items())
        for stage in sorted(held)
        if slot not in runners[stage]
    ]
    load = Counter({slot: len(held) for slot, held in world.held.items()})
    enough = 0 if world.strategy in _HEEDLESS else 1
    for stage in range(world.plan.stages):
        holders = {*runners[stage], *(replica.slot for replica in found if replica.stage == stage)}
        able = [slot for slot in world.held if slot not in holders and slot not in world.leaving]
        if len(holders - world.leaving) > enough:
            able = [slot for slot in able if enough and load[slot] == 1 and _elsewhere(world, slot, holders)]
        if able and world.strategy != "none":
            near = {world.zones.get(slot) for slot in holders} - {None}
            chosen = min(able, key=lambda w: (world.zones.get(w) in near, load[w], (stage - w) % world.plan.stages, w))
            load[chosen] += 1
            found.append(Replica(stage, chosen, _source(world, runners[stage], chosen), fresh=True))
    return tuple(found)


def _elsewhere(world: World, slot: int, holders: Set[int]) -> bool:
    """Whether all of these are in one zone, and somebody in another one."""
    zones = {world.zones.get(holder) for holder in holders - world.leaving}
    return len(zones) == 1 and zones.isdisjoint({world.zones.get(slot), None}) and slot in world.zones


def _source(world: World, runners: tuple[int, ...], slot: int) -> int:
    """Who sends the sums for a copy: the runner of its own pipeline, if there is one."""
    P = world.plan.stages
    return min(runners, key=lambda runner: (runner // P != slot // P, runner))
