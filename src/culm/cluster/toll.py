"""The toll: what losses cost a run, measured as they happen."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.cluster.recovered import Recovered

if TYPE_CHECKING:
    from collections.abc import Collection

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
    ready_at: float | None = None

    @property
    def again(self) -> bool:
        """Whether what was open is given up, and run again in another shape."""
        return self.made.epoch.reshapes and bool(self.halting.lost)


class Toll:
    """Every loss that was made good, with its times; the usual pace to compare with; and the time at risk."""

    def __init__(self, clock: Clock) -> None:
        self.recoveries: list[Recovered] = []
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
        """Since the blow, where one was struck on purpose; else since the first sign that somebody was missed."""
        now = self._clock.now()
        blows = [at for at in map(self._clock.struck_at, lost) if at is not None]
        since = min(blows, default=now if self._first_sign is None else self._first_sign)
        return now - since

    @property
    def pace_s(self) -> float:
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

    def recovered(self, recovering: Recovering, lost: Collection[int]) -> Recovered:
        """The last of the steps that were open is committed: the loss is made good."""
        halting, epoch, now = recovering.halting, recovering.made.epoch, self._clock.now()
        decide = recovering.decided_at - halting.began
        move = (recovering.ready_at or now) - recovering.decided_at
        found = Recovered(
            step=max(epoch.committed, epoch.start - 1),
            lost=tuple(sorted(lost)),
            detect_ms=1e3 * halting.detect_s,
            decide_ms=1e3 * decide,
            move_ms=1e3 * move,
            redo_ms=1e3 * max(0.0, self._late(len(epoch.recovery.steps) or 1) - halting.detect_s - decide - move),
            redone_actions=epoch.recovery.redone,
            source=recovering.made.source if halting.lost else "notice",
        )
        self.recoveries.append(found)
        return found

    def _late(self, steps: int) -> float:
        """How many seconds later than usual the last steps were committed."""
        if not self._pace or self._before_loss is None:
            return 0.0
        return self._clock.now() - self._before_loss - steps * statistics.median(self._pace)
