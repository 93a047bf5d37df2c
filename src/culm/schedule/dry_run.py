"""Dry run of a plan: every action once, in an order in which the workers can run them."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule.action import Action, Kind
from culm.schedule.schedule_errors import error_at_cells
from culm.schedule.send_recv import producing_action

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from culm.errors import ScheduleError
    from culm.schedule.plan import Plan


class DryRunAction(NamedTuple):
    """`workers` run `action`, which uses the output of `needs`. R is a single entry for all holders of its segment."""

    action: Action
    workers: tuple[int, ...]
    needs: Action | None


def dry_run(plan: Plan) -> Iterator[DryRunAction]:
    """Yield all actions in a runnable order: an action waits for its producer, R for all holders of its segment.

    Each action is examined at most twice, whatever the size of the plan. Raises a ScheduleError that names the waiting
    workers and what they wait for if no worker can continue.
    """
    placement = plan.placement()
    at = [0] * len(plan.workers)
    done: set[Action] = set()
    arrived: Counter[Action] = Counter()
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    runnable = list(range(len(plan.workers)))
    while runnable:
        worker = runnable.pop()
        if at[worker] == len(plan.workers[worker]):
            continue
        action = plan.workers[worker][at[worker]]
        needs = producing_action(action, plan.segments, placement)
        if needs is not None and needs not in done:
            waiting[needs].append(worker)
            continue
        workers = plan.holders_of(action.segment) if action.kind is Kind.R else (worker,)
        arrived[action] += 1
        if arrived[action] % len(workers):
            continue
        yield DryRunAction(action, workers, needs)
        done.add(action)
        for each in workers:
            at[each] += 1
        runnable += (*waiting.pop(action, ()), *workers)
    stuck = [worker for worker, actions in enumerate(plan.workers) if at[worker] < len(actions)]
    if stuck:
        raise _deadlock_error(plan, at, placement, stuck[0])


def _deadlock_error(plan: Plan, at: list[int], placement: Mapping[Action, int], worker: int) -> ScheduleError:
    """Follow the chain of waiting workers until one repeats; the error shows that cycle."""
    path: list[int] = []
    notes: dict[int, str] = {}
    awaited: int | None = worker
    while awaited is not None and awaited not in notes:
        path.append(awaited)
        awaited, notes[path[-1]] = _explain_wait(plan, at, placement, awaited)
    circle = path[path.index(awaited) :] if awaited is not None else path[-1:]
    descriptions = [f"{plan.slot_label(w)} at {plan.workers[w][at[w]]} {notes[w]}" for w in circle]
    return error_at_cells(
        plan, f"no worker can go on: {'; '.join(descriptions)}", {(w, at[w]): notes[w] for w in circle}
    )


def _explain_wait(plan: Plan, at: list[int], placement: Mapping[Action, int], worker: int) -> tuple[int | None, str]:
    """The worker that a stuck worker waits for (None: no worker will ever provide it), and a description."""
    action = plan.workers[worker][at[worker]]
    if action.kind is Kind.R:
        return _find_late_holder(plan, at, action)
    needs = producing_action(action, plan.segments, placement)
    assert needs is not None, "only R and actions with a producer wait"
    owner = placement.get(needs)
    if owner is None:
        return None, f"needs {needs}, which no worker runs"
    if owner == worker:
        return owner, f"needs {needs}, which comes later"
    return owner, f"waits for {needs} of {plan.slot_label(owner)}"


def _find_late_holder(plan: Plan, at: list[int], reduce: Action) -> tuple[int | None, str]:
    """The first holder that has not reached the reduce."""
    late = next(w for w in plan.holders_of(reduce.segment) if plan.workers[w][at[w] : at[w] + 1] != (reduce,))
    if reduce not in plan.workers[late][at[late] :]:
        return None, f"waits for {plan.slot_label(late)}, which does not run {reduce} later"
    return late, f"waits for {plan.slot_label(late)} to reach {reduce}"
