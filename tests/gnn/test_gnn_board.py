"""The board: oldest first, nobody too far ahead, everything once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gnn.house import House, small_graph, small_model

from culm.gnn.board import Board, Mode
from culm.gnn.passes import Task, passes
from culm.gnn.program import parts, walk

GRAPH = small_graph()
MODEL = small_model(GRAPH)


def board(mode: Mode = "pipe", *, staleness: int = 0, intervals: int = 2, epochs: int = 3) -> Board:
    """One server whose intervals all gather from each other."""
    feeds = [[(0, i) for i in range(intervals)]] * intervals
    made = Board(MODEL, server=0, feeds=feeds, plan=passes(epochs, 100), mode=mode, staleness=staleness)
    for layer in range(MODEL.layers):
        made.version(layer, 0)
    return made


def walk_to(made: Board, interval: int, kind: str) -> Task:
    """Finish steps of an interval until it is at one of that kind."""
    while True:
        task = next(t for p in ("worker", "server") for t in made.ready(p) if t.interval == interval)
        if str(made.step(task)) == kind:
            return task
        made.done(task, 0.0)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(0, 2), st.sampled_from(["gcn", "gat"]))
def test_no_interval_gathers_more_than_s_passes_ahead_of_the_slowest(chance: int, staleness: int, kind: str) -> None:
    house = House(GRAPH, small_model(GRAPH, kind), mode="async", staleness=staleness, chance=chance, evaluate_every=3)
    assert max(house.run().spreads) <= staleness


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from(["sync", "pipe", "async"]), st.integers(0, 2), st.booleans())
def test_whoever_has_nothing_to_wait_for_is_in_line_and_nobody_else(
    chance: int, mode: Mode, staleness: int, attention: bool
) -> None:
    model = small_model(GRAPH, "gat" if attention else "gcn")
    house = House(GRAPH, model, mode=mode, staleness=staleness, chance=chance, evaluate_every=2, epochs=3)
    while not all(made.finished for made in house.boards):
        ready = [(i, t) for i, b in enumerate(house.boards) for p in ("worker", "server") for t in b.ready(p)]
        assert set(ready) == {(i, t) for i, b in enumerate(house.boards) for t in free_to_start(b)}
        house.do(*house.draw.choice(ready))


def free_to_start(made: Board) -> list[Task]:
    """By asking everyone."""
    now = [Task(mine.number, mine.at, i) for i, mine in enumerate(made._intervals)]
    return [task for task in now if made.current(task) and made.why_not(task) is None]


def test_staleness_one_is_used_when_it_is_allowed() -> None:
    runs = [House(GRAPH, MODEL, mode="async", staleness=1, chance=c).run() for c in range(5)]
    assert max(max(run.spreads) for run in runs) == 1


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from(["sync", "pipe", "async"]), st.floats(0, 1))
def test_every_gradient_counts_exactly_once(chance: int, mode: Mode, repeat: float) -> None:
    house = House(GRAPH, MODEL, mode=mode, chance=chance, repeat=repeat, epochs=4)
    counted = house.run().counted
    assert set(counted.values()) == {1}
    assert len(counted) == 4 * sum(parts(MODEL).values()) * sum(s.intervals for s in house.shards)


def test_versions_of_weights_are_freed_when_nobody_needs_them() -> None:
    assert House(GRAPH, MODEL, mode="sync", epochs=12).run().kept_versions <= 2
    assert House(GRAPH, MODEL, mode="async", staleness=1, epochs=12).run().kept_versions <= 3


def test_sync_lets_nobody_start_a_step_before_all_have_finished_the_one_before() -> None:
    made = board("sync")
    made.done(Task(0, 0, 0), 0.0)
    assert made.why_not(Task(0, 1, 0)) == "another interval is still at the step before"
    made.done(Task(0, 0, 1), 0.0)
    assert made.why_not(Task(0, 1, 0)) is None


def test_pipe_gathers_only_rows_of_this_pass() -> None:
    made = board("pipe")
    for at in (0, 1):
        made.done(Task(0, at, 0), 0.0)
    assert "have not come from all neighbours" in (made.why_not(Task(0, 2, 0)) or "")
    for at in (0, 1):
        made.done(Task(0, at, 1), 0.0)
    assert made.why_not(Task(0, 2, 0)) is None


def test_a_pass_waits_for_its_version_of_the_weights_and_for_its_permit() -> None:
    made = board("pipe", intervals=1)
    for at in range(len(walk(MODEL, train=True))):
        made.done(Task(0, at, 0), 0.0)
    assert made.why_not(Task(1, 0, 0)) == "version 1 of layer 0 is not there yet"
    for layer in range(MODEL.layers):
        made.version(layer, 1)
    assert made.why_not(Task(1, 0, 0)) is None
    made.permit(1)
    assert made.why_not(Task(1, 0, 0)) == "pass 1 is not permitted yet"


def test_an_interval_gets_for_its_backward_the_version_it_read_first() -> None:
    made = board("async", staleness=1, intervals=1)
    task = walk_to(made, 0, "AV1")
    assert made.versions(task) == {0: 0, 1: 0}
    made.version(0, 1)
    made.version(1, 1)
    assert made.versions(walk_to(made, 0, "∇AV1")) == {0: 0, 1: 0}
    assert made.oldest_version(0) == 0


def test_older_work_goes_first_and_lost_work_before_all() -> None:
    made = board("pipe", intervals=3)
    made.done(Task(0, 0, 1), 0.0)
    assert list(made.ready("worker")) == [Task(0, 0, 0), Task(0, 0, 2)]
    made.begin(Task(0, 0, 2), "w1", 0.0)
    assert made.lost("w1") == [Task(0, 0, 2)]
    assert made.next("worker") == Task(0, 0, 2)


def test_a_task_is_launched_again_after_half_a_second_or_five_times_the_average() -> None:
    made = board("pipe", intervals=3)
    for interval, seconds in ((0, 0.02), (1, 0.02)):
        made.begin(Task(0, 0, interval), "w1", 0.0)
        made.done(Task(0, 0, interval), seconds)
    made.begin(Task(0, 0, 2), "w1", 10.0)
    assert made.overdue(10.5) == []
    assert made.overdue(10.51) == [Task(0, 0, 2)]
    assert made.overdue(11.0) == []
    made.begin(Task(0, 0, 2), "w2", 11.0)
    assert made.running()[Task(0, 0, 2)] == ["w1", "w2"]
    assert made.done(Task(0, 0, 2), 11.5)
    assert not made.done(Task(0, 0, 2), 11.6)
    assert made.relaunches == 1


def test_a_slow_kind_of_task_is_given_five_times_its_average() -> None:
    made = board("pipe", intervals=2)
    made.begin(Task(0, 0, 0), "w1", 0.0)
    made.done(Task(0, 0, 0), 2.0)
    assert made.patience(made.step(Task(0, 0, 1))) == pytest.approx(10.0)


def test_a_task_that_two_work_on_survives_the_loss_of_one() -> None:
    made = board("pipe")
    made.begin(Task(0, 0, 0), "w1", 0.0)
    made.begin(Task(0, 0, 0), "w2", 0.0)
    assert made.lost("w1") == []
    assert made.lost("w2") == [Task(0, 0, 0)]


def test_a_worker_that_refuses_gets_it_again() -> None:
    made = board("pipe")
    made.begin(Task(0, 0, 0), "w1", 0.0)
    made.refused(Task(0, 0, 0), "w1")
    assert made.next("worker") == Task(0, 0, 0)
    assert made.relaunches == 0


def test_stopping_early_leaves_no_pass_behind() -> None:
    made = board("pipe", intervals=1, epochs=3)
    made.stop_after(1)
    for at in range(len(walk(MODEL, train=True))):
        assert made.done(Task(0, at, 0), 0.0)
    assert made.finished
    assert made.next("worker") is None


def at_the_end_of_a_pass(mode: Mode, *, staleness: int = 0) -> tuple[Board, Task]:
    made = board(mode, staleness=staleness, intervals=1)
    last = len(walk(MODEL, train=True)) - 1
    for at in range(last):
        made.versions(Task(0, at, 0))
        made.done(Task(0, at, 0), 0.0)
    return made, Task(0, last, 0)


def test_pipelining_goes_on_with_the_next_pass_where_the_last_one_ended() -> None:
    made, last = at_the_end_of_a_pass("pipe")
    assert made.following(last) == Task(1, 0, 0)
    assert made.versions(Task(1, 0, 0)) == {0: 1, 1: 1}
    assert made.versions(last) == {0: 0, 1: 0}
    assert made.following(Task(0, 0, 0)) is None
    calm, last = at_the_end_of_a_pass("sync")
    assert calm.following(last) is None


def test_nobody_goes_on_with_a_pass_that_is_not_permitted_or_not_there() -> None:
    made, last = at_the_end_of_a_pass("pipe")
    made.permit(1)
    assert made.following(last) is None
    made.permit(9)
    made.stop_after(1)
    assert made.following(last) is None


def test_what_waits_for_its_weights_is_not_overdue_and_begins_when_they_come() -> None:
    made, last = at_the_end_of_a_pass("pipe")
    then = made.following(last)
    assert then is not None
    made.versions(then)
    made.done(last, 0.0)
    made.begin(then, "w1", 0.0)
    assert made.waits(then)
    assert made.busy == 0
    assert made.overdue(99.0) == []
    made.version(0, 1, 100.0)
    assert made.waits(then)
    made.version(1, 1, 100.0)
    assert not made.waits(then)
    assert made.busy == 1
    assert made.overdue(101.0) == []
    assert made.overdue(106.0) == [then]


def test_what_was_promised_to_a_worker_that_is_lost_goes_to_another_with_the_same_weights() -> None:
    made, last = at_the_end_of_a_pass("async", staleness=1)
    then = made.following(last)
    assert then is not None
    promised = made.versions(then)
    assert promised == {0: 0, 1: 0}
    made.done(last, 0.0)
    made.begin(then, "w1", 0.0)
    made.version(0, 1)
    made.version(1, 1)
    assert made.lost("w1") == [then]
    assert made.next("worker") == then
    assert made.versions(then) == promised
