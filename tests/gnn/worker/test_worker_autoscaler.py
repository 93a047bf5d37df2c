"""The number of workers, from samples of the task queues."""

from __future__ import annotations

from culm.gnn.worker.worker_autoscaler import WorkerAutoscaler


def test_the_autoscaler_adds_workers_for_waiting_tasks_and_removes_idle_ones() -> None:
    autoscaler = WorkerAutoscaler(min_workers=1, max_workers=6, workers=4)
    reasons = [autoscaler.observe(queue=3, running=4) for _ in range(8)]
    assert reasons[:-1] == [None] * 7
    assert reasons[-1] == "3.0 tasks waited for a worker: 5 workers from now on"
    for _ in range(8):
        last = autoscaler.observe(queue=0, running=2)
    assert last == "3 workers were idle at all times: 4 workers from now on"
    for _ in range(8):
        assert autoscaler.observe(queue=0, running=4) is None


def test_the_autoscaler_keeps_its_bounds() -> None:
    autoscaler = WorkerAutoscaler(min_workers=1, max_workers=2, workers=2)
    for _ in range(16):
        assert autoscaler.observe(queue=9, running=2) is None
    for _ in range(24):
        autoscaler.observe(queue=0, running=0)
    assert autoscaler.workers == 1
