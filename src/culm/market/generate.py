"""A market that never was, from a seed: losses in groups within a zone, and lives with a heavy tail.

Moments of loss come by chance, more often the more nodes there are and the younger they are, as a Weibull law of lives
with a shape below 1 has it. Each takes a group out of one zone, the young rather than the old. Missing nodes
are asked for again and are granted, in groups too, after a while.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.trace import HOUR, Event, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_YOUNG_H = 1 / 60
"""Ages count from here on, so that a node of age 0 is not infinitely likely to go."""
_NEVER = 1e-9
"""Losses an hour that do not count."""
_MANY = 64
"""Of more nodes NumPy adds up quicker."""
_SOON_H = 1e-4
"""The shortest wait for a missing node."""


@dataclass(frozen=True, kw_only=True)
class Market:
    """The numbers of a market. Raises UsageError, one sentence, for one that is out of range."""

    nodes: int = 48
    """How many are wanted at any time."""
    hours: float = 24.0
    rate: float = 0.10
    """Share of the living nodes that is lost in an hour."""
    group: float = 2.1
    """Nodes lost at once, on average; fewer where the zone has no more."""
    zones: int = 3
    available: float = 0.9
    """Share of the wanted nodes that are there, in the long run."""
    grant: float = 1.0
    """Nodes granted at once, on average."""
    tail: float = 0.8
    """Shape of the lives: 1 is memoryless, below 1 heavy-tailed, above 1 regular."""

    def __post_init__(self) -> None:
        _check("nodes", self.nodes, 1, 100_000)
        _check("hours", self.hours, 0, 100_000)
        _check("rate", self.rate, 0, 100)
        _check("group", self.group, 1, 100_000)
        _check("zones", self.zones, 1, 1000)
        _check("available", self.available, 0.01, 1)
        _check("grant", self.grant, 1, 100_000)
        _check("tail", self.tail, 0.1, 10)

    @classmethod
    def parse(cls, text: str) -> Market:
        """`rate=0.10,group=2.1,zones=3`; what is not named keeps its default."""
        found: dict[str, float | int] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            found[name.strip()] = _value(name.strip(), value.strip(), part)
        return cls(**found)  # type: ignore[arg-type]  # the values were made to fit by name

    @property
    def wait_h(self) -> float:
        """How long a missing node is waited for, on average; without an end if none is ever lost."""
        lost = self.available * self.rate
        return (1 - self.available) / lost if lost > _NEVER else math.inf


def generate(market: Market, seed: int) -> Trace:
    """A trace of the market; the same one for the same seed."""
    return _Generator(market, seed).run()


class _Generator:
    """The state while a trace is being made: who is there, by zone, with the hour of birth."""

    def __init__(self, market: Market, seed: int) -> None:
        self.market = market
        import numpy as np  # here, so that commands that generate nothing start without it

        self.np = np
        self.random = np.random.default_rng(seed)
        self.names: list[list[str]] = [[] for _ in range(market.zones)]
        self.births: list[list[float]] = [[] for _ in range(market.zones)]
        self.events: list[Event] = []
        self.born = 0
        shape = market.tail
        self.scale: float = market.rate**shape * shape * math.gamma(1 + 1 / shape) ** shape

    def run(self) -> Trace:
        """Chance moments whose rate changes with the ages: proposed at the highest rate of a window, some refused."""
        market, now = self.market, 0.0
        for number in range(max(1, round(market.nodes * market.available))):
            self._add(now, number % market.zones)
        while now < market.hours:
            end = min(now + self._window(), market.hours)
            grants = self._grant_rate()
            ceiling = grants + sum(self._loss_rates(now if market.tail <= 1 else end))
            wait = self.random.exponential(1 / ceiling) if ceiling else math.inf
            now, proposed = (now + wait, True) if now + wait < end else (end, False)
            if proposed:
                self._happen(now, self.random.random() * ceiling, grants)
        return Trace(tuple(self.events), market.hours * HOUR, "generated")

    def _window(self) -> float:
        """Rates that fall with age are at their highest now; those that rise need a short look ahead."""
        return math.inf if self.market.tail <= 1 else 0.25

    def _happen(self, now: float, drawn: float, grants: float) -> None:
        losses = self._loss_rates(now)
        if drawn < grants:
            missing = self.market.nodes - self._alive()
            zone = int(self.random.integers(self.market.zones))
            for _ in range(self._size(self.market.grant, missing)):
                self._add(now, zone)
        elif drawn < grants + sum(losses):
            self._lose(now, bisect_left(list(accumulate(losses)), drawn - grants))

    def _alive(self) -> int:
        return sum(map(len, self.names))

    def _hazards(self, now: float, zone: int) -> NDArray[np.float64]:
        """How likely each node of a zone is to go, per hour."""
        ages = now - self.np.array(self.births[zone]) + _YOUNG_H
        return self.np.asarray(self.scale * ages ** (self.market.tail - 1))

    def _hazard(self, now: float, zone: int) -> float:
        """The sum of them: in plain Python where that is quicker."""
        births, power = self.births[zone], self.market.tail - 1
        if power == 0:
            return self.scale * len(births)
        if len(births) > _MANY:
            return float(self._hazards(now, zone).sum())
        since = now + _YOUNG_H
        return self.scale * math.fsum([(since - birth) ** power for birth in births])

    def _loss_rates(self, now: float) -> list[float]:
        """Moments of loss per hour, by zone: fewer than the nodes lost, as each takes several."""
        group = self.market.group
        return [
            self._hazard(now, zone) / _expected(group, len(names)) if names else 0.0
            for zone, names in enumerate(self.names)
        ]

    def _grant_rate(self) -> float:
        missing, wait = self.market.nodes - self._alive(), self.market.wait_h
        if not missing or math.isinf(wait):
            return 0.0
        return missing / max(wait, _SOON_H) / _expected(self.market.grant, missing)

    def _add(self, now: float, zone: int) -> None:
        self.born += 1
        self.names[zone].append(f"node{self.born}")
        self.births[zone].append(now)
        self.events.append(Event(now * HOUR, "add", f"node{self.born}", f"zone{zone + 1}"))

    def _lose(self, now: float, zone: int) -> None:
        names, births, hazards = self.names[zone], self.births[zone], self._hazards(now, zone)
        size = self._size(self.market.group, len(names))
        chosen = self.random.choice(len(names), size, replace=False, p=hazards / hazards.sum())
        for at in sorted(map(int, chosen), reverse=True):
            self.events.append(Event(now * HOUR, "remove", names.pop(at), f"zone{zone + 1}"))
            births.pop(at)

    def _size(self, mean: float, most: int) -> int:
        return min(int(self.random.geometric(1 / mean)), most)


def _expected(mean: float, most: int) -> float:
    """The mean of a geometric number with that mean, cut off at `most`."""
    return mean * (1 - (1 - 1 / mean) ** most) if most else 1.0


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"market {name} is {value:g}: use {low:g} to {high:g}")


def _value(name: str, value: str, part: str) -> float | int:
    known = {f.name: f.type for f in fields(Market)}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
        raise UsageError(f"--market has {part!r}: {hint}")
    try:
        return int(value) if known[name] == "int" else float(value)
    except ValueError:
        kind = "whole number" if known[name] == "int" else "number"
        raise UsageError(f"--market has {part!r}: {name} is a {kind}, as in rate=0.10,group=2.1,zones=3") from None
