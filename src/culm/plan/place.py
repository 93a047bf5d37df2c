"""List scheduling of any set of work on any set of holders: the rest of a step after a loss, or a whole step on workers
that stand in for others. Whenever a worker is free it takes the best action that it can start: of the older step
first, then what another segment waits for, and W last; or, by the other rule, what most work is yet to follow on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from culm.plan.divide import able, divided
from culm.plan.edges import Task
from culm.plan.least import Outlook
from culm.plan.lineage import Cell, Lot
from culm.plan.shorten import shortened
from culm.schedule import UNIT, Action, Costs, Kind
from culm.schedule.timing import prices, sends

_RANK = {Kind.I: 0, Kind.B: 0, Kind.F: 1, Kind.W: 2}
_Ready: TypeAlias = tuple[tuple[float, ...], int]
"""What a task is ordered by, and the number of its lot."""
_Made: TypeAlias = tuple[Cell, bool]
"""What another segment takes: (cell, whether it is the output of F)."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Where work can be placed."""

    stages: int
    segments: int
    workers: int
    runners: Mapping[int, Sequence[int]]
    """By stage: the workers that add to its sums."""
    others: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By stage: further holders, which can run things for their output alone."""
    guests: Collection[int] = ()
    """Workers that run only what a tape binds to them."""
    costs: Costs = UNIT
    joint: bool = False
    """Whether a step ends for all stages together, because gradients are clipped by the norm of all."""
    ahead: int | None = None
    """How many forwards more than 1F1B a worker may be ahead of its backwards in a segment; None: any number."""


@dataclass(frozen=True)
class Placed:
    """Lists by worker, and when all of it is done."""

    lists: tuple[tuple[Task, ...], ...]
    makespan: float


def place(
    lots: Sequence[Lot], floor: Floor, home: Mapping[tuple[int, int], int] | None = None, *, by_chain: bool = False
) -> Placed:
    """Give every lot to a worker that may run it, in an order that can not deadlock.

    `home` names, by (segment, micro-batch), the worker that runs what no tape binds to another. `by_chain` prefers the
    action that the longest chain of others hangs on.
    """
    return _Pass(_Given(lots, floor), _homes(lots, home or {}), by_chain).run()


_UNKNOWN = Outlook()


def best(lots: Sequence[Lot], floor: Floor, home: Mapping[tuple[int, int], int], rest: Outlook = _UNKNOWN) -> Placed:
    """The shortest of several passes, by both rules: with everything at home that is at home with its own stage, with
    nothing at home, and with the work divided evenly beforehand; and these once more with their lists shortened. The
    first of equals is taken, and nothing more is tried once one comes to the bound."""
    own = {cell: worker for cell, worker in home.items() if worker % floor.stages == cell[0] % floor.stages}
    found: list[Placed] = []
    for placed in _tries(lots, floor, own, rest, found):
        found.append(placed)
        if placed.makespan <= rest.bound + 1e-9:
            break
    return min(found, key=lambda placed: placed.makespan)


def _tries(
    lots: Sequence[Lot], floor: Floor, own: Mapping[tuple[int, int], int], rest: Outlook, found: Sequence[Placed]
) -> Iterator[Placed]:
    given = _Given(lots, floor)
    tried: list[dict[Lot, int]] = []
    for way in ("own", "anywhere", "divided"):
        homes = _homes(lots, own) if way == "own" else divided(lots, floor, rest.idle) if way == "divided" else {}
        for by_chain in (False, True) if homes not in tried else ():
            yield _Pass(given, homes, by_chain).run()
        tried.append(homes)
    for lists in dict.fromkeys(placed.lists for placed in sorted(found, key=lambda placed: placed.makespan)):
        yield Placed(*shortened(lists, floor, rest.bound))


def _homes(lots: Sequence[Lot], home: Mapping[tuple[int, int], int]) -> dict[Lot, int]:
    return {lot: home[lot.cell[1:]] for lot in lots if lot.holder is None and lot.cell[1:] in home}


class _Given:
    """The lots, and what any pass over them goes by."""

    def __init__(self, lots: Sequence[Lot], floor: Floor) -> None:
        self.lots, self.floor = lots, floor
        self.price = prices(floor.costs, floor.segments)
        self.send = sends(floor.costs, floor.segments)
        made = {(lot.cell, kind is Kind.F) for lot in lots for kind in lot.kinds if kind in (Kind.F, Kind.I, Kind.B)}
        wanted = ([self._needs(lot.cell, kind) for kind in lot.kinds] for lot in lots)
        self.needs = [[each if each in made else None for each in some] for some in wanted]
        """By lot and place in it: what another one makes; what nobody makes is there already."""

    def _needs(self, cell: Cell, kind: Kind) -> _Made | None:
        step, segment, micro = cell
        if kind is Kind.F:
            return (Cell(step, segment - 1, micro), True) if segment else None
        if kind in (Kind.I, Kind.B) and segment + 1 < self.floor.segments:
            return Cell(step, segment + 1, micro), False
        return None

    @cached_property
    def chains(self) -> dict[tuple[int, int], float]:
        """By lot and place in it: how long the chain of actions is that begins there."""
        takers: dict[_Made, list[tuple[int, int]]] = {}
        for number, some in enumerate(self.needs):
            for index, needs in enumerate(some):
                if needs is not None:
                    takers.setdefault(needs, []).append((number, index))
        found: dict[tuple[int, int], float] = {}

        def chain(number: int, index: int) -> float:
            if (number, index) not in found:
                lot = self.lots[number]
                kind = lot.kinds[index]
                after = [(number, index + 1)] if index + 1 < len(lot.kinds) else []
                after += takers.get((lot.cell, kind is Kind.F), []) if kind is not Kind.W else []
                price = self.price[kind][lot.cell.segment]
                found[number, index] = price + max((chain(*each) for each in after), default=0.0)
            return found[number, index]

        for number, lot in enumerate(self.lots):
            for index in range(len(lot.kinds)):
                chain(number, index)
        return found


class _Pass:
    """A simulation. Events are (time, number, what): that a worker is free, or that a lot may go on."""

    def __init__(self, given: _Given, home: Mapping[Lot, int], by_chain: bool = False) -> None:
        lots, floor = given.lots, given.floor
        self.lots, self.floor, self.home = lots, floor, home
        self.price, self.send, self.needs = given.price, given.send, given.needs
        self.chains = given.chains if by_chain else None
        self.at = [0] * len(lots)
        self.runner: list[int | None] = [lot.holder for lot in lots]
        self.made: dict[_Made, float] = {}
        self.open = Counter((lot.cell.step, self._stage(lot)) for lot in lots if not lot.again)
        self.live: Counter[tuple[int, int]] = Counter()
        self.lists: list[list[Task]] = [[] for _ in range(floor.workers)]
        self.free = {w for held in (floor.runners, floor.others) for ws in held.values() for w in ws}
        self.free |= {*floor.guests}
        self.bound: dict[int, list[_Ready]] = {worker: [] for worker in self.free}
        self.shared: dict[tuple[int, ...], list[_Ready]] = {}
        self.blocked: list[int] = []
        self.waiting: dict[_Made, list[int]] = {}
        self.events: list[tuple[float, int, int, int]] = []
        self.numbers = count()
        self.end = 0.0

    def _stage(self, lot: Lot) -> int:
        return lot.cell.segment % self.floor.stages

    def run(self) -> Placed:
        for number in range(len(self.lots)):
            self._offer(number, 0.0)
        self._dispatch(0.0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, worker, number = heappop(self.events)
                if worker >= 0:
                    self.free.add(worker)
                else:
                    self._offer(number, now)
            self._dispatch(now)
        stuck = [lot for lot, at in zip(self.lots, self.at, strict=True) if at < len(lot.kinds)]
        assert not stuck, f"nobody can run {stuck[0]}"
        return Placed(tuple(map(tuple, self.lists)), self.end)

    def _offer(self, number: int, now: float) -> None:
        """Queue the next action of a lot if all that it needs is there; else note what it waits for."""
        lot = self.lots[number]
        if self.at[number] == len(lot.kinds):
            return
        kind = lot.kinds[self.at[number]]
        if kind is Kind.F and self._shut(lot):
            self.blocked.append(number)
            return
        needed = self.needs[number][self.at[number]]
        if needed is not None:
            ready = self.made.get(needed)
            if ready is None:
                self.waiting.setdefault(needed, []).append(number)
                return
            if ready > now:
                heappush(self.events, (ready, next(self.numbers), -1, number))
                return
        self._queue(number, kind)

    def _shut(self, lot: Lot) -> bool:
        """Whether an older step has to be added up first, in this stage or in all."""
        step, stage = lot.cell.step, self._stage(lot)
        return any(
            left and older < step and (self.floor.joint or of == stage) for (older, of), left in self.open.items()
        )

    def _queue(self, number: int, kind: Kind) -> None:
        lot = self.lots[number]
        rank = _RANK[kind] if self.chains is None else -self.chains[number, self.at[number]]
        order = (lot.cell.step, rank, lot.cell.micro, number)
        worker = self.runner[number]
        if worker is None:
            worker, those = self.home.get(lot), able(lot, self.floor)
            if worker not in those:
                heappush(self.shared.setdefault(those, []), (order, number))
                return
        heappush(self.bound[worker], (order, number))

    def _dispatch(self, now: float) -> None:
        """Who has run least chooses first among those that could share work."""
        for worker in sorted(self.free, key=lambda worker: (len(self.lists[worker]), worker)):
            queue = self._best(worker)
            if queue is not None:
                self._start(worker, heappop(queue)[1], now)

    def _best(self, worker: int) -> list[_Ready] | None:
        own = self.bound[worker]
        queues = [own] if own else []
        queues += [queue for those, queue in self.shared.items() if queue and worker in those]
        if self.floor.ahead is not None:
            queues = [queue for queue in queues if self._has_room(worker, queue[0][1])]
            if not queues and own:
                return self._past_forwards(worker)
        return min(queues, key=lambda queue: queue[0]) if len(queues) > 1 else queues[0] if queues else None

    def _has_room(self, worker: int, number: int) -> bool:
        lot = self.lots[number]
        if self.floor.ahead is None or lot.kinds[self.at[number]] is not Kind.F:
            return True
        stages = self.floor.segments - lot.cell.segment
        return self.live[worker, lot.cell.segment] < stages + self.floor.ahead

    def _past_forwards(self, worker: int) -> list[_Ready] | None:
        """The forwards in front have no room: take what can be run behind them."""
        queue = self.bound[worker]
        behind = [entry for entry in queue if self._has_room(worker, entry[1])]
        if not behind:
            return None
        first = min(behind)
        queue.remove(first)
        return [first]

    def _start(self, worker: int, number: int, now: float) -> None:
        lot = self.lots[number]
        kind = lot.kinds[self.at[number]]
        end = now + self.price[kind][lot.cell.segment]
        self.runner[number] = worker
        self.at[number] += 1
        self.lists[worker].append(Task(lot.cell.step, Action(lot.cell.segment, kind, lot.cell.micro), lot.again))
        self.live[worker, lot.cell.segment] += (kind is Kind.F) - (kind in (Kind.I, Kind.B))
        self.free.discard(worker)
        self.end = max(self.end, end)
        heappush(self.events, (end, next(self.numbers), worker, number))
        heappush(self.events, (end, next(self.numbers), -1, number))
        if kind is Kind.W:
            self._added(lot, end)
        else:
            self._hand_on(lot, kind, end)
        if kind is Kind.B:
            self._added(lot, end)

    def _hand_on(self, lot: Lot, kind: Kind, end: float) -> None:
        forward = kind is Kind.F
        segment = lot.cell.segment
        crosses = segment + 1 < self.floor.segments if forward else segment > 0
        made = end + (self.send[segment if forward else segment - 1] if crosses else 0.0)
        self.made[lot.cell, forward] = made
        for number in self.waiting.pop((lot.cell, forward), ()):
            heappush(self.events, (made, next(self.numbers), -1, number))

    def _added(self, lot: Lot, end: float) -> None:
        """A gradient is in the sum; the last one of a step opens the next for the forwards that were held back."""
        if lot.again:
            return
        self.open[lot.cell.step, self._stage(lot)] -= 1
        if not self.open[lot.cell.step, self._stage(lot)]:
            for number in self.blocked:
                heappush(self.events, (end, next(self.numbers), -1, number))
            self.blocked = []


def whole_step(segments: int, micro_batches: int, *, split: bool, step: int = 0) -> list[Lot]:
    """Everything there is to do in a step."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    return [Lot(Cell(step, g, m), kinds) for m in range(micro_batches) for g in range(segments)]
