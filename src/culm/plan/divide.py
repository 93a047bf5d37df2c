"""Dividing work that several could do, so that the busiest has as little as can be; before anything has a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule.timing import prices

if TYPE_CHECKING:
    from culm.plan.lineage import Lot
    from culm.plan.place import Floor


class _Hop(NamedTuple):
    """A lot that could pass from one worker to another."""

    source: int
    lot: Lot


def able(lot: Lot, floor: Floor) -> tuple[int, ...]:
    """Who could run a lot: who has its tape; else the runners of its stage and, for the output alone, any holder."""
    if lot.holder is not None:
        return (lot.holder,)
    stage = lot.cell.segment % floor.stages
    return (*floor.runners[stage], *(floor.others.get(stage, ()) if lot.again else ()))


def divided(lots: Sequence[Lot], floor: Floor, idle: Mapping[int, float] = MappingProxyType({})) -> dict[Lot, int]:
    """A worker for every lot that no tape binds. `idle` is what a worker spends without work in any case.

    Each goes to whoever has least so far. Then the busiest worker passes a lot on, and who gets it another one if need
    be, and so on, as long as nobody on the way has as much as the busiest had. For lots of one size nothing is better.
    """
    division = _Division(lots, floor, idle)
    for _ in lots:
        if not division.relieve():
            break
    return division.home


class _Division:
    def __init__(self, lots: Sequence[Lot], floor: Floor, idle: Mapping[int, float]) -> None:
        price = prices(floor.costs, floor.segments)
        self.size = {lot: sum(price[kind][lot.cell.segment] for kind in lot.kinds) for lot in lots}
        self.able = {lot: able(lot, floor) for lot in lots}
        self.loads: defaultdict[int, float] = defaultdict(float, idle)
        self.home: dict[Lot, int] = {}
        self.has: defaultdict[int, list[Lot]] = defaultdict(list)
        for lot in lots:
            if lot.holder is not None:
                self.loads[lot.holder] += self.size[lot]
        for lot in sorted((lot for lot in lots if lot.holder is None), key=_turn):
            self._give(lot, min(self.able[lot], key=lambda worker: (self.loads[worker], worker)))

    def _give(self, lot: Lot, worker: int) -> None:
        self.home[lot] = worker
        self.loads[worker] += self.size[lot]
        self.has[worker].append(lot)

    def _take(self, lot: Lot) -> None:
        worker = self.home[lot]
        self.loads[worker] -= self.size[lot]
        self.has[worker].remove(lot)

    def relieve(self) -> bool:
        """Take work from the busiest, by the shortest chain of hops that helps; False: there is none."""
        if not self.loads:
            return False
        busiest = max(self.loads, key=lambda worker: (self.loads[worker], -worker))
        came: dict[int, _Hop | None] = {busiest: None}
        front = deque([busiest])
        while front:
            worker = front.popleft()
            for lot in self.has[worker]:
                for other in self.able[lot]:
                    if other in came:
                        continue
                    came[other] = _Hop(worker, lot)
                    front.append(other)
                    chain = self._chain(came, other)
                    if self._helps(chain, busiest):
                        self._pass_on(chain)
                        return True
        return False

    def _chain(self, came: Mapping[int, _Hop | None], to: int) -> list[tuple[Lot, int]]:
        """(lot, who gets it), from the last hop to the first."""
        found = []
        while (hop := came[to]) is not None:
            found.append((hop.lot, to))
            to = hop.source
        return found

    def _helps(self, chain: Sequence[tuple[Lot, int]], busiest: int) -> bool:
        gains: defaultdict[int, float] = defaultdict(float)
        for lot, to in chain:
            gains[to] += self.size[lot]
            gains[self.home[lot]] -= self.size[lot]
        return all(self.loads[worker] + gain < self.loads[busiest] - 1e-12 for worker, gain in gains.items())

    def _pass_on(self, chain: Sequence[tuple[Lot, int]]) -> None:
        for lot, to in chain:
            self._take(lot)
            self._give(lot, to)


def _turn(lot: Lot) -> tuple[int, int, int, bool]:
    step, segment, micro = lot.cell
    return step, micro, segment, lot.again
