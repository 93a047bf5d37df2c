"""How much later the step that a loss hits is complete: by the functions that recover real runs.

`layout` says who runs what after the loss, `lineage` what is missing of what had been done by then, `place` how soon
the survivors have made it good. Here they get what survivors would report at a moment of the planned step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from culm.plan.layout import SHADOWING, World, arrange_around, first_layout, orphaned
from culm.plan.lineage import Cell, Standing
from culm.plan.recover import Scene, needed, recover
from culm.schedule import Action, Costs, Kind, Plan, timing
from culm.schedule.action import BACKWARD, RELEASE

if TYPE_CHECKING:
    from culm.plan import Slot
    from culm.schedule.timing import Timeline
    from culm.sim.steps import Steps

EXACT = 100
"""Cases of so many forwards are looked at closely: every sixteenth of a step, every stage."""
LARGE = 600
"""Larger cases are not looked at, but estimated."""
MOST = 8
"""More pipelines are taken to be like so many, with less to do for each."""


class Redo:
    """Seconds that a loss adds to its step, for one workload; each situation is worked out once."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._late = cache(self._of_one)

    @property
    def _forwards(self) -> int:
        return self._steps.workload.stages * self._steps.workload.micro_batches

    def seconds(self, strategy: str, pipelines: int, hit: Sequence[Slot], phase: float) -> float:
        """Nodes of these slots vanish when `phase` of the step, from 0 to 1, is done, every other slot being filled.

        In one stage one loss comes after the other; different stages are made good side by side.
        """
        peers = "shadow" if strategy in SHADOWING else "reroute"
        strategy = strategy if strategy in SHADOWING and self._forwards <= EXACT else peers
        parts = 16 if self._forwards <= EXACT else 2
        part = min(parts - 1, int(phase * parts))
        lost = [slot.stage for slot in hit]
        few = min(pipelines, MOST)
        scale = few * (few - 1) / (pipelines * (pipelines - 1)) if pipelines > few else 1.0
        each = [lost.count(s) * self._late(strategy, few, self._like(s), (part + 0.5) / parts) for s in set(lost)]
        return scale * max(each, default=0.0)

    def _like(self, stage: int) -> int:
        """In large cases, and for pipelines that are deeper than planned, one of the middle stands for all."""
        w = self._steps.workload
        return stage if self._forwards <= EXACT and stage < w.stages else w.stages // 2

    def _of_one(self, strategy: str, pipelines: int, stage: int, phase: float) -> float:
        w = self._steps.workload
        if pipelines == 1 and (w.stages == 1 or strategy not in SHADOWING):
            return 0.0
        if self._forwards > LARGE:
            return self._estimate(strategy, pipelines, phase)
        plan = self._steps.plan(pipelines, max(pipelines, w.micro_batches))
        return max(0.0, late(plan, w.costs, {(pipelines - 1) * w.stages + stage}, phase, strategy))

    def _estimate(self, strategy: str, pipelines: int, phase: float) -> float:
        """What the lost worker had done, by those that hold the same layers; or all that it had to do in this step, if
        that does not fit into their bubbles."""
        w = self._steps.workload
        work = w.micro_batches / pipelines * w.stage_s
        bubble = max(0.0, self._steps.healthy(pipelines) - work)
        helpers = pipelines if strategy in SHADOWING else pipelines - 1
        return max(phase * work / helpers, work / helpers - bubble)


def late(plan: Plan, costs: Costs, lost: Collection[int], phase: float, strategy: str) -> float:
    """How much later than planned the step is complete if these slots are empty from a moment on.

    Infinite where a stage has no holder left. Below zero where survivors finish earlier: a recovery may split the
    backward and share work as the plan does not.
    """
    timeline = timing(plan, costs)
    at = phase * timeline.makespan
    standings = survivors(timeline, at, lost, strategy)
    held = {slot: frozenset(standing.versions) for slot, standing in standings.items()}
    world = World(plan=plan, strategy=strategy, held=held, costs=costs)
    if orphaned(world):
        return float("inf")
    layout = arrange_around(world)
    scene = Scene(
        stages=plan.stages,
        segments=plan.segments,
        slots=len(plan.workers),
        micro_batches=plan.micro_batches,
        runners=layout.runners,
        first=0,
        split=any(action.kind is Kind.W for row in layout.plan.workers for action in row),
        costs=costs,
        home=layout.home,
    )
    found = recover(scene, standings)
    # Where nobody has begun, the step is run as a whole, by the new plan.
    takes = found.length if found.steps else timing(layout.plan, costs).makespan
    return takes - (timeline.makespan - at)


