"""The interval scheduler: oldest work first, bounded staleness, every result counted once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gnn.simulated_run import SimulatedRun, small_graph, small_model
from tests.gnn.virtual_time import gradient_parts_per_layer

from culm.gnn.model.pass_steps import steps_of_pass
from culm.gnn.scheduler.interval_scheduler import IntervalScheduler, Mode
from culm.gnn.scheduler.passes import IntervalTask, list_passes

GRAPH = small_graph()
MODEL = small_model(GRAPH)


def make_scheduler(
    mode: Mode = "pipe", *, staleness: int = 0, intervals: int = 2, epochs: int = 3
) -> IntervalScheduler:
    """A scheduler of one server whose intervals all gather from each other."""
    gather_sources = [[(0, i) for i in range(intervals)]] * intervals
    scheduler = IntervalScheduler(
        MODEL, server=0, gather_sources=gather_sources, passes=list_passes(epochs, 100), mode=mode, staleness=staleness
    )
    for layer in range(MODEL.layers):
        scheduler.record_version(layer, 0)
    return scheduler


def walk_to(scheduler: IntervalScheduler, interval: int, kind: str) -> IntervalTask:
    """Complete steps of an interval until its next one is of that kind."""
    while True:
        task = next(t for p in ("worker", "server") for t in scheduler.ready_tasks(p) if t.interval == interval)
        if str(scheduler.step_of(task)) == kind:
            return task
        scheduler.complete_task(task, 0.0)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(0, 2), st.sampled_from(["gcn", "gat"]))
def test_no_interval_gathers_more_than_s_passes_ahead_of_the_slowest(
    order_seed: int, staleness: int, kind: str
) -> None:
    run = SimulatedRun(
        GRAPH, small_model(GRAPH, kind), mode="async", staleness=staleness, order_seed=order_seed, evaluate_every=3
    )
    assert max(run.run().spreads) <= staleness


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from(["sync", "pipe", "async"]), st.integers(0, 2), st.booleans())
def test_ready_tasks_are_exactly_those_without_a_blocker(
    order_seed: int, mode: Mode, staleness: int, attention: bool
) -> None:
    model = small_model(GRAPH, "gat" if attention else "gcn")
    run = SimulatedRun(GRAPH, model, mode=mode, staleness=staleness, order_seed=order_seed, evaluate_every=2, epochs=3)
    while not all(scheduler.is_finished for scheduler in run.schedulers):
        ready = [(i, t) for i, b in enumerate(run.schedulers) for p in ("worker", "server") for t in b.ready_tasks(p)]
        assert set(ready) == {(i, t) for i, b in enumerate(run.schedulers) for t in free_to_start(b)}
        run.run_task(*run.rng.choice(ready))


def reason_to_wait(scheduler: IntervalScheduler, task: IntervalTask) -> str | None:
    blocker = scheduler._find_blocker(task)
    return None if blocker is None else blocker.reason


def free_to_start(scheduler: IntervalScheduler) -> list[IntervalTask]:
    """Tasks that may start, by asking for each interval's current task."""
    current = [
        IntervalTask(position.pass_number, position.step_index, i) for i, position in enumerate(scheduler._intervals)
    ]
    return [task for task in current if scheduler.is_current(task) and reason_to_wait(scheduler, task) is None]


def test_staleness_one_is_used_when_it_is_allowed() -> None:
    results = [SimulatedRun(GRAPH, MODEL, mode="async", staleness=1, order_seed=seed).run() for seed in range(5)]
    assert max(max(result.spreads) for result in results) == 1


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from(["sync", "pipe", "async"]), st.floats(0, 1))
def test_every_gradient_counts_exactly_once(order_seed: int, mode: Mode, repeat: float) -> None:
    run = SimulatedRun(GRAPH, MODEL, mode=mode, order_seed=order_seed, repeat_chance=repeat, epochs=4)
    counted = run.run().gradient_counts
    assert set(counted.values()) == {1}
    assert len(counted) == 4 * sum(gradient_parts_per_layer(MODEL).values()) * sum(s.intervals for s in run.shards)


def test_versions_are_freed_when_no_interval_needs_them() -> None:
    assert SimulatedRun(GRAPH, MODEL, mode="sync", epochs=12).run().kept_versions <= 2
    assert SimulatedRun(GRAPH, MODEL, mode="async", staleness=1, epochs=12).run().kept_versions <= 3


