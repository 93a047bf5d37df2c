"""The choice of a worker for a task, and the number of tasks per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from culm.gnn.transport.tensor_link import TensorLink

from culm.gnn.scheduler.connected_workers import ConnectedWorkers
from culm.gnn.scheduler.passes import IntervalTask


def test_a_distant_worker_gets_more_tasks_at_a_time_than_a_near_one() -> None:
    for transfer_s, expected in ((0.0005, 2), (0.02, 6)):
        workers = ConnectedWorkers(2)
        worker = workers.add("w", cast("TensorLink", None))
        for number in range(200):
            worker.tasks[IntervalTask(number, 0, 0)] = 0.0
            workers.complete_task(
                worker, IntervalTask(number, 0, 0), transfer_s + 0.005 + 0.3, waited_s=0.3, compute_s=0.005
            )
        assert workers.tasks_per_worker in (expected - 1, expected)


def test_a_task_goes_to_the_last_worker_of_its_interval_unless_it_is_busier() -> None:
    workers = ConnectedWorkers(2)
    for name in ("a", "b"):
        workers.add(name, cast("TensorLink", None)).is_ready = True
    one, other = IntervalTask(0, 0, 0), IntervalTask(0, 0, 1)
    first = workers.choose_worker(one)
    assert first is not None
    first.tasks[one] = 0.0
    second = workers.choose_worker(other)
    assert second is not None
    assert second is not first
    first.tasks.clear()
    assert workers.choose_worker(IntervalTask(0, 3, 0)) is first
    assert workers.choose_worker(IntervalTask(0, 3, 1)) is second
    assert workers.choose_worker(one, excluded=("a", "b")) is None
