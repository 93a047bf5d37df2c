"""The lower bound compared with a search over all placements; balancing and compacting of task lists."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from tests.plan.recover.interrupted_run import RecoveredRun
from tests.plan.recover.test_place_work import PlacementInputs, placement_inputs, simulated_makespan
from tests.plan.recover.test_recovery_plan import recovered_runs

from culm.plan.recover.balance_work import balance_items, possible_runners
from culm.plan.recover.compact_schedule import compact_schedule
from culm.plan.recover.lineage import WorkItem, WorkKey
from culm.plan.recover.place_work import Placement, RunnerPool, best_placement, place_items, whole_step_items
from culm.plan.recover.recovery_bound import recovery_bound
from culm.plan.recover.task_dependencies import StepTask, task_dependencies
from culm.schedule import Action, Kind

KINDS = [(Kind.F, Kind.I, Kind.W), (Kind.F, Kind.I), (Kind.I, Kind.W), (Kind.W,)]


@st.composite
def small_problems(draw: st.DrawFn) -> PlacementInputs:
    """A few items, some with a tape somewhere, on two or three workers that share them in any way."""
    stages, workers = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    someone = st.lists(st.integers(0, workers - 1), min_size=1, max_size=workers, unique=True)
    runners = {stage: sorted(draw(someone)) for stage in range(stages)}
    items: list[WorkItem] = []
    for micro, stage in product(range(2), range(stages)):
        kinds = draw(st.sampled_from(KINDS))
        holder = None if Kind.F in kinds else draw(st.sampled_from(runners[stage]))
        if sum(len(item.kinds) for item in items) + len(kinds) <= 7:
            items.append(WorkItem(WorkKey(0, stage, micro), kinds, Kind.W not in kinds, holder))
    return items, RunnerPool(stages=stages, segments=stages, worker_count=workers, runners=runners)


def shortest_makespan(items: list[WorkItem], pool: RunnerPool) -> float:
    """Exhaustive search: any task whose inputs are available may come next, on any worker that may run it."""
    tasks = [
        StepTask(0, Action(item.key.segment, kind, item.key.micro), item.output_only)
        for item in items
        for kind in item.kinds
    ]
    lot_of = [number for number, item in enumerate(items) for _ in item.kinds]
    before: dict[int, list[int]] = {number: [] for number in range(len(tasks))}
    for source, target, _ in task_dependencies(tasks):
        before[target].append(source)
    result = inf

    def go_on(ends: dict[int, float], free: dict[int, float], runner: dict[int, int]) -> None:
        nonlocal result
        if max(free.values()) >= result:
            return
        if len(ends) == len(tasks):
            result = max(free.values())
        for task in (t for t in range(len(tasks)) if t not in ends and all(b in ends for b in before[t])):
            item = lot_of[task]
            for worker in (runner[item],) if item in runner else possible_runners(items[item], pool):
                end = max([free[worker], *(ends[b] for b in before[task])]) + 1.0
                go_on({**ends, task: end}, {**free, worker: end}, {**runner, item: worker})

    go_on({}, dict.fromkeys(range(pool.worker_count), 0.0), {})
    return result


@given(small_problems())
def test_no_placement_finishes_before_the_bound(inputs: PlacementInputs) -> None:
    items, pool = inputs
    assert (
        recovery_bound(items, pool).makespan
        <= shortest_makespan(items, pool) + 1e-9
        <= best_placement(items, pool, {}).makespan + 2e-9
    )


@given(recovered_runs())
def test_no_recovery_takes_less_than_its_bound(case: RecoveredRun) -> None:
    assert case.recovery.lower_bound <= case.recovery.makespan + 1e-9


def test_the_bound_counts_late_starts_and_indivisible_items() -> None:
    """Two stages, one micro-batch: four actions in a chain, and the first stage also has a W to run."""
    pool = RunnerPool(stages=2, segments=2, worker_count=2, runners={0: (0,), 1: (1,)})
    assert recovery_bound(whole_step_items(2, 1, split=True), pool).makespan == 5.0
    shared = RunnerPool(stages=1, segments=1, worker_count=2, runners={0: (0, 1)})
    assert recovery_bound(whole_step_items(1, 3, split=True), shared).makespan == 6.0
    assert recovery_bound([], shared).makespan == 0.0


@given(small_problems())
def test_balancing_items_of_equal_size_minimizes_the_largest_load(
    inputs: PlacementInputs,
) -> None:
    items, pool = inputs
    items = [WorkItem(item.key, KINDS[0]) for item in items]
    choices = [possible_runners(item, pool) for item in items]
    least = min(max(Counter(chosen).values()) for chosen in product(*choices))
    default_runners = balance_items(items, pool)
    assert max(Counter(default_runners.values()).values()) == least
    assert all(default_runners[item] in possible_runners(item, pool) for item in items)


@given(placement_inputs())
def test_compacted_lists_have_the_same_tasks_are_runnable_and_take_the_stated_time(inputs: PlacementInputs) -> None:
    items, pool = inputs
    before = place_items(items, pool)
    lists, end = compact_schedule(before.task_lists, pool)
    assert [Counter(row) for row in lists] == [Counter(row) for row in before.task_lists]
    assert simulated_makespan(Placement(lists, end), pool) <= end + 1e-9
    for row in lists:
        assert [task.step for task in row] == sorted(task.step for task in row)


def test_compacting_moves_inputs_of_a_busy_worker_to_the_front() -> None:
    """Worker 0 has four backwards, all of which wait for worker 1, which would start with work nothing waits for."""
    late = [WorkItem(WorkKey(0, 0, m), (Kind.I, Kind.W), tape_holder=0) for m in (2, 3)]
    items = [*late, *(WorkItem(WorkKey(0, 1, m), (Kind.F, Kind.I, Kind.W)) for m in range(4))]
    pool = RunnerPool(stages=2, segments=2, worker_count=3, runners={0: (0,), 1: (1, 2)})
    default_runners = {(1, 0): 1, (1, 1): 2, (1, 2): 1, (1, 3): 2}
    placed = place_items(items, pool, default_runners)
    _, end = compact_schedule(placed.task_lists, pool)
    assert (placed.makespan, end) == (8.0, 6.0)
