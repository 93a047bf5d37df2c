"""Tasks that are not assigned yet: queued by the place where they run, or blocked. Pure.

A server asks for its next task after each completed one. A task that cannot run is stored under its blocker, and is
checked again only when that blocker changes.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from culm.gnn.model.pass_steps import Place
    from culm.gnn.scheduler.passes import IntervalTask
    from culm.gnn.scheduler.scatter_log import IntervalId

Priority = tuple[int, int]
"""Sort key of a queue, before the interval number; the lowest goes first."""


class Blocker(NamedTuple):
    """The first condition that a task waits for; there may be others."""

    reason: Literal["permit", "step", "slowest", "rows", "weights"]
    layer: int = 0
    backward: bool = False
    interval_id: IntervalId | None = None
    """For "rows": the interval whose rows are missing."""


class PendingTasks:
    """A queue per place, sorted by priority, and the blocked tasks."""

    def __init__(self) -> None:
        self._queues: dict[Place, list[tuple[Priority, int, IntervalTask]]] = {"worker": [], "server": []}
        self._blocked: dict[Blocker, list[tuple[Place, Priority, IntervalTask]]] = {}

    def add(self, place: Place, priority: Priority, task: IntervalTask) -> None:
        bisect.insort(self._queues[place], (priority, task.interval, task))

    def queued_tasks(self, place: Place) -> list[tuple[Priority, IntervalTask]]:
        """Return a copy of the queue."""
        return [(priority, task) for priority, _, task in self._queues[place]]

    def remove(self, place: Place, priority: Priority, task: IntervalTask) -> None:
        """Remove a task from its queue."""
        queue = self._queues[place]
        del queue[bisect.bisect_left(queue, (priority, task.interval, task))]

    def block(self, place: Place, priority: Priority, task: IntervalTask, blocker: Blocker) -> None:
        """Move a task from its queue to its blocker."""
        self.remove(place, priority, task)
        self._blocked.setdefault(blocker, []).append((place, priority, task))

    def unblock(self, blocker: Blocker) -> None:
        """Move the tasks of a blocker back to their queues, where they are checked again."""
        for place, priority, task in self._blocked.pop(blocker, ()):
            self.add(place, priority, task)
