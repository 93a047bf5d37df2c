"""The toll: what losses cost a run, measured as they happen."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.cluster.recovered import Recovered
from culm.schedule import Plan

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from culm.cluster.regroup import Regrouped
    from culm.plan.lineage import Standing
    from culm.runtime.clock import Clock


@dataclass
class Halting:
    """An epoch that is being left."""

    number: int
    """Of the next."""
    lost: set[int]
    expected: set[int]
    began: float
    detect_s: float
    """What it took to find out."""
    committed: int
    """Steps below this number were committed when it began."""
    waits: bool = False
    """Whether nodes are waited for, in place of the lost."""
    waited: bool = False
    """They were waited for long enough."""
    standings: dict[int, Standing] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.standings.keys() == self.expected


@dataclass
class Recovering:
    """An epoch whose open steps are being completed."""

    halting: Halting
    decided_at: float
    made: Regrouped
    again: int = 0
    """Steps that were committed and are run once more, from a checkpoint on."""
    ready_at: float | None = None
    lost: set[int] = field(default_factory=set)
    """Whose loss this makes good; others' too, where their recovery was broken off."""
    left: set[int] = field(default_factory=set)
    """Who had notice, and has gone meanwhile."""
    heirs: set[int] = field(default_factory=set)
    """Who has all that those with notice had for it."""

    @property
    def last(self) -> int:
        """The step with which the loss is made good: all that was there, or open, is there again."""
        return self.halting.committed - 1 if self.again else self.made.epoch.start - 1 + self.anew

    @property
    def redone(self) -> int:
        """Actions that were done before."""
        epoch = self.made.epoch
        return epoch.recovery.redone + self.again * len(Plan.from_text(epoch.plan).placement())

    @property
    def anew(self) -> bool:
        """Whether a step that was open is given up, and run in another shape."""
        return self.made.epoch.reshapes and bool(self.halting.lost)


class Toll:
    """Every loss that was made good, with its times; the usual pace to compare with; and the time at risk."""

    def __init__(self, clock: Clock) -> None:
        self.recoveries: list[Recovered] = []
        self.owed: set[int] = set()
        """Members that were lost, and whose loss is not made good yet."""
        self.at_risk_s = 0.0
        self.moved_s: float | None = None
        """What it took to go over to another shape, lately; None: that has not been done."""
        self._clock = clock
        self._pace: collections.deque[float] = collections.deque(maxlen=32)
        self._lately: list[float] = []
        """The same of the epoch alone."""
        self._before_loss: float | None = None
        """When the last step was committed that no loss had disturbed."""
        self._first_sign: float | None = None
        """When somebody missed somebody, since the epoch began."""
        self._risk_since: float | None = None

    def sign(self) -> None:
        """Somebody misses somebody."""
        self._first_sign = self._first_sign or self._clock.now()

    def begin(self) -> None:
        """A new epoch."""
        self._first_sign = None
        self._lately.clear()

    def took_to_detect(self, lost: Collection[int]) -> float:
        """Since the blow, where one was struck on purpose; else since the first sign that somebody was missed or, where
        a machine fell silent and nobody was told, since a step was overdue."""
        now = self._clock.now()
        blows = [at for at in map(self._clock.struck_at, lost) if at is not None]
        return now - min(now, *(blows or [self._missed_since(now, overdue=bool(lost))]))

    def _missed_since(self, now: float, *, overdue: bool) -> float:
        """The first sign. One that came more than a step after that was due is not the first."""
        sign = now if self._first_sign is None else self._first_sign
        if not overdue or self._before_loss is None or self.pace_s is None:
            return sign
        due = self._before_loss + self.pace_s
        return due if self._first_sign is None or sign > due + self.pace_s else sign

    @property
    def lately_s(self) -> float:
        """How long a step takes in this epoch, as a rule; 0 before anything is known."""
        return statistics.median(self._lately) if self._lately else 0.0

    def reshaped(self, recovering: Recovering) -> float:
        """Everybody has its layers in a new shape: how long it took since the old one was left."""
        found = self._clock.now() - recovering.halting.began
        self.moved_s = found if self.moved_s is None else (self.moved_s + found) / 2
        return found

    def risk(self, at_risk: bool) -> None:
        """Time at risk: while a layer has one holder alone, its loss would cost more than a pause."""
        now = self._clock.now()
        if self._risk_since is not None:
            self.at_risk_s += now - self._risk_since
        self._risk_since = now if at_risk else None

    def committed(self) -> None:
        """A step that nothing disturbed: how long it took is the usual pace."""
        now = self._clock.now()
        if self._before_loss is not None:
            self._pace.append(now - self._before_loss)
            self._lately = [*self._lately[-31:], now - self._before_loss]
        self._before_loss = now

    def resumed(self) -> None:
        """What disturbed the run is made good: the next step takes as long as usual, from now on."""
        if self._before_loss is not None:
            self._before_loss = self._clock.now()

    @property
    def pace_s(self) -> float | None:
        """Seconds that a step takes as a rule; None: nobody knows yet."""
        return statistics.median(self._pace) if self._pace else None

    def recovered(self, recovering: Recovering) -> Recovered:
        """The last of the steps that were open is committed: the loss is made good."""
        halting, epoch, now = recovering.halting, recovering.made.epoch, self._clock.now()
        decide = recovering.decided_at - halting.began
        move = (recovering.ready_at or now) - recovering.decided_at
        found = Recovered(
            step=max(halting.committed, epoch.start - 1),
            lost=tuple(sorted({*recovering.lost, *recovering.left})),
            detect_ms=1e3 * halting.detect_s,
            decide_ms=1e3 * decide,
            move_ms=1e3 * move,
            redo_ms=1e3 * max(0.0, self._late(recovering) - halting.detect_s - decide - move),
            redone_actions=recovering.redone,
            source=recovering.made.source if recovering.lost else "notice",
        )
        self.recoveries.append(found)
        self.owed -= recovering.lost
        return found

    def inherit(self, recoveries: Sequence[Recovered], owed: Collection[int]) -> None:
        """What whoever led before had made good, and had not. Somebody may be missed since then."""
        self.recoveries = list(recoveries)
        self.owed = {*self.owed, *owed} - {node for recovered in recoveries for node in recovered.lost}

    def _late(self, recovering: Recovering) -> float:
        """How many seconds later than usual the last steps were committed. Whoever has just begun to lead knows no
        pace, but steps that were run again were late from the first to the last."""
        halting, now = recovering.halting, self._clock.now()
        steps = len(recovering.made.epoch.recovery.steps) + recovering.anew
        if self._before_loss is not None and (self.pace_s is not None or not steps):
            return now - self._before_loss - steps * (self.pace_s or 0.0)
        return now - halting.began + halting.detect_s if recovering.again else 0.0
