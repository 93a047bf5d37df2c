"""Handing over: what a worker that has notice still ends, and to whom it gives what it has. Pure.

Sums and kept tensors can be given away, tapes can not. So a worker that is about to go begins nothing, ends the
micro-batches whose tapes it has, which everybody runs first for its sake, gives its sums to one that stays, and goes:
nobody waits for the end of the step. A micro-batch that it has no time for is begun anew by another holder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from culm.plan.edges import Task
from culm.plan.least import Outlook
from culm.plan.lineage import Cell, Lot, Missing, Standing
from culm.plan.place import Floor, best
from culm.schedule import Kind

T = TypeVar("T")
Part = tuple[int, int, int, int]
"""(step, segment, slot that gives, slot that takes): a sum that changes hands."""


@dataclass(frozen=True)
class Ordered:
    """Lists by worker, when all of it is done, and when those that leave have done theirs."""

    lists: tuple[tuple[Task, ...], ...]
    makespan: float
    gone_by: float = 0.0


Attempt = Callable[[Mapping[int, Standing]], tuple[Missing, Ordered]]


def in_time(
    standings: Mapping[int, Standing], leaving: Collection[int], patience: float, attempt: Attempt
) -> tuple[Missing, Ordered]:
    """What `attempt` makes of the standings if those that leave end as many of the micro-batches that they have begun
    as they can within their patience, in the unit of the costs: the older steps first, then what lacks least."""
    tapes = sorted(_tapes(standings, leaving), key=lambda tape: (tape[1].step, *tape))

    def with_first(count: int) -> tuple[Missing, Ordered]:
        return attempt(_with_tapes(standings, leaving, tapes[:count]))

    found = with_first(len(tapes))
    if found[1].gone_by <= patience:
        return found
    fits, too_many, found = 0, len(tapes), with_first(0)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        tried = with_first(middle)
        if tried[1].gone_by <= patience:
            fits, found = middle, tried
        else:
            too_many = middle
    return found


def _tapes(standings: Mapping[int, Standing], leaving: Collection[int]) -> Iterator[tuple[bool, Cell, int]]:
    """(whether all of its backward is to come, cell, slot) of each tape that only somebody who leaves has."""
    staying = [standing for slot, standing in standings.items() if slot not in leaving]
    known = {cell for each in staying for cells in (each.forwards, each.halves, each.summed) for cell in cells}
    for slot in set(leaving) & standings.keys():
        yield from ((False, cell, slot) for cell in standings[slot].halves if cell not in known)
        yield from ((True, cell, slot) for cell in standings[slot].forwards if cell not in known)


def _with_tapes(
    standings: Mapping[int, Standing], leaving: Collection[int], tapes: Collection[tuple[bool, Cell, int]]
) -> dict[int, Standing]:
    """The standings in which those that leave have these tapes alone."""
    found = dict(standings)
    for slot in set(leaving) & standings.keys():
        mine = {whole: tuple(cell for w, cell, at in tapes if (w, at) == (whole, slot)) for whole in (True, False)}
        found[slot] = msgspec.structs.replace(standings[slot], forwards=mine[True], halves=mine[False])
    return found


def order(
    lots: Sequence[Lot],
    floor: Floor,
    home: Mapping[tuple[int, int], int],
    leaving: Collection[int],
    rest: Outlook,
) -> Ordered:
    """Place the lots; of each step those first that somebody who leaves has to end, or waits for. `rest` is what
    can be said of them before."""
    if not any(lot.holder in leaving for lot in lots):
        placed = best(lots, floor, home, rest)
        return Ordered(placed.lists, placed.makespan)
    lists: list[list[Task]] = [[] for _ in range(floor.workers)]
    end = gone_by = 0.0
    for group in _groups(lots, leaving):
        placed = best(group, floor, home)
        end += placed.makespan
        gone_by = end if any(lot.holder in leaving for lot in group) else gone_by
        for row, more in zip(lists, placed.lists, strict=True):
            row.extend(more)
    return Ordered(tuple(map(tuple, lists)), end, gone_by)


def _groups(lots: Sequence[Lot], leaving: Collection[int]) -> Iterator[list[Lot]]:
    """By step: first the micro-batches that somebody who leaves has begun, from its segment on, then all else. None of
    the first needs any of the others: micro-batches do not meet, and gradients come from the segments after."""
    begun: dict[tuple[int, int], int] = {}
    for step, segment, micro in (lot.cell for lot in lots if lot.holder in leaving):
        begun[step, micro] = min(segment, begun.get((step, micro), segment))
    for step in sorted({lot.cell.step for lot in lots}):
        now = [lot for lot in lots if lot.cell.step == step]
        first = [lot for lot in now if lot.again or lot.cell.segment >= begun.get((step, lot.cell.micro), math.inf)]
        chosen = set(first)
        yield from filter(None, (first, [lot for lot in now if lot not in chosen]))


def staying_first(found: Missing, leaving: Collection[int]) -> Missing:
    """The same, where a thing that several have is taken from those that stay."""

    def sort(things: Mapping[T, tuple[int, ...]]) -> dict[T, tuple[int, ...]]:
        return {thing: tuple(sorted(slots, key=lambda slot: slot in leaving)) for thing, slots in things.items()}

    return Missing(found.lots, sort(found.outputs), sort(found.gradients), sort(found.sums))


def parts(
    standings: Mapping[int, Standing],
    lists: Sequence[Sequence[Task]],
    complete: Collection[tuple[int, int]],
    runners: Mapping[int, Sequence[Sequence[int]]],
    leaving: Collection[int],
) -> tuple[Part, ...]:
    """What those that leave have added up, or will have, of sums that are not complete: each goes to a runner."""
    found: list[Part] = []
    for slot in sorted(set(leaving) & standings.keys()):
        mine = {(cell.step, cell.segment) for cell in standings[slot].summed}
        mine |= {(t.step, t.action.segment) for t in lists[slot] if t.action.kind in (Kind.W, Kind.B) and not t.again}
        found += [(step, g, slot, runners[step][g][0]) for step, g in sorted(mine - set(complete))]
    return tuple(found)
