"""The number of workers: a pure rule that keeps the task queues of graph servers short and workers busy."""

from __future__ import annotations

from dataclasses import dataclass, field

_WINDOW_SAMPLES = 8
"""Samples that must agree before the number changes."""


@dataclass
class WorkerAutoscaler:
    """Chooses the number of workers from samples of the task queues."""

    min_workers: int
    max_workers: int
    workers: int
    _queue_samples: list[int] = field(default_factory=list)
    _idle_samples: list[int] = field(default_factory=list)

    def observe(self, queue: int, running: int) -> str | None:
        """Add a sample: tasks that wait for a worker, and tasks that are running. Returns the reason if the number
        changed."""
        self._queue_samples.append(queue)
        self._idle_samples.append(max(0, self.workers - running))
        if len(self._queue_samples) < _WINDOW_SAMPLES:
            return None
        queues, idle = self._queue_samples, self._idle_samples
        self._queue_samples, self._idle_samples = [], []
        waiting, always_idle = sum(queues) / _WINDOW_SAMPLES, min(idle)
        if min(queues) > 0 and self.workers < self.max_workers:
            return self._set_workers(
                self.workers + max(1, self.workers // 4), f"{waiting:.1f} tasks waited for a worker"
            )
        if max(queues) == 0 and always_idle > 0 and self.workers > self.min_workers:
            return self._set_workers(self.workers - 1, f"{always_idle} workers were idle at all times")
        return None

    def _set_workers(self, workers: int, reason: str) -> str:
        self.workers = min(max(workers, self.min_workers), self.max_workers)
        return f"{reason}: {self.workers} workers from now on"
