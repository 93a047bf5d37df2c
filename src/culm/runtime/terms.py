"""Terms: what a leader and a worker have said to each other of steps. They outlast epochs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.runtime.desk import Desk
    from culm.runtime.epoch import Epoch


class Terms:
    """How far a worker may go, what is committed, and what it has reported."""

    def __init__(self) -> None:
        self.permit = 0
        """Steps below this number may run."""
        self.committed = 0
        """Steps below this number are committed."""
        self.finish: int | None = None
        """The step before which the run ends, once that is decided."""
        self.drain = (0, 0)
        """(epoch, step): in that epoch, begin no step from this one on."""
        self.news = asyncio.Event()
        """Set when the leader has said something."""
        self._told = (0, 0)
        """(epoch, step): the first step that the leader of the epoch has not had a report of."""

    def commit(self, steps: int, desk: Desk | None) -> None:
        """All steps below are committed: what was kept for them goes."""
        self.committed = max(self.committed, steps)
        if desk is not None:
            desk.committed(self.committed - 1)

    def ended(self, step: int) -> bool:
        """Whether the run ends before a step."""
        return self.finish is not None and step >= self.finish

    def permits(self, epoch: Epoch, step: int) -> bool:
        return step < self.permit and not self._drained(epoch, step)

    def _drained(self, epoch: Epoch, step: int) -> bool:
        """Whether a step is not to be begun in this epoch: the next one will have another shape."""
        number, before = self.drain
        return (number == epoch.number and step >= before) or (epoch.until is not None and step >= epoch.until)

    def tell(self, epoch: Epoch, step: int) -> None:
        """A step has been reported in this epoch."""
        self._told = epoch.number, step + 1

    def reported(self, epoch: Epoch) -> int:
        """Steps below this number have been reported in this epoch; whoever leads a new one hears of them again."""
        number, steps = self._told
        return max(steps if number == epoch.number else 0, self.committed)
