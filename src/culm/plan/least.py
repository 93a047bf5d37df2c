"""How soon the rest of the open steps could be done at the earliest, whoever runs what in which order. Pure.

For a group of workers, and what is left to do that nobody else could: it can not begin before the shortest chain that
leads to it, takes at least its work spread evenly over the group, and the shortest chain that follows on it is yet to
come. The largest of these over groups, and over the parts of the work with longer chains, is a lower bound. So is what
comes out if each worker of a group idles for no longer than its own first and last action make it. That lots are whole
is looked at, too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from culm.plan.divide import able
from culm.plan.edges import Task, edges
from culm.schedule import Action
from culm.schedule.action import RELEASE
from culm.schedule.timing import prices, sends

if TYPE_CHECKING:
    from culm.plan.lineage import Lot
    from culm.plan.place import Floor

_Group: TypeAlias = frozenset[int]
_Edges: TypeAlias = list[list[tuple[int, float]]]


class _Work(NamedTuple):
    """A task: whose lot it is of, who could run it, what it takes, and the chains of others before and after it."""

    lot: int
    able: _Group
    units: float
    head: float
    tail: float


@dataclass(frozen=True)
class Outlook:
    """What can be said of a rest before it is placed."""

    bound: float = 0.0
    """No placement of it is done earlier."""
    idle: Mapping[int, float] = field(default_factory=dict)
    """By worker: how long it has nothing to do at the least, before its first action and after its last."""


def outlook(lots: Sequence[Lot], floor: Floor) -> Outlook:
    """Backwards should come in halves: whole ones only take longer, so the bound holds for them, too."""
    work = _work(lots, floor)
    chain = max((each.head + each.units + each.tail for each in work), default=0.0)
    by_group: defaultdict[_Group, list[_Work]] = defaultdict(list)
    for each in work:
        by_group[each.able].append(each)
    bound = max([chain, *(_of_group(group, by_group) for group in _groups(by_group))])
    return Outlook(bound, _idle(work))


def _idle(work: Iterable[_Work]) -> dict[int, float]:
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for each in work:
        for worker in each.able:
            first[worker] = min(each.head, first.get(worker, each.head))
            last[worker] = min(each.tail, last.get(worker, each.tail))
    return {worker: first[worker] + last[worker] for worker in first}


def _groups(able: Iterable[_Group]) -> set[_Group]:
    """Those who could run something, and those who share: two kinds of work, or all that hangs together."""
    found = set(able)
    shared = [group for group in found if len(group) > 1]
    for one, other in combinations(shared, 2):
        if one & other:
            found.add(one | other)
    whole: list[_Group] = []
    for group in shared:
        touched = [each for each in whole if each & group]
        whole = [each for each in whole if not each & group] + [group.union(*touched)]
    return found.union(whole)


def _of_group(group: _Group, by_group: dict[_Group, list[_Work]]) -> float:
    work = [each for able, some in by_group.items() if able <= group for each in some]
    units: Counter[tuple[float, float]] = Counter()
    for each in work:
        units[each.head, each.tail] += each.units  # type: ignore[assignment]
    tails = sorted({tail for _, tail in units})
    found = _packed(work, group) + tails[0]
    found = max(found, _filled(sum(each.units for each in work), sorted(_idle(work).values())))
    for head in {head for head, _ in units}:
        left = 0.0
        for tail in reversed(tails):
            left += sum(amount for (at, after), amount in units.items() if after == tail and at >= head)
            found = max(found, head + left / len(group) + tail) if left else found
    return found


def _filled(units: float, idle: Sequence[float]) -> float:
    """When work is done that is spread so that all who take part end together, each being idle for so long."""
    sunk = 0.0
    for count, own in enumerate(idle, start=1):
        sunk += own
        end = (units + sunk) / count
        if count == len(idle) or end <= idle[count]:
            return end
    return 0.0


def _packed(work: Sequence[_Work], group: _Group) -> float:
    """When the last of a group is done, if each lot is run by one of them. A lot is taken to be as small as the
    smallest that its worker could run; then to give each to whoever is done with it first is best."""
    lots: defaultdict[int, list[_Work]] = defaultdict(list)
    own: defaultdict[int, list[_Work]] = defaultdict(list)
    for each in work:
        if len(each.able) == 1:
            own[min(each.able)].append(each)
        else:
            lots[each.lot].append(each)
    kinds: defaultdict[_Group, set[tuple[tuple[float, float], ...]]] = defaultdict(set)
    for some in lots.values():
        kinds[some[0].able].add(tuple((each.head, each.units) for each in some))
    loads = [
        _Load(own[worker], [k for able, some in kinds.items() if worker in able for k in some]) for worker in group
    ]
    for _ in lots:
        min(loads, key=lambda load: load.after(1)).take()
    return max(load.after(0) for load in loads)


class _Load:
    """What a worker has, and a number of the smallest lots that it could have: of what can not begin before a time, all
    is done after it."""

    def __init__(self, own: Sequence[_Work], lots: Sequence[tuple[tuple[float, float], ...]]) -> None:
        self.count = 0
        self.able = bool(lots)
        heads = {each.head for each in own} | {head for lot in lots for head, _ in lot}
        self.late = [
            (
                head,
                sum(each.units for each in own if each.head >= head),
                min((sum(units for at, units in lot if at >= head) for lot in lots), default=0.0),
            )
            for head in heads
        ]

    def after(self, more: int) -> float:
        """When it is done, with so many lots more."""
        if more and not self.able:
            return math.inf
        ends = (head + own + (self.count + more) * each for head, own, each in self.late if own or each)
        return max(ends, default=0.0)

    def take(self) -> None:
        self.count += 1


def _work(lots: Sequence[Lot], floor: Floor) -> list[_Work]:
    price = prices(floor.costs, floor.segments)
    of = [number for number, lot in enumerate(lots) for _ in lot.kinds]
    tasks = [
        Task(lot.cell.step, Action(lot.cell.segment, kind, lot.cell.micro), lot.again)
        for lot in lots
        for kind in lot.kinds
    ]
    those = [frozenset(able(lot, floor)) for lot in lots]
    costs = [price[task.action.kind][task.action.segment] for task in tasks]
    after = _after(tasks, [those[number] for number in of], floor)
    before: _Edges = [[] for _ in tasks]
    for number, some in enumerate(after):
        for to, way in some:
            before[to].append((number, way))
    heads, tails = _longest(before, after, costs), _longest(after, before, costs)
    return [_Work(of[n], those[of[n]], costs[n], heads[n], tails[n]) for n in range(len(tasks))]


def _after(tasks: Sequence[Task], able: Sequence[_Group], floor: Floor) -> _Edges:
    """What follows on each, and the way there, which takes time only between those who can not be the same."""
    send = sends(floor.costs, floor.segments)
    found: _Edges = [[] for _ in tasks]
    for source, target, boundary in edges(tasks):
        far = boundary is not None and not able[source] & able[target]
        found[source].append((target, send[boundary] if far and boundary is not None else 0.0))
    adds: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (step, action, again) in enumerate(tasks):
        if action.kind in RELEASE and not again:
            adds[step, action.segment].append(number)
    for number, (step, action, again) in enumerate(tasks):
        if not again:
            for source in adds.get((step - 1, action.segment), ()):
                found[source].append((number, 0.0))
    return found


def _longest(before: _Edges, after: _Edges, costs: Sequence[float]) -> list[float]:
    """The longest chain that leads to each task."""
    waits = [len(some) for some in before]
    found = [0.0] * len(waits)
    ready = [number for number, left in enumerate(waits) if not left]
    while ready:
        number = ready.pop()
        for to, way in after[number]:
            found[to] = max(found[to], found[number] + costs[number] + way)
            waits[to] -= 1
            if not waits[to]:
                ready.append(to)
    return found
