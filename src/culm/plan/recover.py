"""Recovery: from what the survivors report to who runs what until every open step is complete. Pure.

`lineage` says what is missing, `place` puts it on holders; here both meet, and what follows from the placement is
derived: who sends what it kept to whom, who adds up, who gives a complete sum to those that lack it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from culm.plan.edges import Task
from culm.plan.handover import Ordered, Part, in_time, order, parts, staying_first
from culm.plan.least import outlook
from culm.plan.lineage import Cell, Missing, Standing, lineage
from culm.plan.place import Floor
from culm.schedule import UNIT, Action, Costs, Kind
from culm.schedule.action import BACKWARD


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How the open steps are completed; what a worker does first in a new epoch."""

    steps: tuple[int, ...] = ()
    lists: tuple[tuple[tuple[int, str, bool], ...], ...] = ()
    """By slot: (step, action, for its output alone), in order."""
    kept: dict[str, tuple[int, ...]] = {}
    """By step and name ("5 2F0"): who keeps what nobody runs but somebody needs."""
    sums: tuple[tuple[int, int, int], ...] = ()
    """(step, segment, slot): sums that are complete already, and one worker that has each."""
    parts: tuple[Part, ...] = ()
    """The sums that workers which leave give to others, before these are added up."""
    versions: tuple[dict[int, int], ...] = ()
    """By slot that stays, by stage held: the step that its weights are for."""
    runners: dict[int, tuple[tuple[int, ...], ...]] = {}
    """By step, by segment: the workers whose sums are added up."""
    dropped: dict[int, tuple[int, ...]] = {}
    """By step: the micro-batches that are left out of it (strategy drop)."""
    redone: int = 0
    """How many of the actions had been finished before by somebody, as far as survivors saw."""
    length: float = 0.0
    """How long the placed actions take, in the unit of the costs."""
    bound: float = 0.0
    """No placement takes less."""

    def tasks(self, slot: int) -> list[Task]:
        return [Task(step, Action.parse(action), again) for step, action, again in self.lists[slot]]

    def giver(self, step: int, segment: int) -> int | None:
        """Who has the complete sum already; None: it is yet to be added up."""
        return next((slot for s, g, slot in self.sums if (s, g) == (step, segment)), None)

    def lacking(self, step: int, stage: int) -> list[int]:
        """The holders of a stage whose weights are not past a step: each needs its complete sum."""
        return [slot for slot, held in enumerate(self.versions) if held.get(stage, step + 1) <= step]

    def needy(self, step: int) -> list[int]:
        """The workers that have still to end a step in any of their stages."""
        return [slot for slot, held in enumerate(self.versions) if any(version <= step for version in held.values())]


