"""Tasks that nobody works on yet: in line where they are to run, or set aside until what they wait for happens. Pure.

A server asks for its next task after every one it has finished. So nobody is asked again and again whether he may
start: who has an obstacle is set aside under it, and looked at again only when it has moved.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from culm.gnn.feeds import Feed
    from culm.gnn.passes import Task
    from culm.gnn.program import Place

Turn = tuple[int, int]
"""Before interval numbers; the lowest goes first."""


class Obstacle(NamedTuple):
    """The one thing that a task was found to wait for; there may be others behind it."""

    what: Literal["permit", "step", "slowest", "rows", "weights"]
    layer: int = 0
    back: bool = False
    feed: Feed | None = None
    """Whose rows, of those that are missing."""


class Queues:
    """A line for each place, in the order of turns."""

    def __init__(self) -> None:
        self._lines: dict[Place, list[tuple[Turn, int, Task]]] = {"worker": [], "server": []}
        self._aside: dict[Obstacle, list[tuple[Place, Turn, Task]]] = {}

    def add(self, place: Place, turn: Turn, task: Task) -> None:
        bisect.insort(self._lines[place], (turn, task.interval, task))

    def line(self, place: Place) -> list[tuple[Turn, Task]]:
        """Who stands there now, as a copy."""
        return [(turn, task) for turn, _, task in self._lines[place]]

    def drop(self, place: Place, turn: Turn, task: Task) -> None:
        """Out of the line, for good."""
        line = self._lines[place]
        del line[bisect.bisect_left(line, (turn, task.interval, task))]

    def set_aside(self, place: Place, turn: Turn, task: Task, obstacle: Obstacle) -> None:
        """Out of the line, until it is released."""
        self.drop(place, turn, task)
        self._aside.setdefault(obstacle, []).append((place, turn, task))

    def release(self, obstacle: Obstacle) -> None:
        """The obstacle has moved: back into the line, where they are looked at again."""
        for place, turn, task in self._aside.pop(obstacle, ()):
            self.add(place, turn, task)
