"""Validity rules of a plan: whether it can run, and whether it trains on every micro-batch exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.schedule.action import SEGMENT_KINDS, WEIGHT_GRAD_KINDS, Action, Kind
from culm.schedule.dry_run import dry_run
from culm.schedule.schedule_errors import error_at_cells

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator

    from culm.errors import ScheduleError
    from culm.schedule.plan import Plan


@dataclass(frozen=True)
class PlanReport:
    """Size and memory of a valid plan."""

    action_count: int
    """Actions over all workers, R and S of every holder included."""
    peak_activations: tuple[int, ...]
    """By slot number: the most (segment, micro-batch) pairs alive at once, each from its F to its W or B."""

    @property
    def max_peak_activations(self) -> int:
        """The most activations alive at once on any worker."""
        return max(self.peak_activations)


def check_plan(plan: Plan, *, max_activations: int | None = None, forward_only: bool = False) -> PlanReport:
    """Raise a ScheduleError that marks the cell if the plan is not valid; otherwise return its report.

    A valid plan has every F, and either B or both I and W, of each segment and micro-batch once, on the worker of its
    pipeline that holds the segment, after everything it needs. W and B of a segment are in micro-batch order. Every
    worker runs R and S of each of its segments once, after the last W or B. No worker deadlocks, and none keeps more
    than `max_activations` activations alive. With `forward_only` (evaluation) only F is allowed, and an activation is
    freed at the end of its F.

    If slots have failed, one live worker of the same stage runs all actions of each micro-batch of the slot, segment
    by segment. W and B may then be in any order, because gradients are summed in other groups anyway.
    """
    for worker in range(len(plan.workers)):
        _check_actions(plan, worker, forward_only)
        _check_complete(plan, worker, forward_only)
        _check_order(plan, worker)
    _check_orphans(plan)
    for _ in dry_run(plan):
        pass
    peaks = tuple(_peak_activations(plan, worker, max_activations, forward_only) for worker in range(len(plan.workers)))
    return PlanReport(sum(map(len, plan.workers)), peaks)


def _check_actions(plan: Plan, worker: int, forward_only: bool) -> None:
    """Every cell is an action that this worker may run, and occurs once."""
    seen: set[Action] = set()
    segments, micros = plan.segments_of(worker), plan.micros_of(worker)
    orphans = {stage: frozenset(plan.orphans_of(stage)) for stage in range(plan.stages)} if plan.failed else {}
    for index, action in enumerate(plan.workers[worker]):
        if worker in plan.failed:
            raise _cell_error(plan, worker, index, "this worker has failed and cannot run anything")
        if forward_only and action.kind is not Kind.F:
            raise _cell_error(plan, worker, index, "an evaluation has only F")
        if action.segment not in segments:
            raise _cell_error(plan, worker, index, f"this worker holds the segments {', '.join(map(str, segments))}")
        if (action.micro is None) != (action.kind in SEGMENT_KINDS):
            raise _cell_error(plan, worker, index, "R and S have no micro-batch, and all others have one")
        stage = action.segment % plan.stages
        own = action.micro in micros and stage == worker % plan.stages
        if action.micro is not None and not own and action.micro not in orphans.get(stage, ()):
            raise _cell_error(plan, worker, index, f"this pipeline runs the micro-batches {micros[0]} to {micros[-1]}")
        if action in seen:
            raise _cell_error(plan, worker, index, "occurs twice")
        seen.add(action)


def _check_complete(plan: Plan, worker: int, forward_only: bool) -> None:
    """No action is missing, and no backward occurs both whole and split."""
    actions = plan.workers[worker]
    index = {action: number for number, action in enumerate(actions)}
    for segment, kind, micro in index:
        whole = Action(segment, Kind.B, micro)
        if kind in (Kind.I, Kind.W) and whole in index:
            raise _cell_error(
                plan, worker, index[Action(segment, kind, micro)], f"is a part of {whole}, which is in the list too"
            )
    for action in _required_actions(plan, worker, index, forward_only):
        if action not in index:
            note = f"{action} is missing"
            raise error_at_cells(
                plan, f"worker {plan.slot_label(worker)} is incomplete: {note}", {(worker, len(actions)): note}
            )


def _check_orphans(plan: Plan) -> None:
    """Every micro-batch of a failed worker is run once by its peers."""
    for segment in range(plan.segments if plan.failed else 0):
        rows = {worker: set(plan.workers[worker]) for worker in plan.holders_of(segment)}
        for micro in plan.orphans_of(segment % plan.stages):
            first = Action(segment, Kind.F, micro)
            runners = [worker for worker, row in rows.items() if first in row]
            if not runners:
                peer, note = min(rows), f"{first} of a failed worker is missing"
                raise error_at_cells(
                    plan,
                    f"the peers of a failed worker are incomplete: {note}",
                    {(peer, len(plan.workers[peer])): note},
                )
            if len(runners) > 1:
                index = plan.workers[runners[1]].index(first)
                raise _cell_error(plan, runners[1], index, f"worker {plan.slot_label(runners[0])} runs it too")


def _required_actions(plan: Plan, worker: int, present: Collection[Action], forward_only: bool) -> Iterator[Action]:
    """The actions that a worker has to run. For a micro-batch without any backward action this is B."""
    if worker in plan.failed:
        return
    for segment in plan.segments_of(worker):
        assigned = {action.micro for action in present if action.segment == segment and action.micro is not None}
        own = plan.micros_of(worker) if segment % plan.stages == worker % plan.stages else ()
        for micro in sorted(assigned.union(own)):
            yield Action(segment, Kind.F, micro)
            halves = Action(segment, Kind.I, micro), Action(segment, Kind.W, micro)
            if not forward_only:
                yield from halves if any(half in present for half in halves) else [Action(segment, Kind.B, micro)]
        if not forward_only:
            yield Action(segment, Kind.R)
            yield Action(segment, Kind.S)


def _check_order(plan: Plan, worker: int) -> None:
    """Everything that an action needs from its own segment comes before it."""
    present = frozenset(plan.workers[worker])
    seen: set[Action] = set()
    for index, action in enumerate(plan.workers[worker]):
        for needed in _required_before(action, plan, worker, present):
            if needed in present and needed not in seen:
                raise _cell_error(plan, worker, index, f"needs {needed}, which comes later")
        seen.add(action)


def _required_before(action: Action, plan: Plan, worker: int, present: Container[Action]) -> tuple[Action, ...]:
    segment, kind, micro = action
    if kind is Kind.F:
        return ()
    if kind is Kind.S:
        return (Action(segment, Kind.R),)
    if micro is None and plan.failed:
        return tuple(a for a in plan.workers[worker] if a.segment == segment and a.kind in WEIGHT_GRAD_KINDS)
    if micro is None:
        return (_weight_grad_action(segment, plan.micros_of(worker)[-1], present),)
    # Gradients are summed in micro-batch order.
    before = (
        (_weight_grad_action(segment, micro - 1, present),) if kind in WEIGHT_GRAD_KINDS and not plan.failed else ()
    )
    return (Action(segment, Kind.I if kind is Kind.W else Kind.F, micro), *before)


def _weight_grad_action(segment: int, micro: int, present: Container[Action]) -> Action:
    """The action that adds a micro-batch to the segment's gradient: W, or B where backward is not split."""
    half = Action(segment, Kind.W, micro)
    return half if half in present else Action(segment, Kind.B, micro)


def _peak_activations(plan: Plan, worker: int, max_activations: int | None, forward_only: bool) -> int:
    """The most activations alive at once. In an evaluation no activation outlives its F."""
    alive = peak = 0
    for index, action in enumerate(plan.workers[worker]):
        alive += (action.kind is Kind.F) - (action.kind in WEIGHT_GRAD_KINDS)
        peak = max(peak, alive)
        if max_activations is not None and alive > max_activations:
            raise _cell_error(
                plan, worker, index, f"is activation {alive} alive at once, but the limit is {max_activations}"
            )
        alive = 0 if forward_only else alive
    return peak


def _cell_error(plan: Plan, worker: int, index: int, problem: str) -> ScheduleError:
    cell = f"{plan.workers[worker][index]} (cell {index + 1} of worker {plan.slot_label(worker)})"
    return error_at_cells(plan, f"{cell} breaks the plan: {problem}", {(worker, index): problem})
