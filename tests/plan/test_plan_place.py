"""List scheduling of any lots on any holders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.lineage import Cell, Lot
from culm.plan.place import Floor, Placed, place, whole_step
from culm.schedule import UNIT, Costs, Kind

Given = tuple[list[Lot], Floor]


@st.composite
def steps(draw: st.DrawFn) -> Given:
    """One or two whole steps on holders of any kind, several stages on a worker included."""
    stages, micros = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    workers = draw(st.integers(1, 5))
    someone = st.lists(st.integers(0, workers - 1), min_size=1, max_size=workers, unique=True)
    floor = Floor(
        stages=stages,
        segments=stages * draw(st.integers(1, 2)),
        workers=workers,
        runners={stage: sorted(draw(someone)) for stage in range(stages)},
        costs=draw(st.sampled_from([UNIT, Costs(forward=1.0, input=2.0, weight=0.5, send=0.25)])),
        joint=draw(st.booleans()),
        ahead=draw(st.sampled_from([None, 0, 2])),
    )
    split = draw(st.booleans())
    lots = [
        lot
        for step in range(draw(st.integers(1, 2)))
        for lot in whole_step(floor.segments, micros, split=split, step=step)
    ]
    return lots, floor


@given(steps())
def test_every_action_of_every_lot_is_placed_once_and_all_of_a_lot_on_one_worker(given: Given) -> None:
    lots, floor = given
    placed = place(lots, floor)
    where = {(task.step, task.action): slot for slot, row in enumerate(placed.lists) for task in row}
    assert sum(map(len, placed.lists)) == len(where) == sum(len(lot.kinds) for lot in lots)
    for lot in lots:
        slots = {where[lot.cell.step, (lot.cell.segment, kind, lot.cell.micro)] for kind in lot.kinds}  # type: ignore[index]
        assert len(slots) == 1
        assert slots <= set(floor.runners[lot.cell.segment % floor.stages])


@given(steps())
def test_the_lists_can_be_run_in_order_and_take_as_long_as_is_said(given: Given) -> None:
    """An independent clock: a worker runs its list as early as it can."""
    lots, floor = given
    placed = place(lots, floor)
    assert run_times(placed, floor) <= placed.makespan + 1e-9


def run_times(placed: Placed, floor: Floor) -> float:
    """When the lists are done. Raises AssertionError if somebody waits for ever."""
    ends: dict[tuple[Cell, str], float] = {}
    free = [0.0] * floor.workers
    left = [list(row) for row in placed.lists]
    cost = {Kind.F: floor.costs.forward, Kind.I: floor.costs.input, Kind.W: floor.costs.weight}
    assert isinstance(floor.costs.input, float)
    assert isinstance(floor.costs.weight, float)
    cost[Kind.B] = floor.costs.input + floor.costs.weight
    send = floor.costs.send
    assert isinstance(send, float)
    while any(left):
        before = sum(map(len, left))
        for slot, row in enumerate(left):
            while row:
                step, (g, kind, micro), _ = row[0]
                cell = Cell(step, g, micro or 0)
                needs = []
                if kind is Kind.F and g:
                    needs = [(cell._replace(segment=g - 1), "F", send)]
                elif kind in (Kind.I, Kind.B):
                    needs = [(cell, "F", 0.0)]
                    needs += [(cell._replace(segment=g + 1), "I", send)] if g + 1 < floor.segments else []
                elif kind is Kind.W:
                    needs = [(cell, "I", 0.0)]
                if not all((where, what) in ends for where, what, _ in needs):
                    break
                price = cost[kind]
                assert isinstance(price, float)
                free[slot] = max([free[slot], *(ends[where, what] + way for where, what, way in needs)]) + price
                ends[cell, "I" if kind is Kind.B else str(kind)] = free[slot]
                row.pop(0)
        assert sum(map(len, left)) < before, f"nobody can go on: {[row[0] for row in left if row]}"
    return max(free)


@given(steps())
def test_nobody_is_further_ahead_of_its_backwards_than_it_may_be(given: Given) -> None:
    lots, floor = given
    if floor.ahead is None:
        return
    for row in place(lots, floor).lists:
        live: Counter[int] = Counter()
        for task in row:
            live[task.action.segment] += (task.action.kind is Kind.F) - (task.action.kind in (Kind.I, Kind.B))
            assert live[task.action.segment] <= floor.segments - task.action.segment + floor.ahead


@given(steps())
def test_a_stage_that_has_a_step_to_add_up_begins_no_later_one(given: Given) -> None:
    lots, floor = given
    for row in place(lots, floor).lists:
        newest: dict[int, int] = {}
        for task in row:
            stage = 0 if floor.joint else task.action.segment % floor.stages
            assert task.step >= newest.get(stage, 0)
            newest[stage] = task.step


def test_a_lot_with_a_tape_runs_where_the_tape_is_and_one_without_at_home() -> None:
    floor = Floor(stages=1, segments=1, workers=3, runners={0: (0, 1, 2)})
    lots = [Lot(Cell(0, 0, 0), (Kind.I, Kind.W), holder=2), Lot(Cell(0, 0, 1), (Kind.F, Kind.I, Kind.W))]
    placed = place(lots, floor, {(0, 0): 0, (0, 1): 1})
    assert [len(row) for row in placed.lists] == [0, 3, 2]


def test_what_is_run_for_its_output_alone_may_run_on_a_holder_that_adds_nothing() -> None:
    """While the runner has other things to do, the shadow takes it."""
    floor = Floor(stages=1, segments=1, workers=2, runners={0: (0,)}, others={0: (1,)})
    lots = [*whole_step(1, 3, split=True), Lot(Cell(0, 0, 3), (Kind.F,), again=True)]
    lists = place(lots, floor).lists
    assert [task.again for task in lists[1]] == [True]
    assert not any(task.again for task in lists[0])


def test_work_that_several_could_do_is_shared() -> None:
    floor = Floor(stages=1, segments=1, workers=4, runners={0: (0, 1, 2, 3)})
    placed = place(whole_step(1, 8, split=True), floor)
    assert [len(row) for row in placed.lists] == [6] * 4
    assert placed.makespan == 6.0


def test_work_that_nobody_can_run_is_our_own_fault() -> None:
    with pytest.raises((AssertionError, KeyError)):
        place([Lot(Cell(0, 0, 0), (Kind.F,))], Floor(stages=1, segments=1, workers=1, runners={}))