@dataclass
class _Desk:
    """What a survivor has of the step."""

    tapes: set[Cell] = field(default_factory=set)
    halves: set[Cell] = field(default_factory=set)
    summed: set[Cell] = field(default_factory=set)
    outputs: set[Cell] = field(default_factory=set)
    gradients: set[Cell] = field(default_factory=set)

    def did(self, action: Action) -> None:
        cell = _cell(action)
        if action.kind is Kind.F:
            self.tapes.add(cell)
            self.outputs.add(cell)
            return
        self.tapes.discard(cell)
        self.halves.discard(cell)
        if action.kind in BACKWARD:
            self.gradients.add(cell)
        (self.summed if action.kind in RELEASE else self.halves).add(cell)

    def standing(self, versions: Mapping[int, int]) -> Standing:
        return Standing(
            versions=dict(versions),
            forwards=tuple(sorted(self.tapes)),
            halves=tuple(sorted(self.halves)),
            summed=tuple(sorted(self.summed)),
            outputs=tuple(sorted(self.outputs)),
            gradients=tuple(sorted(self.gradients)),
        )


def survivors(timeline: Timeline, at: float, lost: Collection[int], strategy: str) -> dict[int, Standing]:
    """By slot: what is there when everyone has stopped. Who had begun an action completes it first.

    What the lost had sent has arrived; what it was computing is gone.
    """
    plan = timeline.plan
    holds: dict[int, dict[int, int]] = {slot: {slot % plan.stages: 0} for slot in range(len(plan.workers))}
    for replica in first_layout(plan, strategy):
        holds[replica.slot][replica.stage] = 0
    desks = {slot: _Desk() for slot in holds if slot not in lost}
    for slot, desk in desks.items():
        for action in _done(timeline, slot, at):
            desk.did(action)
    for slot in lost:
        _arrived(timeline, slot, at, desks)
    if strategy == "shadow":
        _ahead(timeline, at, desks)
    return {slot: desk.standing(holds[slot]) for slot, desk in desks.items()}


def _done(timeline: Timeline, slot: int, at: float) -> Iterator[Action]:
    return (span.action for span in timeline.spans[slot] if span.start < at and span.action.micro is not None)


def _arrived(timeline: Timeline, lost: int, at: float, desks: Mapping[int, _Desk]) -> None:
    """What a lost worker sent and nobody has used yet lies with whoever is to use it."""
    plan = timeline.plan
    sent = {_sent(span.action) for span in timeline.spans[lost] if span.end <= at and span.action.micro is not None}
    for slot, desk in desks.items():
        used = {needed(action, plan.segments) for action in _done(timeline, slot, at)}
        for action in plan.workers[slot]:
            needs = needed(action, plan.segments) if action.micro is not None else None
            if needs is not None and needs in sent and needs not in used:
                (desk.outputs if needs.kind is Kind.F else desk.gradients).add(_cell(needs))


def _sent(action: Action) -> Action:
    """A gradient goes by the name of its I, whether I or B made it."""
    return action._replace(kind=Kind.I) if action.kind in BACKWARD else action


def _ahead(timeline: Timeline, at: float, desks: Mapping[int, _Desk]) -> None:
    """Shadows have run forwards of their successor's layers, as many as the waits of their own were long enough for."""
    P = timeline.plan.stages
    for slot, desk in desks.items():
        after = (slot % P + 1) % P
        waits = _waits(timeline, slot, at)
        forward = _forward_s(timeline, slot - slot % P + after)
        room = sum(int(wait / forward) for wait in waits) if forward > 0 else 0
        ready = sorted(cell for cell in desk.outputs if cell.segment % P == slot % P and after)
        desk.tapes |= {cell._replace(segment=after) for cell in ready[:room]}


def _waits(timeline: Timeline, slot: int, at: float) -> list[float]:
    spans = [span for span in timeline.spans[slot] if span.start < at]
    ends = [span.end for span in spans]
    starts = [*(span.start for span in spans[1:]), at]
    return [max(0.0, start - end) for start, end in zip(starts, ends, strict=True)] if spans else []


def _forward_s(timeline: Timeline, slot: int) -> float:
    return next((span.end - span.start for span in timeline.spans[slot] if span.action.kind is Kind.F), 0.0)


def _cell(action: Action) -> Cell:
    return Cell(0, action.segment, action.micro or 0)
