"""The workers connected to a graph server: their tasks, and the choice of a worker for the next task. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.scheduler.passes import IntervalTask

if TYPE_CHECKING:
    from culm.gnn.transport.tensor_link import TensorLink


_SMOOTHING = 0.1
_MAX_TASKS_PER_WORKER = 16


@dataclass(eq=False)
class ConnectedWorker:
    """One connected worker."""

    name: str
    link: TensorLink
    maps_tables: bool = False
    is_ready: bool = False
    tasks: dict[IntervalTask, float | None] = field(default_factory=dict)
    """Tasks of the worker and when each was sent; None for a follow-up, which was sent with its predecessor."""
    kept_forward_passes: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (interval, layer): the pass whose forward cache the worker has kept."""
    follow_ups: dict[IntervalTask, IntervalTask] = field(default_factory=dict)
    """By task: the task that the worker continues with afterwards."""


class ConnectedWorkers:
    """All workers connected to one graph server."""

    def __init__(self, min_tasks_per_worker: int) -> None:
        self._min_tasks_per_worker = self.tasks_per_worker = min_tasks_per_worker
        """Tasks assigned to a worker at a time: enough to keep it busy while other tasks are in transit."""
        self._transfer_s = self._compute_s = 0.0
        self._workers: dict[str, ConnectedWorker] = {}
        self._last_worker_of_interval: dict[int, str] = {}
        """By interval: the worker that computed it last and may still have its forward cache."""

    def __len__(self) -> int:
        return sum(worker.is_ready for worker in self._workers.values())

    def all(self) -> list[ConnectedWorker]:
        return list(self._workers.values())

    def add(self, name: str, link: TensorLink) -> ConnectedWorker:
        worker = self._workers[name] = ConnectedWorker(name, link)
        return worker

    def get(self, name: str) -> ConnectedWorker | None:
        return self._workers.get(name)

    def start_follow_up(self, worker: ConnectedWorker, task: IntervalTask) -> None:
        """Record that a worker continues with a follow-up task."""
        worker.tasks[task] = None

    def complete_task(
        self, worker: ConnectedWorker, task: IntervalTask, now: float, *, waited_s: float, compute_s: float
    ) -> None:
        """Remove a completed task and adapt `tasks_per_worker` to the ratio of transfer time to compute time."""
        sent_at = worker.tasks.pop(task, None)
        if sent_at is not None:
            self._transfer_s += _SMOOTHING * (max(0.0, now - sent_at - waited_s - compute_s) - self._transfer_s)
            self._compute_s += _SMOOTHING * (compute_s - self._compute_s)
            target = 1 + math.ceil(self._transfer_s / max(self._compute_s, 1e-3))
            self.tasks_per_worker = min(max(self._min_tasks_per_worker, target), _MAX_TASKS_PER_WORKER)

    def remove(self, name: str) -> None:
        self._workers.pop(name, None)

    def choose_worker(
        self,
        task: IntervalTask,
        excluded: tuple[str, ...] = (),
        waits_for_weights: Callable[[IntervalTask], bool] = lambda _: False,
    ) -> ConnectedWorker | None:
        """Return the worker for a task, or None if no worker has capacity.

        Prefers the last worker of the interval, otherwise the least busy one. Never returns a worker in `excluded`,
        which already runs the task. Tasks that wait for weights do not count as load: they may wait for this very task.
        """
        load = {name: sum(not waits_for_weights(t) for t in worker.tasks) for name, worker in self._workers.items()}
        free = [
            s
            for s in self._workers.values()
            if s.is_ready and load[s.name] < self.tasks_per_worker and s.name not in excluded
        ]
        if not free:
            return None
        last = self._last_worker_of_interval.get(task.interval)
        chosen = min(free, key=lambda s: (load[s.name], s.name != last))
        if last is not None and load[chosen.name] > 0:
            chosen = next((s for s in free if s.name == last), chosen)
        self._last_worker_of_interval[task.interval] = chosen.name
        return chosen