def test_sync_waits_for_all_intervals_before_the_next_step() -> None:
    scheduler = make_scheduler("sync")
    scheduler.complete_task(IntervalTask(0, 0, 0), 0.0)
    assert reason_to_wait(scheduler, IntervalTask(0, 1, 0)) == "step"
    scheduler.complete_task(IntervalTask(0, 0, 1), 0.0)
    assert reason_to_wait(scheduler, IntervalTask(0, 1, 0)) is None


def test_pipe_gathers_only_rows_of_this_pass() -> None:
    scheduler = make_scheduler("pipe")
    for step in (0, 1):
        scheduler.complete_task(IntervalTask(0, step, 0), 0.0)
    assert reason_to_wait(scheduler, IntervalTask(0, 2, 0)) == "rows"
    for step in (0, 1):
        scheduler.complete_task(IntervalTask(0, step, 1), 0.0)
    assert reason_to_wait(scheduler, IntervalTask(0, 2, 0)) is None


def test_a_pass_waits_for_its_version_of_the_weights_and_for_its_permit() -> None:
    scheduler = make_scheduler("pipe", intervals=1)
    for step in range(len(steps_of_pass(MODEL, train=True))):
        scheduler.complete_task(IntervalTask(0, step, 0), 0.0)
    assert reason_to_wait(scheduler, IntervalTask(1, 0, 0)) == "weights"
    for layer in range(MODEL.layers):
        scheduler.record_version(layer, 1)
    assert reason_to_wait(scheduler, IntervalTask(1, 0, 0)) is None
    scheduler.permit_passes(1)
    assert reason_to_wait(scheduler, IntervalTask(1, 0, 0)) == "permit"


def test_the_backward_uses_the_version_that_the_forward_pinned() -> None:
    scheduler = make_scheduler("async", staleness=1, intervals=1)
    task = walk_to(scheduler, 0, "AV1")
    assert scheduler.pin_versions(task) == {0: 0, 1: 0}
    scheduler.record_version(0, 1)
    scheduler.record_version(1, 1)
    assert scheduler.pin_versions(walk_to(scheduler, 0, "∇AV1")) == {0: 0, 1: 0}
    assert scheduler.oldest_needed_version(0) == 0


def test_the_oldest_task_goes_first_and_relaunched_tasks_before_all() -> None:
    scheduler = make_scheduler("pipe", intervals=3)
    scheduler.complete_task(IntervalTask(0, 0, 1), 0.0)
    assert list(scheduler.ready_tasks("worker")) == [IntervalTask(0, 0, 0), IntervalTask(0, 0, 2)]
    scheduler.start_task(IntervalTask(0, 0, 2), "w1", 0.0)
    assert scheduler.handle_worker_lost("w1") == [IntervalTask(0, 0, 2)]
    assert scheduler.next_task("worker") == IntervalTask(0, 0, 2)


def test_a_task_is_relaunched_after_half_a_second_or_five_times_the_average() -> None:
    scheduler = make_scheduler("pipe", intervals=3)
    for interval, seconds in ((0, 0.02), (1, 0.02)):
        scheduler.start_task(IntervalTask(0, 0, interval), "w1", 0.0)
        scheduler.complete_task(IntervalTask(0, 0, interval), seconds)
    scheduler.start_task(IntervalTask(0, 0, 2), "w1", 10.0)
    assert scheduler.relaunch_overdue(10.5) == []
    assert scheduler.relaunch_overdue(10.51) == [IntervalTask(0, 0, 2)]
    assert scheduler.relaunch_overdue(11.0) == []
    scheduler.start_task(IntervalTask(0, 0, 2), "w2", 11.0)
    assert scheduler.workers_on(IntervalTask(0, 0, 2)) == ("w1", "w2")
    assert scheduler.complete_task(IntervalTask(0, 0, 2), 11.5)
    assert not scheduler.complete_task(IntervalTask(0, 0, 2), 11.6)
    assert scheduler.relaunches == 1


def test_the_timeout_of_a_slow_kind_is_five_times_its_average() -> None:
    scheduler = make_scheduler("pipe", intervals=2)
    scheduler.start_task(IntervalTask(0, 0, 0), "w1", 0.0)
    scheduler.complete_task(IntervalTask(0, 0, 0), 2.0)
    assert scheduler.relaunch_timeout(scheduler.step_of(IntervalTask(0, 0, 1))) == pytest.approx(10.0)


