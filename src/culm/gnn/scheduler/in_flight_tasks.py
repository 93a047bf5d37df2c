"""Tasks in flight: their workers, their start times, and which of them to relaunch. Pure; time is a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.gnn.scheduler.passes import IntervalTask

_MIN_TIMEOUT_S, _TIMEOUT_FACTOR = 0.5, 5.0
_INITIAL_TIMEOUT_S = 5.0
"""Relaunch timeout until the first task of a kind has completed."""
_SMOOTHING = 0.2


@dataclass
class _InFlightTask:
    started_at: float
    workers: list[str] = field(default_factory=list)
    waits_for_weights: bool = False
    """The task was assigned ahead of time and waits at its worker for its weights."""


class InFlightTasks:
    """All tasks that are assigned to workers."""

    def __init__(self) -> None:
        self._tasks: dict[IntervalTask, _InFlightTask] = {}
        self.to_relaunch: set[IntervalTask] = set()
        """Tasks to assign once more."""
        self._durations = _TaskDurations()
        self.relaunches = 0

    def __contains__(self, task: IntervalTask) -> bool:
        return task in self._tasks

    def workers_on(self, task: IntervalTask) -> tuple[str, ...]:
        """Return the workers that run the task."""
        entry = self._tasks.get(task)
        return tuple(entry.workers) if entry is not None else ()

    def is_waiting_for_weights(self, task: IntervalTask) -> bool:
        entry = self._tasks.get(task)
        return entry is not None and entry.waits_for_weights

    @property
    def busy_count(self) -> int:
        """Number of tasks that do not wait for weights."""
        return sum(not entry.waits_for_weights for entry in self._tasks.values())

    def start(self, task: IntervalTask, worker: str, now: float, *, waits_for_weights: bool) -> None:
        """Record that a worker starts a task. Several workers may run the same task."""
        self.to_relaunch.discard(task)
        entry = self._tasks.setdefault(task, _InFlightTask(now))
        entry.started_at, entry.waits_for_weights = now, waits_for_weights
        entry.workers.append(worker)

    def start_waiting_tasks(self, still_waits: Callable[[IntervalTask], bool], now: float) -> None:
        """Start the clock of tasks whose weights have arrived."""
        for task, entry in self._tasks.items():
            if entry.waits_for_weights and not still_waits(task):
                entry.waits_for_weights, entry.started_at = False, now

    def complete(self, task: IntervalTask, kind: str, now: float) -> None:
        entry = self._tasks.pop(task, None)
        self.to_relaunch.discard(task)
        if entry is not None:
            self._durations.record(kind, now - entry.started_at)

    def handle_worker_lost(self, worker: str) -> list[IntervalTask]:
        """Remove a lost worker. Returns the tasks that only it was running; they are marked for relaunch."""
        orphaned = [task for task in list(self._tasks) if self._release(task, worker)]
        self._mark_for_relaunch(orphaned)
        return orphaned

    def relaunch_overdue(self, now: float, kind: Callable[[IntervalTask], str]) -> list[IntervalTask]:
        """Mark tasks that exceed their relaunch timeout and return them. They run a second time; the first result
        counts."""
        overdue = []
        for task, entry in self._tasks.items():
            if (
                task not in self.to_relaunch
                and not entry.waits_for_weights
                and now - entry.started_at > self.relaunch_timeout(kind(task))
            ):
                overdue.append(task)
        self._mark_for_relaunch(overdue)
        return overdue

    def handle_refusal(self, task: IntervalTask, worker: str) -> None:
        """Mark a task for reassignment after its worker refused it. This does not count as a relaunch."""
        if self._release(task, worker):
            self.to_relaunch.add(task)

    def relaunch_timeout(self, kind: str) -> float:
        """Return the seconds after which a task of that kind is relaunched."""
        return self._durations.relaunch_timeout(kind)

    def _release(self, task: IntervalTask, worker: str) -> bool:
        """Remove a worker from a task. Returns True if no worker runs the task any more. A worker that did not run
        the task changes nothing."""
        entry = self._tasks.get(task)
        if entry is None or worker not in entry.workers:
            return False
        entry.workers = [w for w in entry.workers if w != worker]
        if not entry.workers:
            del self._tasks[task]
        return not entry.workers

    def _mark_for_relaunch(self, tasks: Sequence[IntervalTask]) -> None:
        self.to_relaunch.update(tasks)
        self.relaunches += len(tasks)


class _TaskDurations:
    """Moving averages of task durations, by kind."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def record(self, kind: str, seconds: float) -> None:
        """Record the duration of a completed task."""
        average = self._seconds.get(kind, seconds)
        self._seconds[kind] = average + _SMOOTHING * (seconds - average)

    def relaunch_timeout(self, kind: str) -> float:
        """Return the seconds after which a task of that kind is relaunched."""
        average = self._seconds.get(kind)
        return _INITIAL_TIMEOUT_S if average is None else max(_MIN_TIMEOUT_S, _TIMEOUT_FACTOR * average)
