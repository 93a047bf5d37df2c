"""How many workers: a pure rule that keeps the queue of the graph servers short and workers busy."""

from __future__ import annotations

from dataclasses import dataclass, field

_WINDOW = 8
"""Looks that have to agree before anything changes."""


@dataclass
class Tuner:
    """Looks at queues; says how many workers there should be, and why."""

    low: int
    high: int
    workers: int
    _queues: list[int] = field(default_factory=list)
    _idle: list[int] = field(default_factory=list)

    def look(self, queue: int, running: int) -> str | None:
        """Tasks that wait for a worker, and tasks that workers have. A sentence when the number was changed."""
        self._queues.append(queue)
        self._idle.append(max(0, self.workers - running))
        if len(self._queues) < _WINDOW:
            return None
        queues, idle = self._queues, self._idle
        self._queues, self._idle = [], []
        waiting, spare = sum(queues) / _WINDOW, min(idle)
        if min(queues) > 0 and self.workers < self.high:
            return self._to(self.workers + max(1, self.workers // 4), f"{waiting:.1f} tasks waited for a worker")
        if max(queues) == 0 and spare > 0 and self.workers > self.low:
            return self._to(self.workers - 1, f"{spare} workers had nothing to do at any time")
        return None

    def _to(self, workers: int, why: str) -> str:
        self.workers = min(max(workers, self.low), self.high)
        return f"{why}: {self.workers} workers from now on"
