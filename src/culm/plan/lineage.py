"""Lineage: what has to be run, and run again, so that every step that is open can be completed. Pure.

Survivors report what they have finished, summed and kept. From what is missing the graph of the step is followed
backwards: a gradient that died with its owner asks for its W, a W for the tape of its F and for a gradient from the
segment after, these for what other segments made. Micro-batches and steps do not meet on the way, so each is looked at
by itself, and the result is the smallest set there is: nothing is in it that something missing does not ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from culm.schedule import Kind

T = TypeVar("T")
NOTHING: Mapping[int, Collection[int]] = {}


class Cell(NamedTuple):
    """A micro-batch of a step in a segment."""

    step: int
    segment: int
    micro: int


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What one survivor has of the steps that are open. All of it outlives the epoch that it was made in."""

    versions: dict[int, int] = {}
    """By stage that it holds: the step that its weights are for. Weights of open steps before that are kept too."""
    since: dict[int, int] = {}
    """By stage that came as a copy: the step that the copy was for. Of steps before it there are no weights here."""
    forwards: tuple[Cell, ...] = ()
    """F is done and its tape is here."""
    halves: tuple[Cell, ...] = ()
    """I is done too: the tape waits for W."""
    summed: tuple[Cell, ...] = ()
    """W is in the sum here, which has not been added up with the others' yet."""
    outputs: tuple[Cell, ...] = ()
    """What F made lies here."""
    gradients: tuple[Cell, ...] = ()
    """What I (or B) made lies here."""
    sums: tuple[tuple[int, int], ...] = ()
    """(step, segment): the complete sum is here."""
    shaped: int = 0
    """The epoch whose shape all this is numbered by (see Epoch.shaped)."""
    layers: dict[int, tuple[int, ...]] = {}
    """By step that weights are for: the layers that are here so, whatever the shape."""


class Lot(NamedTuple):
    """What is to be run for a cell, in this order and by one worker."""

    cell: Cell
    kinds: tuple[Kind, ...]
    again: bool = False
    """For its output alone: the gradient of the weights is in a sum already and must not be added twice."""
    holder: int | None = None
    """The worker that has the tape which this goes on from; None: any holder of the segment can begin it."""


@dataclass(frozen=True)
class Missing:
    """What the closure found: lots, in no order that matters, and where everything that they start from lies."""

    lots: tuple[Lot, ...]
    outputs: Mapping[Cell, tuple[int, ...]]
    """Who keeps what F made."""
    gradients: Mapping[Cell, tuple[int, ...]]
    sums: Mapping[tuple[int, int], tuple[int, ...]]
    """(step, segment): who has the complete sum."""


def lineage(
    standings: Mapping[int, Standing],
    steps: Iterable[int],
    *,
    segments: int,
    micro_batches: int,
    split: bool = True,
    dropped: Mapping[int, Collection[int]] = NOTHING,
) -> Missing:
    """The smallest set of actions that completes the steps, given what the survivors have, by worker.

    `split` says how a backward that is begun anew is run: as I and W, or as B. Micro-batches that are `dropped`, by
    step, ask for nothing. Where nobody holds a layer there is no answer to be had; that is for the caller to see
    beforehand.
    """
    have = _Have(standings)
    lots: list[Lot] = []
    for step in steps:
        for micro in (micro for micro in range(micro_batches) if micro not in dropped.get(step, ())):
            lots += _column(have, step, micro, segments, split)
    return Missing(tuple(lots), have.outputs, have.gradients, have.sums)


class _Have:
    """All standings, turned round: who has a thing."""

    def __init__(self, standings: Mapping[int, Standing]) -> None:
        self.forwards = _holders({worker: each.forwards for worker, each in standings.items()})
        self.halves = _holders({worker: each.halves for worker, each in standings.items()})
        self.summed = _holders({worker: each.summed for worker, each in standings.items()})
        self.outputs = _holders({worker: each.outputs for worker, each in standings.items()})
        self.gradients = _holders({worker: each.gradients for worker, each in standings.items()})
        self.sums = _holders({worker: each.sums for worker, each in standings.items()})


def _holders(things: Mapping[int, Iterable[T]]) -> dict[T, tuple[int, ...]]:
    found: dict[T, tuple[int, ...]] = {}
    for worker, held in sorted(things.items()):
        for thing in held:
            found[thing] = (*found.get(thing, ()), worker)
    return found


def _column(have: _Have, step: int, micro: int, segments: int, split: bool) -> list[Lot]:
    """One micro-batch of one step: gradients are asked for from the first segment up, outputs from the last down."""
    lots: list[Lot] = []
    forward = [False] * segments  # whether F is run for its tape
    asked = False  # whether the segment before runs a backward and so wants a gradient
    for segment in range(segments):
        cell = Cell(step, segment, micro)
        found = _backward(have, cell, asked, split)
        lots += found
        forward[segment] = any(Kind.F in lot.kinds for lot in found)
        asked = any(kind in (Kind.I, Kind.B) for lot in found for kind in lot.kinds)
    wanted = False
    for segment in reversed(range(segments)):
        cell = Cell(step, segment, micro)
        if wanted and not forward[segment] and cell not in have.outputs:
            lots.append(Lot(cell, (Kind.F,), again=True))
            forward[segment] = True
        wanted = forward[segment]
    return lots


def _backward(have: _Have, cell: Cell, asked: bool, split: bool) -> list[Lot]:
    """The lots of a cell that has a gradient to add, or to give to the segment before."""
    lots: list[Lot] = []
    whole = (Kind.I, Kind.W) if split else (Kind.B,)
    if cell not in have.summed and (cell.step, cell.segment) not in have.sums:
        if cell in have.halves:
            lots.append(Lot(cell, (Kind.W,), holder=have.halves[cell][0]))
        elif cell in have.forwards:
            lots.append(Lot(cell, whole, holder=have.forwards[cell][0]))
        else:
            lots.append(Lot(cell, (Kind.F, *whole)))
    given = cell in have.gradients or any(kind in (Kind.I, Kind.B) for lot in lots for kind in lot.kinds)
    if asked and not given:
        tape = have.forwards.get(cell)
        if tape:
            lots.append(Lot(cell, (Kind.I,), again=True, holder=tape[0]))
        else:
            lots.append(Lot(cell, (Kind.F, Kind.I), again=True))
    return lots
