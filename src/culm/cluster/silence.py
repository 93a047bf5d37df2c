"""Silence: a connection that broke, or a run in which nothing moves, though nobody is known to be gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.runtime import epoch as letters

if TYPE_CHECKING:
    from culm.cluster.turnover import Turnover


IN_VAIN = 4
"""Epochs in a row that were made to send everything again and brought no step: then the connections are not to be had
back, and who complains of them is given up."""


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
        self._step = 0
        self._vain = 0
        """Epochs that were made since that step although nobody was lost."""
        self._complaints: Counter[int] = Counter()
        """How often a worker missed others in them."""

    def suspect(self, message: letters.Failed) -> None:
        """A worker misses another one. Who is gone the store knows, in a moment. If nobody is, a connection broke:
        what was lost with it is sent again in a new epoch or, where nothing is kept, the run ends."""
        tenure, number = self.tenure, self.tenure.number
        self._recount()
        self._complaints[message.node] += 1
        tenure.event("suspected", node=message.node, why=message.message)
        tenure.toll.sign()

        async def believe() -> None:
            await tenure.clock.sleep(tenure.timeouts.doubt)
            self._remind(Doubt(number, message))

        tenure.aside(believe())

    def resolve(self, doubt: Doubt) -> None:
        if self.tenure.number == doubt.epoch and self.turnover.halting is None:
            self._again()

    def _again(self) -> None:
        """Nobody is lost: all is sent again in a new epoch. If that was done over and over, one goes who misses others:
        two that can not reach each other are no use to each other, whoever else reaches both."""
        self._recount()
        self._vain += 1
        members = {member.node for member in self.tenure.epoch.alive} if self.tenure.epoch is not None else set()
        complaining = [(count, node) for node, count in self._complaints.items() if node in members]
        if self._vain >= IN_VAIN and complaining:
            _, node = max(complaining)
            why = f"{self._vain} epochs brought no step, and it misses others: its connections are not to be had back"
            self.tenure.event("given_up", node=node, why=why)
            self.tenure.vigil.give_up(node)
            self._vain = 0  # what is left may do
            self._complaints.clear()
        self.turnover.halt()

    def _recount(self) -> None:
        """A step was made: all is well."""
        if self.tenure.ledger.next_step != self._step:
            self._step, self._vain = self.tenure.ledger.next_step, 0
            self._complaints.clear()

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
            self._again()

    def _waits_for_permission(self) -> bool:
        """Whether it is the user's turn: a hook or a launcher has to let the next step begin."""
        tenure = self.tenure
        return tenure.roll.all_ready and tenure.finish is None and tenure.permitted <= tenure.ledger.next_step
