"""Which version of the weights each interval reads: the one it read first in a pass, for all of that pass. Pure.

Version n of a layer has seen the gradients of n epochs. A pass may be promised versions before they exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.gnn.passes import Pass, Task

_NONE = -1


class Pins:
    """Of one server. `staleness`: how many versions older than the newest possible a training pass may begin with."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._newest: dict[int, int] = {}
        self._pinned: dict[tuple[int, int], dict[int, int]] = {}
        """By interval and number of the pass: version by layer."""

    def published(self, layer: int, version: int) -> None:
        """A parameter server has it."""
        self._newest[layer] = max(version, self._newest.get(layer, _NONE))

    def needed(self, task: Task, now: Pass, layer: int) -> int:
        """The version that has to be there: the one pinned, or the oldest that the pass may begin with."""
        pinned = self._pinned.get((task.interval, task.number), {})
        return pinned.get(layer, self._oldest(now))

    def missing(self, task: Task, now: Pass, layers: Iterable[int]) -> int | None:
        """A layer of these that a task can not read yet."""
        return next((n for n in layers if self._newest.get(n, _NONE) < self.needed(task, now, n)), None)

    def read(self, task: Task, now: Pass, layers: Iterable[int]) -> dict[int, int]:
        """The version of each layer; from here on pinned for the interval until the pass ends."""
        pinned = self._pinned.setdefault((task.interval, task.number), {})
        for layer in layers:
            newest = max(self._newest.get(layer, _NONE), self._oldest(now))
            pinned.setdefault(layer, min(newest, now.version))
        return {layer: pinned[layer] for layer in layers}

    def promised(self, task: Task) -> bool:
        """Whether something that was pinned for the pass of a task is not there yet."""
        pinned = self._pinned.get((task.interval, task.number), {})
        return any(self._newest.get(layer, _NONE) < version for layer, version in pinned.items())

    def ended(self, interval: int, number: int) -> None:
        """An interval has finished a pass."""
        self._pinned.pop((interval, number), None)

    def oldest(self, layer: int) -> int:
        """No interval will ever ask for an older one."""
        held = [pinned[layer] for pinned in self._pinned.values() if layer in pinned]
        return min([self._newest.get(layer, 0), *held])

    def _oldest(self, now: Pass) -> int:
        return max(0, now.version - (self._staleness if now.train else 0))
