"""Lower bound of the time in which the open steps can be completed, for any placement and order. Pure.

Consider a group of workers and the remaining work that only they can run. This work cannot start before the shortest
chain that leads to it, takes at least its total divided evenly over the group, and is followed by the shortest chain
that depends on it. The maximum of this sum over groups, and over the parts of the work with longer chains, is a lower
bound. So is the end time if each worker of a group idles only as long as its own first and last action require. That
an item is run by a single worker is taken into account too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from culm.plan.recover.balance_work import possible_runners
from culm.plan.recover.task_dependencies import StepTask, task_dependencies
from culm.schedule import Action
from culm.schedule.action import WEIGHT_GRAD_KINDS
from culm.schedule.plan_timing import action_costs, send_costs

if TYPE_CHECKING:
    from culm.plan.recover.lineage import WorkItem
    from culm.plan.recover.place_work import RunnerPool

_Group: TypeAlias = frozenset[int]
_WeightedEdges: TypeAlias = list[list[tuple[int, float]]]


class _TaskWindow(NamedTuple):
    """A task: its item, the workers that could run it, its duration, and the longest chains before and after it."""

    item: int
    possible_runners: _Group
    duration: float
    longest_before: float
    longest_after: float


@dataclass(frozen=True)
class RecoveryBound:
    """What is known about the remaining work before it is placed."""

    makespan: float = 0.0
    """No placement finishes earlier."""
    min_idle: Mapping[int, float] = field(default_factory=dict)
    """By worker: its least idle time, before its first action and after its last."""


def recovery_bound(items: Sequence[WorkItem], pool: RunnerPool) -> RecoveryBound:
    """Pass split backwards: whole ones only take longer, so the bound holds for them too."""
    windows = _task_windows(items, pool)
    longest_chain = max(
        (window.longest_before + window.duration + window.longest_after for window in windows), default=0.0
    )
    by_group: defaultdict[_Group, list[_TaskWindow]] = defaultdict(list)
    for window in windows:
        by_group[window.possible_runners].append(window)
    bound = max([longest_chain, *(_group_bound(group, by_group) for group in _worker_groups(by_group))])
    return RecoveryBound(bound, _min_idle_by_worker(windows))


def _min_idle_by_worker(windows: Iterable[_TaskWindow]) -> dict[int, float]:
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for window in windows:
        for worker in window.possible_runners:
            first[worker] = min(window.longest_before, first.get(worker, window.longest_before))
            last[worker] = min(window.longest_after, last.get(worker, window.longest_after))
    return {worker: first[worker] + last[worker] for worker in first}


def _worker_groups(runner_groups: Iterable[_Group]) -> set[_Group]:
    """The groups that share a kind of work, unions of two that overlap, and all connected components."""
    groups = set(runner_groups)
    shared = [group for group in groups if len(group) > 1]
    for first, second in combinations(shared, 2):
        if first & second:
            groups.add(first | second)
    connected: list[_Group] = []
    for group in shared:
        touched = [part for part in connected if part & group]
        connected = [part for part in connected if not part & group] + [group.union(*touched)]
    return groups.union(connected)


def _group_bound(group: _Group, by_group: dict[_Group, list[_TaskWindow]]) -> float:
    windows = [window for runners, windows_of in by_group.items() if runners <= group for window in windows_of]
    work_by_window: Counter[tuple[float, float]] = Counter()
    for window in windows:
        work_by_window[window.longest_before, window.longest_after] += window.duration  # type: ignore[assignment]
    tails = sorted({tail for _, tail in work_by_window})
    bound = _packing_bound(windows, group) + tails[0]
    bound = max(
        bound, _levelled_end(sum(window.duration for window in windows), sorted(_min_idle_by_worker(windows).values()))
    )
    for head in {head for head, _ in work_by_window}:
        remaining = 0.0
        for tail in reversed(tails):
            remaining += sum(
                amount for (before, after), amount in work_by_window.items() if after == tail and before >= head
            )
            bound = max(bound, head + remaining / len(group) + tail) if remaining else bound
    return bound


def _levelled_end(work: float, idle: Sequence[float]) -> float:
    """When the work ends if it is divided so that all workers that take part end together, given their idle times."""
    total_idle = 0.0
    for count, idle_s in enumerate(idle, start=1):
        total_idle += idle_s
        end = (work + total_idle) / count
        if count == len(idle) or end <= idle[count]:
            return end
    return 0.0


def _packing_bound(windows: Sequence[_TaskWindow], group: _Group) -> float:
    """When the last worker of a group finishes if each item is run by one worker. Every item is assumed to be as small
    as the smallest that its worker could run; then giving each to the worker that finishes it first is optimal."""
    items: defaultdict[int, list[_TaskWindow]] = defaultdict(list)
    bound_windows: defaultdict[int, list[_TaskWindow]] = defaultdict(list)
    for window in windows:
        if len(window.possible_runners) == 1:
            bound_windows[min(window.possible_runners)].append(window)
        else:
            items[window.item].append(window)
    shapes: defaultdict[_Group, set[tuple[tuple[float, float], ...]]] = defaultdict(set)
    for windows_of in items.values():
        shapes[windows_of[0].possible_runners].add(
            tuple((window.longest_before, window.duration) for window in windows_of)
        )
    loads = [
        _WorkerLoad(
            bound_windows[worker],
            [k for runners, windows_of in shapes.items() if worker in runners for k in windows_of],
        )
        for worker in group
    ]
    for _ in items:
        min(loads, key=lambda load: load.end_time(1)).add_item()
    return max(load.end_time(0) for load in loads)


class _WorkerLoad:
    """The tasks bound to a worker, plus a number of the smallest items that it could run. All work that cannot start
    before a time ends after it."""

    def __init__(self, own: Sequence[_TaskWindow], items: Sequence[tuple[tuple[float, float], ...]]) -> None:
        self.count = 0
        self.can_take = bool(items)
        heads = {each.longest_before for each in own} | {head for item in items for head, _ in item}
        self.work_after_start = [
            (
                head,
                sum(each.duration for each in own if each.longest_before >= head),
                min((sum(units for at, units in item if at >= head) for item in items), default=0.0),
            )
            for head in heads
        ]

    def end_time(self, more: int) -> float:
        """When the worker finishes with `more` additional items."""
        if more and not self.can_take:
            return math.inf
        ends = (head + own + (self.count + more) * each for head, own, each in self.work_after_start if own or each)
        return max(ends, default=0.0)

    def add_item(self) -> None:
        self.count += 1


def _task_windows(items: Sequence[WorkItem], pool: RunnerPool) -> list[_TaskWindow]:
    cost_of = action_costs(pool.costs, pool.segments)
    item_of = [number for number, item in enumerate(items) for _ in item.kinds]
    tasks = [
        StepTask(item.key.step, Action(item.key.segment, kind, item.key.micro), item.output_only)
        for item in items
        for kind in item.kinds
    ]
    runners_of = [frozenset(possible_runners(item, pool)) for item in items]
    costs = [cost_of[task.action.kind][task.action.segment] for task in tasks]
    after = _successors(tasks, [runners_of[number] for number in item_of], pool)
    before: _WeightedEdges = [[] for _ in tasks]
    for number, edges in enumerate(after):
        for target, delay in edges:
            before[target].append((number, delay))
    heads, tails = _longest_chains(before, after, costs), _longest_chains(after, before, costs)
    return [_TaskWindow(item_of[n], runners_of[item_of[n]], costs[n], heads[n], tails[n]) for n in range(len(tasks))]


def _successors(tasks: Sequence[StepTask], runners: Sequence[_Group], pool: RunnerPool) -> _WeightedEdges:
    """Successors of each task and the delay until they can start. A send takes time only if no worker can run both."""
    send = send_costs(pool.costs, pool.segments)
    successors: _WeightedEdges = [[] for _ in tasks]
    for source, target, boundary in task_dependencies(tasks):
        must_send = boundary is not None and not runners[source] & runners[target]
        successors[source].append((target, send[boundary] if must_send and boundary is not None else 0.0))
    gradients: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (step, action, output_only) in enumerate(tasks):
        if action.kind in WEIGHT_GRAD_KINDS and not output_only:
            gradients[step, action.segment].append(number)
    for number, (step, action, output_only) in enumerate(tasks):
        if not output_only:
            for source in gradients.get((step - 1, action.segment), ()):
                successors[source].append((number, 0.0))
    return successors


def _longest_chains(before: _WeightedEdges, after: _WeightedEdges, costs: Sequence[float]) -> list[float]:
    """The longest chain that leads to each task."""
    waits = [len(edges) for edges in before]
    longest = [0.0] * len(waits)
    ready = [number for number, left in enumerate(waits) if not left]
    while ready:
        number = ready.pop()
        for target, delay in after[number]:
            longest[target] = max(longest[target], longest[number] + costs[number] + delay)
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return longest
