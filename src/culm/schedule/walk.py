"""A dry run: every action once, in an order that the workers could run them in."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule.action import Action, Kind
from culm.schedule.lower import producer
from culm.schedule.marked import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from culm.errors import ScheduleError
    from culm.schedule.plan import Plan


class Turn(NamedTuple):
    """`workers` run `action`, which takes the output of `needs`. R is one turn of all holders of its segment."""

    action: Action
    workers: tuple[int, ...]
    needs: Action | None


def walk(plan: Plan) -> Iterator[Turn]:
    """Run every list as far as it goes: an action waits for the one it takes from, R for all holders of its segment.

    An action is looked at no more than twice, whatever the size of the plan. When no worker can go on, the
    ScheduleError says who waits for what.
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
        needs = producer(action, plan.segments, placement)
        if needs is not None and needs not in done:
            waiting[needs].append(worker)
            continue
        workers = plan.holders_of(action.segment) if action.kind is Kind.R else (worker,)
        arrived[action] += 1
        if arrived[action] % len(workers):
            continue
        yield Turn(action, workers, needs)
        done.add(action)
        for each in workers:
            at[each] += 1
        runnable += (*waiting.pop(action, ()), *workers)
    stuck = [worker for worker, actions in enumerate(plan.workers) if at[worker] < len(actions)]
    if stuck:
        raise _deadlock(plan, at, placement, stuck[0])


def _deadlock(plan: Plan, at: list[int], placement: Mapping[Action, int], worker: int) -> ScheduleError:
    """Follow who waits for whom until a worker comes up again: that circle is what has to be broken."""
    path: list[int] = []
    notes: dict[int, str] = {}
    awaited: int | None = worker
    while awaited is not None and awaited not in notes:
        path.append(awaited)
        awaited, notes[path[-1]] = _wait(plan, at, placement, awaited)
    circle = path[path.index(awaited) :] if awaited is not None else path[-1:]
    told = [f"{plan.label(w)} at {plan.workers[w][at[w]]} {notes[w]}" for w in circle]
    return refuse(plan, f"no worker can go on: {'; '.join(told)}", {(w, at[w]): notes[w] for w in circle})


def _wait(plan: Plan, at: list[int], placement: Mapping[Action, int], worker: int) -> tuple[int | None, str]:
    """Whom a stuck worker waits for (None: nobody will ever come), and in words."""
    action = plan.workers[worker][at[worker]]
    if action.kind is Kind.R:
        return _late(plan, at, action)
    needs = producer(action, plan.segments, placement)
    assert needs is not None, "only R and actions with a producer wait"
    owner = placement.get(needs)
    if owner is None:
        return None, f"needs {needs}, which nobody runs"
    if owner == worker:
        return owner, f"needs {needs}, which comes later"
    return owner, f"waits for {needs} of {plan.label(owner)}"


def _late(plan: Plan, at: list[int], reduce: Action) -> tuple[int | None, str]:
    """The first holder that has not reached the reduce."""
    late = next(w for w in plan.holders_of(reduce.segment) if plan.workers[w][at[w] : at[w] + 1] != (reduce,))
    if reduce not in plan.workers[late][at[late] :]:
        return None, f"waits for {plan.label(late)}, which does not run {reduce} any more"
    return late, f"waits for {plan.label(late)} to reach {reduce}"
