"""The version of the weights that each interval reads: the first one it read in a pass, for the whole pass. Pure.

Version n of a layer includes the gradients of n training epochs. A version may be pinned before it exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.gnn.scheduler.passes import IntervalTask, Pass

_NO_VERSION = -1


class VersionPins:
    """Version pins of one server. A training pass may start with weights up to `staleness` versions older than the
    newest possible one."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._newest: dict[int, int] = {}
        self._pinned: dict[tuple[int, int], dict[int, int]] = {}
        """By (interval, pass number): the version of each layer."""

    def record_version(self, layer: int, version: int) -> None:
        """Record that a parameter server has published a version."""
        self._newest[layer] = max(version, self._newest.get(layer, _NO_VERSION))

    def required_version(self, task: IntervalTask, graph_pass: Pass, layer: int) -> int:
        """Return the version that must exist: the pinned one, or the oldest that the pass may start with."""
        pinned = self._pinned.get((task.interval, task.pass_number), {})
        return pinned.get(layer, self._oldest_allowed(graph_pass))

    def first_missing_layer(self, task: IntervalTask, graph_pass: Pass, layers: Iterable[int]) -> int | None:
        """Return the first of these layers whose required version does not exist yet; None if all exist."""
        return next(
            (n for n in layers if self._newest.get(n, _NO_VERSION) < self.required_version(task, graph_pass, n)), None
        )

    def pin(self, task: IntervalTask, graph_pass: Pass, layers: Iterable[int]) -> dict[int, int]:
        """Return the version of each layer, and pin it for the interval until the pass ends."""
        pinned = self._pinned.setdefault((task.interval, task.pass_number), {})
        for layer in layers:
            newest = max(self._newest.get(layer, _NO_VERSION), self._oldest_allowed(graph_pass))
            pinned.setdefault(layer, min(newest, graph_pass.newest_version))
        return {layer: pinned[layer] for layer in layers}

    def awaits_version(self, task: IntervalTask) -> bool:
        """Whether a version pinned for the task's pass does not exist yet."""
        pinned = self._pinned.get((task.interval, task.pass_number), {})
        return any(self._newest.get(layer, _NO_VERSION) < version for layer, version in pinned.items())

    def unpin(self, interval: int, pass_number: int) -> None:
        """Remove the pins of an interval that has finished a pass."""
        self._pinned.pop((interval, pass_number), None)

    def oldest_needed(self, layer: int) -> int:
        """Return the oldest version that an interval may still request."""
        pinned_versions = [pinned[layer] for pinned in self._pinned.values() if layer in pinned]
        return min([self._newest.get(layer, 0), *pinned_versions])

    def _oldest_allowed(self, graph_pass: Pass) -> int:
        return max(0, graph_pass.newest_version - (self._staleness if graph_pass.train else 0))
