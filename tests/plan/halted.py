"""A run without tensors: the lists of a plan are walked in any order that its workers could, and then it is halted.

What is left is what survivors would report, by the rules of a worker: an output stays where it was made until the step
commits, a frame that has come and was not used stays too, a tape goes with its W or with the step of its layers, and a
sum that was added up is complete with some holders, or with all. Nothing is committed: at most two steps are open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from culm.plan.edges import Task
from culm.plan.layout import Layout, World, arrange_around
from culm.plan.lineage import Cell, Standing
from culm.plan.recover import Recovery, Scene, Wiring, made, needed, recover
from culm.schedule import Action, Kind, Plan
from culm.schedule.action import BACKWARD, RELEASE


@dataclass
class Worker:
    """What one worker has in hand."""

    slot: int
    at: int = 0
    step: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    tapes: set[Cell] = field(default_factory=set)
    halves: set[Cell] = field(default_factory=set)
    summed: set[Cell] = field(default_factory=set)
    outputs: set[Cell] = field(default_factory=set)
    gradients: set[Cell] = field(default_factory=set)
    sums: set[tuple[int, int]] = field(default_factory=set)
    met: set[tuple[int, int]] = field(default_factory=set)
    """(step, segment): R is begun here."""

    def things(self, kind: Kind) -> set[Cell]:
        """What F made, or what I made."""
        return self.outputs if kind is Kind.F else self.gradients

    def standing(self) -> Standing:
        waiting = {cell for cell in self.summed if (cell.step, cell.segment) not in self.sums}
        return Standing(
            versions=dict(self.versions),
            forwards=tuple(sorted(self.tapes)),
            halves=tuple(sorted(self.halves)),
            summed=tuple(sorted(waiting)),
            outputs=tuple(sorted(self.outputs)),
            gradients=tuple(sorted(self.gradients)),
            sums=tuple(sorted(self.sums)),
        )


class Run:
    """Two steps of a plan, as far as the dice let them come."""

    def __init__(self, plan: Plan, dice: Random, *, shadows: bool = False) -> None:
        self.plan, self.dice, self.shadows = plan, dice, shadows
        self.workers = [Worker(slot, versions={slot % plan.stages: 0}) for slot in range(len(plan.workers))]
        if shadows:
            for worker in self.workers:
                worker.versions[(worker.slot + 1) % plan.stages] = 0

    def halt(self) -> dict[int, Standing]:
        """Let workers go on, in any order, for a number of actions; then stop them all."""
        for _ in range(self.dice.randrange(2 * sum(map(len, self.plan.workers)) + 1)):
            able = [worker for worker in self.workers if self._able(worker)]
            if not able:
                break
            self._act(self.dice.choice(able))
        self._land()
        return {worker.slot: worker.standing() for worker in self.workers}

    def _next(self, worker: Worker) -> Action | None:
        row = self.plan.workers[worker.slot]
        return row[worker.at] if worker.step < 2 and worker.at < len(row) else None

    def _able(self, worker: Worker) -> bool:
        action = self._next(worker)
        if action is None:
            return False
        if action.kind is Kind.S:
            return self._added_up(worker.step, action.segment)
        needs = needed(action, self.plan.segments)
        return needs is None or self._anywhere(_cell(worker.step, needs), needs.kind)

    def _anywhere(self, cell: Cell, kind: Kind) -> bool:
        return any(cell in each.things(kind) for each in self.workers)

    def _added_up(self, step: int, segment: int) -> bool:
        return all((step, segment) in self.workers[slot].met for slot in self.plan.holders_of(segment))

    def _act(self, worker: Worker) -> None:
        action = self._next(worker)
        assert action is not None
        cell = _cell(worker.step, action)
        worker.at += 1
        match action.kind:
            case Kind.F:
                worker.tapes.add(cell)
                worker.outputs.add(cell)
            case Kind.R:
                worker.met.add(cell[:2])
            case Kind.S:
                self._step(worker, action.segment)
            case kind:
                self._backward(worker, cell, kind)
        if worker.at == len(self.plan.workers[worker.slot]):
            worker.at, worker.step = 0, worker.step + 1
        if self.shadows:
            self._look_after_replica(worker)

    def _backward(self, worker: Worker, cell: Cell, kind: Kind) -> None:
        worker.tapes.discard(cell)
        worker.halves.discard(cell)
        if kind is Kind.I:
            worker.halves.add(cell)
        if kind in BACKWARD:
            worker.gradients.add(cell)
        if kind in RELEASE:
            worker.summed.add(cell)

    def _step(self, worker: Worker, segment: int) -> None:
        """S of the last of its segments moves the weights of the stage; the complete sum stays."""
        worker.sums.add((worker.step, segment))
        stage = segment % self.plan.stages
        mine = range(stage, self.plan.segments, self.plan.stages)
        if all((worker.step, g) in worker.sums for g in mine):
            worker.versions[stage] = worker.step + 1
            worker.tapes = {c for c in worker.tapes if c.step > worker.step or c.segment not in mine}

    def _look_after_replica(self, worker: Worker) -> None:
        """In a bubble: take its sum and step it, or run its forward where the input lies here."""
        stage = (worker.slot + 1) % self.plan.stages
        mine = range(stage, self.plan.segments, self.plan.stages)
        version = worker.versions[stage]
        if self.dice.random() < 0.3 and all(self._added_up(version, g) for g in mine):
            worker.sums |= {(version, g) for g in mine}
            worker.versions[stage] = version + 1
            worker.tapes = {c for c in worker.tapes if c.step > version or c.segment not in mine}
        elif version == worker.step:
            ready = [c for g in mine for c in self._inputs(worker, version, g) if c not in worker.outputs]
            if ready and self.dice.random() < 0.5:
                chosen = self.dice.choice(ready)
                worker.tapes.add(chosen)
                worker.outputs.add(chosen)

    def _inputs(self, worker: Worker, step: int, g: int) -> Iterable[Cell]:
        cells = (Cell(step, g, micro) for micro in self.plan.micros_of(worker.slot))
        return [cell for cell in cells if g == 0 or cell._replace(segment=g - 1) in worker.outputs]

    def _land(self) -> None:
        """Of what is on its way some has come: sums that all have met for, and frames that nobody has used."""
        for worker in self.workers:
            for step, g in worker.met:
                if self._added_up(step, g) and self.dice.random() < 0.5:
                    worker.sums.add((step, g))
            for step, action in self._to_come(worker):
                needs = needed(action, self.plan.segments)
                if needs is None or not self._anywhere(_cell(step, needs), needs.kind) or self.dice.random() < 0.5:
                    continue
                worker.things(needs.kind).add(_cell(step, needs))

    def _to_come(self, worker: Worker) -> list[tuple[int, Action]]:
        row = self.plan.workers[worker.slot]
        return [(worker.step, action) for action in row[worker.at :]] if worker.step < 2 else []


def _cell(step: int, action: Action) -> Cell:
    return Cell(step, action.segment, action.micro or 0)


def survivors(standings: dict[int, Standing], plan: Plan, dice: Random) -> dict[int, Standing]:
    """Some are lost, and each stage has a holder left."""
    left = dict(standings)
    for slot in dice.sample(sorted(left), dice.randint(1, len(left) - 1)):
        rest = {other: standing for other, standing in left.items() if other != slot}
        if {stage for standing in rest.values() for stage in standing.versions} == set(range(plan.stages)):
            left = rest
    return left


@dataclass
class Regrouped:
    """A run that was halted and lost some: who is left, how they are arranged, and how they complete the steps."""

    plan: Plan
    left: dict[int, Standing]
    layout: Layout
    scene: Scene
    recovery: Recovery


def regrouped(plan: Plan, dice: Random, strategy: str) -> Regrouped:
    """Halt, lose, arrange, recover: what a leader does."""
    left = survivors(Run(plan, dice, shadows="shadow" in strategy).halt(), plan, dice)
    held = {slot: frozenset(standing.versions) for slot, standing in left.items()}
    layout = arrange_around(World(plan=plan, strategy=strategy, held=held))
    scene = Scene(
        stages=plan.stages,
        segments=plan.segments,
        slots=len(plan.workers),
        micro_batches=plan.micro_batches,
        runners=layout.runners,
        first=0,
        split=any(action.kind is Kind.W for row in layout.plan.workers for action in row),
        home=layout.home,
    )
    return Regrouped(plan, left, layout, scene, recover(scene, left))


def replayed(case: Regrouped) -> list[Worker]:
    """Carry a recovery out, each worker step by step in the order of its list, with nothing but what it has in hand and
    what others send it. Raises AssertionError if somebody waits for ever."""
    return _Replay(case).run()


class _Replay:
    def __init__(self, case: Regrouped) -> None:
        self.recovery, self.segments = case.recovery, case.plan.segments
        self.wiring = Wiring(case.recovery, case.plan.segments)
        self.workers = [Worker(slot) for slot in range(case.scene.slots)]
        for slot, standing in case.left.items():
            worker = self.workers[slot]
            worker.outputs, worker.gradients = set(standing.outputs), set(standing.gradients)
            worker.tapes, worker.halves = set(standing.forwards), set(standing.halves)
        self.lists = {slot: sorted(self.recovery.tasks(slot), key=lambda task: task.step) for slot in case.left}
        self.sent = {
            (step, name, taker)
            for slot in case.left
            for step in self.recovery.steps
            for name, takers in self.wiring.resends(step, slot)
            for taker in takers
        }
        self.made: set[tuple[int, Action]] = set()

    def run(self) -> list[Worker]:
        while sum(self._go_on(slot, row) for slot, row in self.lists.items()):
            pass
        stuck = {slot: str(row[0]) for slot, row in self.lists.items() if row}
        assert not stuck, f"nobody can go on: {stuck}"
        return self.workers

    def _go_on(self, slot: int, row: list[Task]) -> bool:
        """Run a list as far as it goes; whether it went on at all."""
        left = len(row)
        while row and self._fed(slot, row[0]):
            self._run(slot, row.pop(0))
        return len(row) < left

    def _fed(self, slot: int, task: Task) -> bool:
        needs = needed(task.action, self.segments)
        if needs is None:
            return True
        if self.wiring.source(task.step, needs, slot) != slot:
            return (task.step, str(needs), slot) in self.sent
        return _cell(task.step, needs) in self.workers[slot].things(needs.kind)

    def _run(self, slot: int, task: Task) -> None:
        worker, makes = self.workers[slot], made(task.action)
        cell = _cell(task.step, task.action)
        _check_tape(worker, cell, task.action.kind, task.again)
        if task.action.kind in RELEASE and not task.again:
            worker.summed.add(cell)
        if makes is not None:
            assert (task.step, makes) not in self.made, f"{makes} of step {task.step} is made twice"
            self.made.add((task.step, makes))
            worker.things(makes.kind).add(cell)
            self.sent |= {(task.step, str(makes), taker) for taker in self.wiring.takers(task.step, makes)}


def _check_tape(worker: Worker, cell: Cell, kind: Kind, again: bool) -> None:
    """F leaves a tape, I and B need one, W needs what I left."""
    match kind:
        case Kind.F:
            worker.tapes.add(cell)
        case Kind.W:
            assert cell in worker.halves, f"W of {cell} has no tape on slot {worker.slot}"
            worker.halves.discard(cell)
        case _:
            assert cell in worker.tapes, f"{kind} of {cell} has no tape on slot {worker.slot}"
            worker.tapes.discard(cell)
            if kind is Kind.I and not again:
                worker.halves.add(cell)
