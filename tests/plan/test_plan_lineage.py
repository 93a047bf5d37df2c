"""What has to be run again: beside a search through all that could be run, which knows nothing of lineage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.lineage import Cell, Lot, Standing, lineage
from culm.schedule import Kind, generate

from .halted import Run, survivors

# What there is of a micro-batch in a segment: the five facts that actions need or make.
TAPE, HALF, OUTPUT, GRADIENT, ADDED = range(5)
Column = tuple[tuple[bool, ...], ...]
"""By segment: the five facts."""


def fewest(start: Column, split: bool) -> int:
    """How many actions it takes, at the least, until the gradient of each segment is in a sum: breadth first."""
    front, seen, count = {start}, {start}, 0
    while not any(all(facts[ADDED] for facts in column) for column in front):
        front = {after for column in front for after in moves(column, split)} - seen
        seen |= front
        count += 1
        assert front, f"{start} can not be completed"
    return count


def moves(column: Column, split: bool) -> Iterator[Column]:
    """Everything that one action could make of a column. A gradient is added once; a whole backward has no halves."""
    for g, (tape, half, _, _, added) in enumerate(column):
        fed = g == 0 or column[g - 1][OUTPUT]
        led = g == len(column) - 1 or column[g + 1][GRADIENT]
        if fed:
            yield changed(column, g, {TAPE: True, OUTPUT: True})
        if tape and led:
            yield changed(column, g, {TAPE: False, HALF: True, GRADIENT: True})
        if tape and led and not split and not added:
            yield changed(column, g, {TAPE: False, GRADIENT: True, ADDED: True})
        if half and not added:
            yield changed(column, g, {HALF: False, ADDED: True})


def changed(column: Column, g: int, facts: dict[int, bool]) -> Column:
    row = tuple(facts.get(number, value) for number, value in enumerate(column[g]))
    return (*column[:g], row, *column[g + 1 :])


def column_of(standings: dict[int, Standing], step: int, micro: int, segments: int) -> Column:
    """What the survivors have of a micro-batch."""

    def has(name: str, cell: Cell) -> bool:
        return any(cell in getattr(standing, name) for standing in standings.values())

    return tuple(
        (
            has("forwards", cell),
            has("halves", cell),
            has("outputs", cell),
            has("gradients", cell),
            has("summed", cell) or any((step, g) in standing.sums for standing in standings.values()),
        )
        for g in range(segments)
        for cell in [Cell(step, g, micro)]
    )


def standing_of(column: Column) -> Standing:
    """The same facts as the report of one survivor."""
    cells = [(Cell(0, g, 0), facts) for g, facts in enumerate(column)]
    lists = [tuple(cell for cell, facts in cells if facts[number]) for number in range(5)]
    return Standing(forwards=lists[0], halves=lists[1], outputs=lists[2], gradients=lists[3], summed=lists[4])


def size(lots: tuple[Lot, ...]) -> int:
    return sum(len(lot.kinds) for lot in lots)


def completes(column: Column, lots: tuple[Lot, ...]) -> bool:
    """Whether running just these lots, each when it can be, adds every gradient, and adds it once."""
    left = {lot: list(lot.kinds) for lot in lots}
    moved = True
    while moved:
        moved = False
        for lot, kinds in left.items():
            g = lot.cell.segment
            for kind in list(kinds):
                fed = g == 0 or column[g - 1][OUTPUT]
                led = g == len(column) - 1 or column[g + 1][GRADIENT]
                if not {Kind.F: fed, Kind.W: True}.get(kind, led):
                    break
                facts = {Kind.F: {OUTPUT: True}, Kind.I: {GRADIENT: True}, Kind.W: {ADDED: True}}.get(kind)
                facts = facts or {GRADIENT: True, ADDED: True}
                assert not (facts.get(ADDED) and column[g][ADDED]), f"{lot} adds a gradient twice"
                column = changed(column, g, facts)
                kinds.pop(0)
                moved = True
    return not any(left.values()) and all(facts[ADDED] for facts in column)


FACTS = tuple(product((False, True), repeat=5))
KEPT = tuple(facts for facts in FACTS if facts[GRADIENT] or not facts[HALF])
"""Facts in which whoever has half a backward has kept the gradient that it made, as workers do."""


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_of_two_segments_every_standing_there_could_be_is_completed_by_the_fewest_actions(split: bool) -> None:
    for column in product(FACTS if split else KEPT, repeat=2):
        found = lineage({0: standing_of(column)}, [0], segments=2, micro_batches=1, split=split)
        assert size(found.lots) == fewest(column, split), column
        assert completes(column, found.lots), column


@given(st.lists(st.sampled_from(FACTS), min_size=3, max_size=4))
def test_any_standing_of_more_segments_is_completed_by_the_fewest_actions(facts: list[tuple[bool, ...]]) -> None:
    column = tuple(facts)
    found = lineage({0: standing_of(column)}, [0], segments=len(column), micro_batches=1)
    assert size(found.lots) == fewest(column, True)
    assert completes(column, found.lots)


@given(st.lists(st.sampled_from(KEPT), min_size=3, max_size=4))
def test_the_same_holds_where_backward_is_not_split(facts: list[tuple[bool, ...]]) -> None:
    column = tuple(facts)
    found = lineage({0: standing_of(column)}, [0], segments=len(column), micro_batches=1, split=False)
    assert size(found.lots) == fewest(column, False)
    assert completes(column, found.lots)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 2, 2), (2, 2, 4), (2, 3, 4), (3, 2, 5)]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb"]),
    shadows=st.booleans(),
)
def test_what_a_halted_run_leaves_behind_is_completed_by_the_fewest_actions(
    seed: int, shape: tuple[int, int, int], schedule: str, shadows: bool
) -> None:
    """Two steps may be open. Micro-batches and steps do not meet, so each is searched by itself."""
    D, P, M = shape
    shadows = shadows or D == 1
    plan = generate(schedule, pipelines=D, stages=P, micro_batches=M)
    dice = Random(seed)
    left = survivors(Run(plan, dice, shadows=shadows).halt(), plan, dice)
    split = schedule == "zb"
    found = lineage(left, [0, 1], segments=P, micro_batches=M, split=split)
    for step, micro in product((0, 1), range(M)):
        column = column_of(left, step, micro, P)
        lots = tuple(lot for lot in found.lots if (lot.cell.step, lot.cell.micro) == (step, micro))
        assert size(lots) == fewest(column, split), (step, micro, column)
        assert completes(column, lots), (step, micro, column)


def test_where_nothing_is_missing_nothing_is_run() -> None:
    sums = Standing(sums=((0, 0), (0, 1), (0, 2)))
    assert lineage({0: sums}, [0], segments=3, micro_batches=4).lots == ()


def test_where_nothing_is_left_everything_is_run() -> None:
    lots = lineage({0: Standing()}, [0], segments=3, micro_batches=2).lots
    assert {lot.cell: lot.kinds for lot in lots} == {
        Cell(0, g, m): (Kind.F, Kind.I, Kind.W) for g in range(3) for m in range(2)
    }
    assert not any(lot.again for lot in lots)


def test_a_gradient_that_is_in_a_sum_is_not_added_again_though_its_output_is_asked_for() -> None:
    """The first stage is lost with its sum; what the second gave it is gone with it."""
    have = Standing(summed=(Cell(0, 1, 0),))
    lots = lineage({1: have}, [0], segments=2, micro_batches=1).lots
    assert {(lot.cell.segment, lot.kinds, lot.again) for lot in lots} == {
        (0, (Kind.F, Kind.I, Kind.W), False),
        (1, (Kind.F, Kind.I), True),
    }


def test_a_tape_binds_its_lot_to_the_worker_that_has_it() -> None:
    have = {3: Standing(forwards=(Cell(0, 0, 0),)), 5: Standing(halves=(Cell(0, 1, 0),), gradients=(Cell(0, 1, 0),))}
    lots = lineage(have, [0], segments=2, micro_batches=1).lots
    assert {(lot.cell.segment, lot.kinds, lot.holder) for lot in lots} == {
        (0, (Kind.I, Kind.W), 3),
        (1, (Kind.W,), 5),
    }
