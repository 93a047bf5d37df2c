"""The workers of a graph server: who is there, what each one has, and who gets the next task. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.board import Task

if TYPE_CHECKING:
    from culm.gnn.link import Link


@dataclass(eq=False)
class Seat:
    """One worker."""

    name: str
    link: Link
    mapped: bool = False
    ready: bool = False
    tasks: set[Task] = field(default_factory=set)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    """By interval and layer: the pass whose forward it has kept."""


class Seats:
    """All workers of a server."""

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
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

    def leave(self, name: str) -> None:
        self._seats.pop(name, None)

    def choose(self, task: Task, avoid: tuple[str, ...] = ()) -> Seat | None:
        """Who gets a task: the last one that had the interval if it has room, else the least busy. Never one that works
        on the same task already."""
        free = [s for s in self._seats.values() if s.ready and len(s.tasks) < self._in_flight and s.name not in avoid]
        if not free:
            return None
        last = self._last.get(task.interval)
        chosen = min(free, key=lambda s: (len(s.tasks), s.name != last))
        if last is not None and len(chosen.tasks) > 0:
            chosen = next((s for s in free if s.name == last), chosen)
        self._last[task.interval] = chosen.name
        return chosen
