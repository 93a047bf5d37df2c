"""List scheduling of any work items on any holders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.recover.lineage import WorkItem, WorkKey
from culm.plan.recover.place_work import Placement, RunnerPool, place_items, whole_step_items
from culm.schedule import UNIT_COSTS, Costs, Kind

PlacementInputs = tuple[list[WorkItem], RunnerPool]


@st.composite
def placement_inputs(draw: st.DrawFn) -> PlacementInputs:
    """One or two whole steps on holders of any kind, including several stages on a worker."""
    stages, micros = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    workers = draw(st.integers(1, 5))
    someone = st.lists(st.integers(0, workers - 1), min_size=1, max_size=workers, unique=True)
    pool = RunnerPool(
        stages=stages,
        segments=stages * draw(st.integers(1, 2)),
        worker_count=workers,
        runners={stage: sorted(draw(someone)) for stage in range(stages)},
        costs=draw(st.sampled_from([UNIT_COSTS, Costs(forward=1.0, input=2.0, weight=0.5, send=0.25)])),
        synchronous_step=draw(st.booleans()),
        max_lead=draw(st.sampled_from([None, 0, 2])),
    )
    split = draw(st.booleans())
    items = [
        item
        for step in range(draw(st.integers(1, 2)))
        for item in whole_step_items(pool.segments, micros, split=split, step=step)
    ]
    return items, pool


@given(placement_inputs())
def test_every_action_is_placed_once_and_all_of_an_item_on_one_worker(inputs: PlacementInputs) -> None:
    items, pool = inputs
    placed = place_items(items, pool)
    where = {(task.step, task.action): slot for slot, row in enumerate(placed.task_lists) for task in row}
    assert sum(map(len, placed.task_lists)) == len(where) == sum(len(item.kinds) for item in items)
    for item in items:
        slots = {where[item.key.step, (item.key.segment, kind, item.key.micro)] for kind in item.kinds}  # type: ignore[index]
        assert len(slots) == 1
        assert slots <= set(pool.runners[item.key.segment % pool.stages])


@given(placement_inputs())
def test_the_lists_are_runnable_and_take_the_stated_time(inputs: PlacementInputs) -> None:
    """Compares with an independent simulation in which a worker runs its list as early as possible."""
    items, pool = inputs
    placed = place_items(items, pool)
    assert simulated_makespan(placed, pool) <= placed.makespan + 1e-9


def simulated_makespan(placed: Placement, pool: RunnerPool) -> float:
    """When the lists are finished. Raises AssertionError on a deadlock."""
    ends: dict[tuple[WorkKey, str], float] = {}
    free = [0.0] * pool.worker_count
    left = [list(row) for row in placed.task_lists]
    cost = {Kind.F: pool.costs.forward, Kind.I: pool.costs.input, Kind.W: pool.costs.weight}
    assert isinstance(pool.costs.input, float)
    assert isinstance(pool.costs.weight, float)
    cost[Kind.B] = pool.costs.input + pool.costs.weight
    send = pool.costs.send
    assert isinstance(send, float)
    while any(left):
        before = sum(map(len, left))
        for slot, row in enumerate(left):
            while row:
                step, (g, kind, micro), _ = row[0]
                key = WorkKey(step, g, micro or 0)
                needs = []
                if kind is Kind.F and g:
                    needs = [(key._replace(segment=g - 1), "F", send)]
                elif kind in (Kind.I, Kind.B):
                    needs = [(key, "F", 0.0)]
                    needs += [(key._replace(segment=g + 1), "I", send)] if g + 1 < pool.segments else []
                elif kind is Kind.W:
                    needs = [(key, "I", 0.0)]
                if not all((where, what) in ends for where, what, _ in needs):
                    break
                price = cost[kind]
                assert isinstance(price, float)
                free[slot] = max([free[slot], *(ends[where, what] + way for where, what, way in needs)]) + price
                ends[key, "I" if kind is Kind.B else str(kind)] = free[slot]
                row.pop(0)
        assert sum(map(len, left)) < before, f"nobody can go on: {[row[0] for row in left if row]}"
    return max(free)


@given(placement_inputs())
def test_no_worker_exceeds_max_lead(inputs: PlacementInputs) -> None:
    items, pool = inputs
    if pool.max_lead is None:
        return
    for row in place_items(items, pool).task_lists:
        live: Counter[int] = Counter()
        for task in row:
            live[task.action.segment] += (task.action.kind is Kind.F) - (task.action.kind in (Kind.I, Kind.B))
            assert live[task.action.segment] <= pool.segments - task.action.segment + pool.max_lead


@given(placement_inputs())
def test_a_stage_starts_no_later_step_before_the_older_one_is_summed(inputs: PlacementInputs) -> None:
    items, pool = inputs
    for row in place_items(items, pool).task_lists:
        newest: dict[int, int] = {}
        for task in row:
            stage = 0 if pool.synchronous_step else task.action.segment % pool.stages
            assert task.step >= newest.get(stage, 0)
            newest[stage] = task.step


def test_items_run_on_the_tape_holder_or_the_default_runner() -> None:
    pool = RunnerPool(stages=1, segments=1, worker_count=3, runners={0: (0, 1, 2)})
    items = [
        WorkItem(WorkKey(0, 0, 0), (Kind.I, Kind.W), tape_holder=2),
        WorkItem(WorkKey(0, 0, 1), (Kind.F, Kind.I, Kind.W)),
    ]
    placed = place_items(items, pool, {(0, 0): 0, (0, 1): 1})
    assert [len(row) for row in placed.task_lists] == [0, 3, 2]


def test_output_only_items_may_run_on_other_holders() -> None:
    """While the runner is busy, the shadow runs it."""
    pool = RunnerPool(stages=1, segments=1, worker_count=2, runners={0: (0,)}, other_holders={0: (1,)})
    items = [*whole_step_items(1, 3, split=True), WorkItem(WorkKey(0, 0, 3), (Kind.F,), output_only=True)]
    lists = place_items(items, pool).task_lists
    assert [task.output_only for task in lists[1]] == [True]
    assert not any(task.output_only for task in lists[0])


def test_work_that_several_workers_could_run_is_shared() -> None:
    pool = RunnerPool(stages=1, segments=1, worker_count=4, runners={0: (0, 1, 2, 3)})
    placed = place_items(whole_step_items(1, 8, split=True), pool)
    assert [len(row) for row in placed.task_lists] == [6] * 4
    assert placed.makespan == 6.0


def test_work_that_no_worker_can_run_is_an_assertion_error() -> None:
    with pytest.raises((AssertionError, KeyError)):
        place_items(
            [WorkItem(WorkKey(0, 0, 0), (Kind.F,))], RunnerPool(stages=1, segments=1, worker_count=1, runners={})
        )