def test_a_task_with_two_workers_survives_the_loss_of_one() -> None:
    scheduler = make_scheduler("pipe")
    scheduler.start_task(IntervalTask(0, 0, 0), "w1", 0.0)
    scheduler.start_task(IntervalTask(0, 0, 0), "w2", 0.0)
    assert scheduler.handle_worker_lost("w1") == []
    assert scheduler.handle_worker_lost("w2") == [IntervalTask(0, 0, 0)]


def test_a_refused_task_is_assigned_again() -> None:
    scheduler = make_scheduler("pipe")
    scheduler.start_task(IntervalTask(0, 0, 0), "w1", 0.0)
    scheduler.handle_refusal(IntervalTask(0, 0, 0), "w1")
    assert scheduler.next_task("worker") == IntervalTask(0, 0, 0)
    assert scheduler.relaunches == 0


def test_stopping_early_drops_the_remaining_passes() -> None:
    scheduler = make_scheduler("pipe", intervals=1, epochs=3)
    scheduler.stop_before(1)
    for step in range(len(steps_of_pass(MODEL, train=True))):
        assert scheduler.complete_task(IntervalTask(0, step, 0), 0.0)
    assert scheduler.is_finished
    assert scheduler.next_task("worker") is None


def scheduler_at_end_of_pass(mode: Mode, *, staleness: int = 0) -> tuple[IntervalScheduler, IntervalTask]:
    scheduler = make_scheduler(mode, staleness=staleness, intervals=1)
    last = len(steps_of_pass(MODEL, train=True)) - 1
    for step in range(last):
        scheduler.pin_versions(IntervalTask(0, step, 0))
        scheduler.complete_task(IntervalTask(0, step, 0), 0.0)
    return scheduler, IntervalTask(0, last, 0)


def test_pipe_continues_with_the_next_pass_on_the_same_worker() -> None:
    scheduler, last = scheduler_at_end_of_pass("pipe")
    assert scheduler.follow_up_task(last) == IntervalTask(1, 0, 0)
    assert scheduler.pin_versions(IntervalTask(1, 0, 0)) == {0: 1, 1: 1}
    assert scheduler.pin_versions(last) == {0: 0, 1: 0}
    assert scheduler.follow_up_task(IntervalTask(0, 0, 0)) is None
    sync_scheduler, last = scheduler_at_end_of_pass("sync")
    assert sync_scheduler.follow_up_task(last) is None


def test_no_follow_up_for_a_pass_that_is_not_permitted_or_does_not_exist() -> None:
    scheduler, last = scheduler_at_end_of_pass("pipe")
    scheduler.permit_passes(1)
    assert scheduler.follow_up_task(last) is None
    scheduler.permit_passes(9)
    scheduler.stop_before(1)
    assert scheduler.follow_up_task(last) is None


def test_a_task_that_waits_for_weights_is_not_overdue_until_they_arrive() -> None:
    scheduler, last = scheduler_at_end_of_pass("pipe")
    follow_up = scheduler.follow_up_task(last)
    assert follow_up is not None
    scheduler.pin_versions(follow_up)
    scheduler.complete_task(last, 0.0)
    scheduler.start_task(follow_up, "w1", 0.0)
    assert scheduler.is_waiting_for_weights(follow_up)
    assert scheduler.busy_count == 0
    assert scheduler.relaunch_overdue(99.0) == []
    scheduler.record_version(0, 1, 100.0)
    assert scheduler.is_waiting_for_weights(follow_up)
    scheduler.record_version(1, 1, 100.0)
    assert not scheduler.is_waiting_for_weights(follow_up)
    assert scheduler.busy_count == 1
    assert scheduler.relaunch_overdue(101.0) == []
    assert scheduler.relaunch_overdue(106.0) == [follow_up]


def test_a_follow_up_of_a_lost_worker_is_reassigned_with_the_same_versions() -> None:
    scheduler, last = scheduler_at_end_of_pass("async", staleness=1)
    follow_up = scheduler.follow_up_task(last)
    assert follow_up is not None
    pinned = scheduler.pin_versions(follow_up)
    assert pinned == {0: 0, 1: 0}
    scheduler.complete_task(last, 0.0)
    scheduler.start_task(follow_up, "w1", 0.0)
    scheduler.record_version(0, 1)
    scheduler.record_version(1, 1)
    assert scheduler.handle_worker_lost("w1") == [follow_up]
    assert scheduler.next_task("worker") == follow_up
    assert scheduler.pin_versions(follow_up) == pinned
