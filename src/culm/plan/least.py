"""How soon the rest of the open steps could be done at the earliest, whoever runs what in which order. Pure.

For a group of workers, and what is left to do that nobody else could: it can not begin before the shortest chain that
leads to it, takes at least its work spread evenly over the group, and the shortest chain that follows on it is yet to
come. The largest of these over groups, and over the parts of the work with longer chains, is a lower bound. That lots
are whole is looked at, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
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


def least(lots: Sequence[Lot], floor: Floor) -> float:
    """No placement of these lots is done earlier. Backwards should come in halves: whole ones only take longer."""
    work = _work(lots, floor)
    chain = max((each.head + each.units + each.tail for each in work), default=0.0)
    by_group: defaultdict[_Group, list[_Work]] = defaultdict(list)
    for each in work:
        by_group[each.able].append(each)
    return max([chain, *(_of_group(group, by_group) for group in _groups(by_group))])


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
    found = min(each.head for each in work) + _packed(work, group) + tails[0]
    for head in {head for head, _ in units}:
        left = 0.0
        for tail in reversed(tails):
            left += sum(amount for (at, after), amount in units.items() if after == tail and at >= head)
            found = max(found, head + left / len(group) + tail) if left else found
    return found


def _packed(work: Sequence[_Work], group: _Group) -> float:
    """The busiest of a group when each lot is run by one of them, and all are as small as the smallest: then to give
    each to whoever has least is best."""
    loads = dict.fromkeys(group, 0.0)
    lots: defaultdict[int, float] = defaultdict(float)
    for each in work:
        if len(each.able) == 1:
            loads[min(each.able)] += each.units
        else:
            lots[each.lot] += each.units
    smallest = min(lots.values(), default=0.0)
    for _ in lots:
        loads[min(loads, key=loads.__getitem__)] += smallest
    return max(loads.values())


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
