"""Tasks that somebody works on: who, since when, and what is to be launched again. Pure; time is a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.pace import Pace

if TYPE_CHECKING:
    from culm.gnn.passes import Task


@dataclass
class _Held:
    since: float
    workers: list[str] = field(default_factory=list)
    waits: bool = False
    """Given out ahead of its time: it lies at its worker until its weights are there."""


class Hands:
    """All tasks in somebody's hands."""

    def __init__(self) -> None:
        self._held: dict[Task, _Held] = {}
        self.again: set[Task] = set()
        """To be given out once more."""
        self._pace = Pace()
        self.relaunches = 0

    def __contains__(self, task: Task) -> bool:
        return task in self._held

    def all(self) -> Mapping[Task, Sequence[str]]:
        return {task: held.workers for task, held in self._held.items()}

    def workers(self, task: Task) -> tuple[str, ...]:
        """Who works on it."""
        held = self._held.get(task)
        return tuple(held.workers) if held is not None else ()

    def waits(self, task: Task) -> bool:
        held = self._held.get(task)
        return held is not None and held.waits

    @property
    def busy(self) -> int:
        """Tasks that do not wait."""
        return sum(not held.waits for held in self._held.values())

    def begin(self, task: Task, worker: str, now: float, *, waits: bool) -> None:
        """Somebody starts on a task, or somebody else as well."""
        self.again.discard(task)
        held = self._held.setdefault(task, _Held(now))
        held.since, held.waits = now, waits
        held.workers.append(worker)

    def recheck(self, waits: Callable[[Task], bool], now: float) -> None:
        """Weights have come: whoever has waited for them begins only now."""
        for task, held in self._held.items():
            if held.waits and not waits(task):
                held.waits, held.since = False, now

    def done(self, task: Task, kind: str, now: float) -> None:
        held = self._held.pop(task, None)
        self.again.discard(task)
        if held is not None:
            self._pace.note(kind, now - held.since)

    def lost(self, worker: str) -> list[Task]:
        """A worker is gone: what only it worked on is to be run again."""
        found = [task for task in list(self._held) if self._let_go(task, worker)]
        self._launch_again(found)
        return found

    def overdue(self, now: float, kind: Callable[[Task], str]) -> list[Task]:
        """Tasks that take too long: to be run a second time, and whoever is first counts."""
        found = []
        for task, held in self._held.items():
            if task not in self.again and not held.waits and now - held.since > self.patience(kind(task)):
                found.append(task)
        self._launch_again(found)
        return found

    def refused(self, task: Task, worker: str) -> None:
        """A worker could not do it: it is to be sent again, which is nobody's fault."""
        if self._let_go(task, worker):
            self.again.add(task)

    def patience(self, kind: str) -> float:
        """Seconds until a task is launched again."""
        return self._pace.patience(kind)

    def _let_go(self, task: Task, worker: str) -> bool:
        """A worker has it no more; True: nobody has. One that never had it changes nothing."""
        held = self._held.get(task)
        if held is None or worker not in held.workers:
            return False
        held.workers = [w for w in held.workers if w != worker]
        if not held.workers:
            del self._held[task]
        return not held.workers

    def _launch_again(self, tasks: Sequence[Task]) -> None:
        self.again.update(tasks)
        self.relaunches += len(tasks)