class Wiring:
    """What follows from where a recovery places its actions: who takes what from whom."""

    def __init__(self, recovery: Recovery, segments: int) -> None:
        self._kept = recovery.kept
        self._runner: dict[str, int] = {}
        self._takers: dict[str, list[int]] = {}
        for slot in range(len(recovery.lists)):
            for step, action, _ in recovery.tasks(slot):
                makes, needs = made(action), needed(action, segments)
                if makes is not None:
                    self._runner[f"{step} {makes}"] = slot
                if needs is not None:
                    self._takers.setdefault(f"{step} {needs}", []).append(slot)

    def source(self, step: int, name: Action, slot: int) -> int:
        """Whom a worker takes something from: whoever runs it, or keeps it; itself, if it does."""
        run = self._runner.get(f"{step} {name}")
        if run is not None:
            return run
        keepers = self._kept[f"{step} {name}"]
        return slot if slot in keepers else keepers[0]

    def takers(self, step: int, name: Action | str) -> list[int]:
        """The workers that need something of an open step."""
        return self._takers.get(f"{step} {name}", [])

    def resends(self, step: int, slot: int) -> list[tuple[str, list[int]]]:
        """What a worker has kept of an open step and others need from it: its name, and they."""
        found = []
        for key, keepers in self._kept.items():
            at, _, name = key.partition(" ")
            if int(at) == step and keepers[0] == slot:
                found.append((name, [taker for taker in self.takers(step, name) if taker not in keepers]))
        return found


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What recovery has to work with, beside the standings."""

    stages: int
    segments: int
    slots: int
    micro_batches: int
    runners: Mapping[int, Sequence[int]]
    """By stage: who shall run it from now on. Each holds it; every stage has one."""
    first: int
    """The first step that is not committed."""
    split: bool = True
    """Whether backward is split in the plan from now on; where it is not, a recovery may still be shorter if it is."""
    joint: bool = False
    costs: Costs = UNIT
    home: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (segment, micro-batch): who runs it in the plan from now on."""
    leaving: Collection[int] = ()
    """Who is about to go, and so is no runner: it ends what it has begun and gives what it has."""
    patience: float = math.inf
    """How long it can go on with that, in the unit of the costs."""
    dropped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By open step: the micro-batches that are left out of it."""


def recover(scene: Scene, standings: Mapping[int, Standing]) -> Recovery:
    """The least that completes all open steps, placed on holders."""
    steps = tuple(range(scene.first, _last(standings, scene.first) + 1))
    usable = {slot: _of_runners(standing, slot, scene) for slot, standing in standings.items()}
    staying = {slot: standing for slot, standing in standings.items() if slot not in scene.leaving}
    floor = Floor(
        stages=scene.stages,
        segments=scene.segments,
        workers=scene.slots,
        runners=scene.runners,
        others={stage: _others(staying, stage, scene.runners[stage]) for stage in range(scene.stages)},
        guests=scene.leaving,
        costs=scene.costs,
        joint=scene.joint,
    )
    asked = partial(
        lineage, steps=steps, segments=scene.segments, micro_batches=scene.micro_batches, dropped=scene.dropped
    )

    rest = outlook(asked(usable, split=True).lots, floor)

    def attempt(found: Mapping[int, Standing]) -> tuple[Missing, Ordered]:
        placed: list[tuple[Missing, Ordered]] = []
        for split in (True,) if scene.split else (False, True):
            missing = asked(found, split=split)
            placed.append((missing, order(missing.lots, floor, scene.home, scene.leaving, rest)))
            if placed[-1][1].makespan <= rest.bound + 1e-9:  # nothing is shorter
                break
        return min(placed, key=lambda pair: pair[1].makespan)

    missing, placed = in_time(usable, scene.leaving, scene.patience, attempt)
    missing = staying_first(missing, scene.leaving)
    runners = {step: _adding(step, usable, placed.lists, scene) for step in steps}
    return Recovery(
        steps=steps,
        lists=tuple(tuple((step, str(action), again) for step, action, again in row) for row in placed.lists),
        kept=_needed(placed.lists, missing, scene),
        sums=tuple(sorted((step, g, slots[0]) for (step, g), slots in missing.sums.items() if step in steps)),
        parts=parts(usable, placed.lists, missing.sums, runners, scene.leaving),
        versions=tuple(staying[slot].versions if slot in staying else {} for slot in range(scene.slots)),
        runners=runners,
        dropped={step: scene.dropped[step] for step in steps if scene.dropped.get(step)},
        redone=_redone(placed.lists, standings, scene.leaving),
        length=placed.makespan,
        bound=rest.bound,
    )


def _last(standings: Mapping[int, Standing], first: int) -> int:
    """The newest step that anybody has begun; one less than the first if nobody has."""
    begun = [version - 1 for standing in standings.values() for version in standing.versions.values()]
    for standing in standings.values():
        begun += [cell.step for cells in (standing.forwards, standing.halves, standing.summed) for cell in cells]
        begun += [step for step, _ in standing.sums]
    return max(begun, default=first - 1)


def _of_runners(standing: Standing, slot: int, scene: Scene) -> Standing:
    """A tape or a sum counts where the stage is run, or if its worker is about to go and gives it away; a shadow that
    is not needed keeps its tapes for itself."""
    if slot in scene.leaving:
        return standing
    mine = {stage for stage, runners in scene.runners.items() if slot in runners}

    def run(cells: Iterable[Cell]) -> tuple[Cell, ...]:
        return tuple(cell for cell in cells if cell.segment % scene.stages in mine)

    summed = untainted(run(standing.summed), scene.dropped)
    return msgspec.structs.replace(
        standing, forwards=run(standing.forwards), halves=run(standing.halves), summed=summed
    )


def untainted(summed: Sequence[Cell], dropped: Mapping[int, Collection[int]]) -> tuple[Cell, ...]:
    """What counts of one worker's own sums: nothing of one that has a micro-batch in it which was dropped since. The
    worker throws that sum away (Desk.drop)."""
    tainted = {(cell.step, cell.segment) for cell in summed if cell.micro in dropped.get(cell.step, ())}
    return tuple(cell for cell in summed if (cell.step, cell.segment) not in tainted)


def _adding(
    step: int, standings: Mapping[int, Standing], lists: Sequence[Sequence[Task]], scene: Scene
) -> tuple[tuple[int, ...], ...]:
    """By segment: who has something to add to its sum. A runner that has nothing is given what comes out: it may never
    have run a forward there, and so not know what the layers record. If nobody has, the first stands for all."""
    adds = {(slot, cell.segment) for slot, each in standings.items() for cell in each.summed if cell.step == step}
    adds |= {
        (slot, task.action.segment)
        for slot, row in enumerate(lists)
        for task in row
        if task.step == step and task.action.kind in (Kind.W, Kind.B) and not task.again
    }
    found = []
    for g in range(scene.segments):
        runners = scene.runners[g % scene.stages]
        found.append(tuple(slot for slot in runners if (slot, g) in adds) or (runners[0],))
    return tuple(found)


def _others(standings: Mapping[int, Standing], stage: int, runners: Collection[int]) -> list[int]:
    """Who holds a stage without running it."""
    return [slot for slot, standing in standings.items() if stage in standing.versions and slot not in runners]


def _needed(lists: Sequence[Sequence[Task]], missing: Missing, scene: Scene) -> dict[str, tuple[int, ...]]:
    """What is taken from those who kept it: all that is needed and that nobody runs."""
    run = {(task.step, made(task.action)) for row in lists for task in row}
    found: dict[str, tuple[int, ...]] = {}
    for task in (task for row in lists for task in row):
        needs = needed(task.action, scene.segments)
        if needs is not None and (task.step, needs) not in run:
            cell = Cell(task.step, needs.segment, needs.micro or 0)
            found[f"{task.step} {needs}"] = (missing.outputs if needs.kind is Kind.F else missing.gradients)[cell]
    return found


def made(action: Action) -> Action | None:
    """The name that the output of an action goes by: a gradient that of its I, whether I or B made it."""
    segment, kind, micro = action
    if kind is Kind.F:
        return action
    return Action(segment, Kind.I, micro) if kind in BACKWARD else None


def needed(action: Action, segments: int) -> Action | None:
    """The name of what an action takes from another segment."""
    segment, kind, micro = action
    if kind is Kind.F:
        return Action(segment - 1, Kind.F, micro) if segment else None
    return Action(segment + 1, Kind.I, micro) if kind in BACKWARD and segment + 1 < segments else None


def _redone(lists: Sequence[Sequence[Task]], standings: Mapping[int, Standing], leaving: Collection[int] = ()) -> int:
    """Actions that were finished before, as survivors saw: what is run for its output alone, and what was taken; and
    what somebody had begun who has no time to end it."""
    gone = [standings[slot] for slot in leaving if slot in standings]
    forwards = {cell for each in gone for cell in (*each.forwards, *each.halves)}
    backwards: set[Cell] = set()
    for each in standings.values():
        for cell in (*each.forwards, *each.halves, *each.summed):
            forwards.add(cell._replace(segment=cell.segment - 1))
        for cell in (*each.halves, *each.summed):
            backwards.add(cell._replace(segment=cell.segment + 1))
        backwards.update(cell._replace(segment=cell.segment + 1) for cell in each.gradients)
    count = 0
    for task in (task for row in lists for task in row):
        cell = Cell(task.step, task.action.segment, task.action.micro or 0)
        seen = backwards | forwards if task.action.kind is Kind.F else backwards
        count += task.again or (task.action.kind is not Kind.W and cell in seen)
    return count
