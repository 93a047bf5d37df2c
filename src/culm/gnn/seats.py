"""The workers of a graph server: who is there, what each one has, and who gets the next task. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.passes import Task

if TYPE_CHECKING:
    from culm.gnn.link import Link


_SMOOTHING = 0.1
_MOST = 16


@dataclass(eq=False)
class Seat:
    """One worker."""

    name: str
    link: Link
    mapped: bool = False
    ready: bool = False
    tasks: dict[Task, float | None] = field(default_factory=dict)
    """What it has, since when; None: it came with another one."""
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    """By interval and layer: the pass whose forward it has kept."""
    then: dict[Task, Task] = field(default_factory=dict)
    """What it goes on with after a task."""


class Seats:
    """All workers of a server."""

    def __init__(self, in_flight: int) -> None:
        self._least = self.in_flight = in_flight
        """Tasks that a worker has at a time: enough to keep it busy while others are on their way."""
        self._way = self._compute = 0.0
        self._seats: dict[str, Seat] = {}
        self._last: dict[int, str] = {}
        """By interval: the worker that had it last, which may have kept what a backward needs."""

    def __len__(self) -> int:
        return sum(seat.ready for seat in self._seats.values())

    def all(self) -> list[Seat]:
        return list(self._seats.values())

    def join(self, name: str, link: Link) -> Seat:
        seat = self._seats[name] = Seat(name, link)
        return seat

    def get(self, name: str) -> Seat | None:
        return self._seats.get(name)

    def went_on(self, seat: Seat, task: Task) -> None:
        """A worker goes on with a task that it was given before."""
        seat.tasks[task] = None

    def returned(self, seat: Seat, task: Task, now: float, *, waited: float, seconds: float) -> None:
        """A task came back: how long the way takes beside the work says how many must be under way."""
        since = seat.tasks.pop(task, None)
        if since is not None:
            self._way += _SMOOTHING * (max(0.0, now - since - waited - seconds) - self._way)
            self._compute += _SMOOTHING * (seconds - self._compute)
            wanted = 1 + math.ceil(self._way / max(self._compute, 1e-3))
            self.in_flight = min(max(self._least, wanted), _MOST)

    def leave(self, name: str) -> None:
        self._seats.pop(name, None)

    def choose(
        self, task: Task, avoid: tuple[str, ...] = (), waits: Callable[[Task], bool] = lambda _: False
    ) -> Seat | None:
        """Who gets a task: the last one that had the interval if it has room, else the least busy. Never one that works
        on the same task already. What `waits` at a worker takes no room: it may wait for this very task."""
        load = {name: sum(not waits(t) for t in seat.tasks) for name, seat in self._seats.items()}
        free = [s for s in self._seats.values() if s.ready and load[s.name] < self.in_flight and s.name not in avoid]
        if not free:
            return None
        last = self._last.get(task.interval)
        chosen = min(free, key=lambda s: (load[s.name], s.name != last))
        if last is not None and load[chosen.name] > 0:
            chosen = next((s for s in free if s.name == last), chosen)
        self._last[task.interval] = chosen.name
        return chosen
