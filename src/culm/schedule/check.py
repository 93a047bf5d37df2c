"""The rules of a step: what makes a plan one that can run, and that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.schedule.action import RELEASE, WHOLE, Action, Kind
from culm.schedule.marked import refuse
from culm.schedule.walk import walk

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator

    from culm.errors import ScheduleError
    from culm.schedule.plan import Plan


@dataclass(frozen=True)
class Report:
    """What a good plan is like."""

    actions: int
    """Actions over all workers, R and S of every holder included."""
    peak_activations: tuple[int, ...]
    """By slot number: the most (segment, micro-batch) pairs alive at once, each from its F to its W or B."""

    @property
    def peak(self) -> int:
        """The most activations alive at once on any worker."""
        return max(self.peak_activations)


def check(plan: Plan, *, memory: int | None = None, forward_only: bool = False) -> Report:
    """Accept the plan or raise a ScheduleError that points at the cell.

    Every F, and either B or both I and W, of each segment and micro-batch is there once, on the worker of its pipeline
    that holds the segment, after what it needs; W and B of a segment are in the order of the micro-batches; every
    worker reduces (R) and steps (S) each of its segments once, after the last W or B; no worker waits for ever; none
    has more than `memory` activations alive. `forward_only` is for evaluation: F alone, and nothing outlives its F.

    Where slots have failed, one live worker of the same stage runs all of a micro-batch that the slot would have run,
    segment by segment. W and B may then be in any order: sums are grouped in another way as it is.
    """
    for worker in range(len(plan.workers)):
        _check_cells(plan, worker, forward_only)
        _check_complete(plan, worker, forward_only)
        _check_order(plan, worker)
    _check_adopted(plan)
    for _ in walk(plan):
        pass
    peaks = tuple(_peak(plan, worker, memory, forward_only) for worker in range(len(plan.workers)))
    return Report(sum(map(len, plan.workers)), peaks)


def _check_cells(plan: Plan, worker: int, forward_only: bool) -> None:
    """Each cell is an action of this worker, and there once."""
    seen: set[Action] = set()
    segments, micros = plan.segments_of(worker), plan.micros_of(worker)
    orphans = {stage: frozenset(plan.orphans_of(stage)) for stage in range(plan.stages)} if plan.failed else {}
    for index, action in enumerate(plan.workers[worker]):
        if worker in plan.failed:
            raise _wrong(plan, worker, index, "this worker has failed and can run nothing")
        if forward_only and action.kind is not Kind.F:
            raise _wrong(plan, worker, index, "an evaluation has F alone")
        if action.segment not in segments:
            raise _wrong(plan, worker, index, f"this worker holds the segments {', '.join(map(str, segments))}")
        if (action.micro is None) != (action.kind in WHOLE):
            raise _wrong(plan, worker, index, "R and S have no micro-batch, and all others have one")
        stage = action.segment % plan.stages
        own = action.micro in micros and stage == worker % plan.stages
        if action.micro is not None and not own and action.micro not in orphans.get(stage, ()):
            raise _wrong(plan, worker, index, f"this pipeline runs the micro-batches {micros[0]} to {micros[-1]}")
        if action in seen:
            raise _wrong(plan, worker, index, "is there already")
        seen.add(action)


def _check_complete(plan: Plan, worker: int, forward_only: bool) -> None:
    """Nothing is missing, and no backward is there both whole and in halves."""
    actions = plan.workers[worker]
    index = {action: number for number, action in enumerate(actions)}
    for segment, kind, micro in index:
        whole = Action(segment, Kind.B, micro)
        if kind in (Kind.I, Kind.W) and whole in index:
            raise _wrong(plan, worker, index[Action(segment, kind, micro)], f"is a part of {whole}, which is there too")
    for action in _due(plan, worker, index, forward_only):
        if action not in index:
            note = f"{action} is missing"
            raise refuse(plan, f"worker {plan.label(worker)} is incomplete: {note}", {(worker, len(actions)): note})


def _check_adopted(plan: Plan) -> None:
    """What a failed worker would have run is run once by its peers."""
    for segment in range(plan.segments if plan.failed else 0):
        rows = {worker: set(plan.workers[worker]) for worker in plan.holders_of(segment)}
        for micro in plan.orphans_of(segment % plan.stages):
            first = Action(segment, Kind.F, micro)
            who = [worker for worker, row in rows.items() if first in row]
            if not who:
                peer, note = min(rows), f"{first} is missing, whose own worker has failed"
                raise refuse(
                    plan,
                    f"the peers of a failed worker are incomplete: {note}",
                    {(peer, len(plan.workers[peer])): note},
                )
            if len(who) > 1:
                index = plan.workers[who[1]].index(first)
                raise _wrong(plan, who[1], index, f"worker {plan.label(who[0])} runs it too")


def _due(plan: Plan, worker: int, present: Collection[Action], forward_only: bool) -> Iterator[Action]:
    """What a worker has to run: of a micro-batch whose backward is missing in any form, B."""
    if worker in plan.failed:
        return
    for segment in plan.segments_of(worker):
        found = {action.micro for action in present if action.segment == segment and action.micro is not None}
        own = plan.micros_of(worker) if segment % plan.stages == worker % plan.stages else ()
        for micro in sorted(found.union(own)):
            yield Action(segment, Kind.F, micro)
            halves = Action(segment, Kind.I, micro), Action(segment, Kind.W, micro)
            if not forward_only:
                yield from halves if any(half in present for half in halves) else [Action(segment, Kind.B, micro)]
        if not forward_only:
            yield Action(segment, Kind.R)
            yield Action(segment, Kind.S)


def _check_order(plan: Plan, worker: int) -> None:
    """What an action needs of its own segment comes before it."""
    present = frozenset(plan.workers[worker])
    seen: set[Action] = set()
    for index, action in enumerate(plan.workers[worker]):
        for needed in _needs(action, plan, worker, present):
            if needed in present and needed not in seen:
                raise _wrong(plan, worker, index, f"needs {needed}, which comes later")
        seen.add(action)


def _needs(action: Action, plan: Plan, worker: int, present: Container[Action]) -> tuple[Action, ...]:
    segment, kind, micro = action
    if kind is Kind.F:
        return ()
    if kind is Kind.S:
        return (Action(segment, Kind.R),)
    if micro is None and plan.failed:
        return tuple(a for a in plan.workers[worker] if a.segment == segment and a.kind in RELEASE)
    if micro is None:
        return (_release(segment, plan.micros_of(worker)[-1], present),)
    # Sums keep the micro-batches in order.
    before = (_release(segment, micro - 1, present),) if kind in RELEASE and not plan.failed else ()
    return (Action(segment, Kind.I if kind is Kind.W else Kind.F, micro), *before)


def _release(segment: int, micro: int, present: Container[Action]) -> Action:
    """The action that adds a micro-batch to the segment's gradient: W, or B where backward is not split."""
    half = Action(segment, Kind.W, micro)
    return half if half in present else Action(segment, Kind.B, micro)


def _peak(plan: Plan, worker: int, memory: int | None, forward_only: bool) -> int:
    """The most activations alive at once; in an evaluation nothing outlives its own F."""
    alive = peak = 0
    for index, action in enumerate(plan.workers[worker]):
        alive += (action.kind is Kind.F) - (action.kind in RELEASE)
        peak = max(peak, alive)
        if memory is not None and alive > memory:
            raise _wrong(plan, worker, index, f"is activation {alive} alive at once, and memory allows {memory}")
        alive = 0 if forward_only else alive
    return peak


def _wrong(plan: Plan, worker: int, index: int, note: str) -> ScheduleError:
    cell = f"{plan.workers[worker][index]} (cell {index + 1} of worker {plan.label(worker)})"
    return refuse(plan, f"{cell} breaks the plan: {note}", {(worker, index): note})
