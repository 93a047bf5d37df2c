"""What can be said of a rest before it is placed, beside a search through all placements; and how lists get shorter."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from culm.plan.divide import able, divided
from culm.plan.edges import Task, edges
from culm.plan.least import outlook
from culm.plan.lineage import Cell, Lot
from culm.plan.place import Floor, Placed, best, place, whole_step
from culm.plan.shorten import shortened
from culm.schedule import Action, Kind

from .halted import Regrouped
from .test_plan_place import Given, run_times, steps
from .test_plan_recover import cases

KINDS = [(Kind.F, Kind.I, Kind.W), (Kind.F, Kind.I), (Kind.I, Kind.W), (Kind.W,)]


@st.composite
def small(draw: st.DrawFn) -> Given:
    """A few lots, of which some have a tape somewhere, on two or three workers that share in any way."""
    stages, workers = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    someone = st.lists(st.integers(0, workers - 1), min_size=1, max_size=workers, unique=True)
    runners = {stage: sorted(draw(someone)) for stage in range(stages)}
    lots: list[Lot] = []
    for micro, stage in product(range(2), range(stages)):
        kinds = draw(st.sampled_from(KINDS))
        holder = None if Kind.F in kinds else draw(st.sampled_from(runners[stage]))
        if sum(len(lot.kinds) for lot in lots) + len(kinds) <= 7:
            lots.append(Lot(Cell(0, stage, micro), kinds, Kind.W not in kinds, holder))
    return lots, Floor(stages=stages, segments=stages, workers=workers, runners=runners)


def shortest(lots: list[Lot], floor: Floor) -> float:
    """By trying everything: any task whose needs are met, on any worker that may run it, comes next."""
    tasks = [Task(0, Action(lot.cell.segment, kind, lot.cell.micro), lot.again) for lot in lots for kind in lot.kinds]
    lot_of = [number for number, lot in enumerate(lots) for _ in lot.kinds]
    before: dict[int, list[int]] = {number: [] for number in range(len(tasks))}
    for source, target, _ in edges(tasks):
        before[target].append(source)
    found = inf

    def go_on(ends: dict[int, float], free: dict[int, float], runner: dict[int, int]) -> None:
        nonlocal found
        if max(free.values()) >= found:
            return
        if len(ends) == len(tasks):
            found = max(free.values())
        for task in (t for t in range(len(tasks)) if t not in ends and all(b in ends for b in before[t])):
            lot = lot_of[task]
            for worker in (runner[lot],) if lot in runner else able(lots[lot], floor):
                end = max([free[worker], *(ends[b] for b in before[task])]) + 1.0
                go_on({**ends, task: end}, {**free, worker: end}, {**runner, lot: worker})

    go_on({}, dict.fromkeys(range(floor.workers), 0.0), {})
    return found


@given(small())
def test_nothing_is_done_before_the_bound(given: Given) -> None:
    lots, floor = given
    assert outlook(lots, floor).bound <= shortest(lots, floor) + 1e-9 <= best(lots, floor, {}).makespan + 2e-9


@given(cases())
def test_no_recovery_takes_less_than_its_bound(case: Regrouped) -> None:
    assert case.recovery.bound <= case.recovery.length + 1e-9


def test_a_worker_that_can_not_begin_at_once_and_lots_that_are_whole_count() -> None:
    """Two stages, one micro-batch: four actions follow on each other, and the first stage has its W to add."""
    floor = Floor(stages=2, segments=2, workers=2, runners={0: (0,), 1: (1,)})
    assert outlook(whole_step(2, 1, split=True), floor).bound == 5.0
    shared = Floor(stages=1, segments=1, workers=2, runners={0: (0, 1)})
    assert outlook(whole_step(1, 3, split=True), shared).bound == 6.0
    assert outlook([], shared).bound == 0.0


@given(small())
def test_work_is_divided_so_that_the_busiest_of_those_who_share_lots_of_one_size_has_least(given: Given) -> None:
    lots, floor = given
    lots = [Lot(lot.cell, KINDS[0]) for lot in lots]
    choices = [able(lot, floor) for lot in lots]
    least = min(max(Counter(chosen).values()) for chosen in product(*choices))
    home = divided(lots, floor)
    assert max(Counter(home.values()).values()) == least
    assert all(home[lot] in able(lot, floor) for lot in lots)


@given(steps())
def test_shortened_lists_hold_the_same_tasks_can_be_run_and_are_done_as_is_said(given: Given) -> None:
    lots, floor = given
    before = place(lots, floor)
    lists, end = shortened(before.lists, floor)
    assert [Counter(row) for row in lists] == [Counter(row) for row in before.lists]
    assert run_times(Placed(lists, end), floor) <= end + 1e-9
    for row in lists:
        assert [task.step for task in row] == sorted(task.step for task in row)


def test_what_a_busy_worker_waits_for_comes_to_the_front() -> None:
    """Worker 0 has four backwards to run, and all wait for worker 1, which would begin with what nobody waits for."""
    late = [Lot(Cell(0, 0, m), (Kind.I, Kind.W), holder=0) for m in (2, 3)]
    lots = [*late, *(Lot(Cell(0, 1, m), (Kind.F, Kind.I, Kind.W)) for m in range(4))]
    floor = Floor(stages=2, segments=2, workers=3, runners={0: (0,), 1: (1, 2)})
    home = {(1, 0): 1, (1, 1): 2, (1, 2): 1, (1, 3): 2}
    placed = place(lots, floor, home)
    _, end = shortened(placed.lists, floor)
    assert (placed.makespan, end) == (8.0, 6.0)
