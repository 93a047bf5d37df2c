"""Silence: a connection that broke, or a run in which nothing moves, though nobody is known to be gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.runtime import epoch as letters

if TYPE_CHECKING:
    from culm.cluster.turnover import Turnover


@dataclass
class Doubt:
    """Somebody missed somebody in an epoch, some time ago."""

    epoch: int
    message: letters.Failed


@dataclass
class Stall:
    """Nothing has moved in an epoch for too long."""

    epoch: int


class Silence:
    """What the leader makes of what it does not hear: after a while, another epoch."""

    def __init__(self, turnover: Turnover, remind: Callable[[Doubt | Stall], None]) -> None:
        self.turnover, self.tenure, self._remind = turnover, turnover.tenure, remind
        self._epoch = 0
        self._done: dict[int, int] = {}
        """How far each worker has come in the epoch, by its last beat."""

    def suspect(self, message: letters.Failed) -> None:
        """A worker misses another one. Who is gone the store knows, in a moment. If nobody is, a connection broke:
        what was lost with it is sent again in a new epoch or, where nothing is kept, the run ends."""
        tenure, number = self.tenure, self.tenure.number
        tenure.event("suspected", node=message.node, why=message.message)
        tenure.toll.sign()

        async def believe() -> None:
            await tenure.clock.sleep(tenure.timeouts.doubt)
            self._remind(Doubt(number, message))

        tenure.aside(believe())

    def resolve(self, doubt: Doubt) -> None:
        if self.tenure.number == doubt.epoch and self.turnover.halting is None:
            self.turnover.halt()

    def beat(self, beat: letters.Beat) -> None:
        """So much has a worker done in the epoch."""
        if beat.epoch == self.tenure.number:
            if beat.epoch != self._epoch:
                self._epoch = beat.epoch
                self._done.clear()
            self._done[beat.node] = beat.done

    async def watch_progress(self) -> None:
        """Nothing moves any more, and nobody is gone: something got lost on the way. Then all is sent again."""
        tenure, seen = self.tenure, None
        while True:
            await tenure.clock.sleep(tenure.timeouts.progress + 5 * tenure.vigil.slowest_s)
            counts = (tenure.ledger.next_step, len(tenure.roll.ready), len(tenure.finals), len(tenure.saves))
            mark = (tenure.number, self.turnover.halting, dict(self._done), counts)
            if mark == seen:
                self._remind(Stall(tenure.number))
            seen = mark

    def wake(self, stall: Stall) -> None:
        tenure = self.tenure
        if tenure.epoch is None or stall.epoch != tenure.number:
            return
        if self.turnover.halting is not None:
            self.turnover.tell_halt(self.turnover.halting)
        elif not self._waits_for_permission():
            why = "nothing moves and nobody is gone: all is sent again"
            tenure.event("stalled", step=tenure.ledger.next_step, why=why)
            self.turnover.halt()

    def _waits_for_permission(self) -> bool:
        """Whether it is the user's turn: a hook or a launcher has to let the next step begin."""
        tenure = self.tenure
        return tenure.roll.all_ready and tenure.finish is None and tenure.permitted <= tenure.ledger.next_step
