"""Generate a market trace from a seed: losses in groups within a zone, and lifetimes with a heavy tail.

Loss times are random, more frequent the more nodes there are and the younger they are, following a Weibull
distribution of lifetimes with a shape below 1. Each loss takes a group of nodes out of one zone, young ones more likely
than old ones. Missing nodes are requested again and are granted, also in groups, after a while.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.market_trace import HOUR, MarketTrace, NodeEvent
from culm.plan.rent.strategy_goodput import present_share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MIN_AGE_H = 1 / 60
"""Ages start at this value, so that the hazard of a new node is finite."""
_NEGLIGIBLE_RATE = 1e-9
"""Preemption rates per hour below this count as zero."""
_NUMPY_FROM = 64
"""Above this number of nodes NumPy computes the sum faster."""
_MIN_WAIT_H = 1e-4
"""The shortest wait for a missing node."""


@dataclass(frozen=True, kw_only=True)
class MarketModel:
    """Parameters of a market. Raises UsageError for a value that is out of range."""

    nodes: int = 48
    """Number of nodes wanted at any time."""
    hours: float = 24.0
    rate: float = 0.10
    """Preemption rate: share of the live nodes lost per hour."""
    group: float = 2.1
    """Mean number of nodes lost at once; fewer if the zone has fewer."""
    zones: int = 3
    available: float | None = None
    """Share of the wanted nodes that are present, in the long run; None: what follows from `rate` if a lost node is
    replaced as fast as `culm plan` assumes."""
    grant: float = 1.0
    """Mean number of nodes granted at once."""
    tail: float = 0.8
    """Shape of the lifetime distribution: 1 is memoryless, below 1 heavy-tailed, above 1 regular."""

    def __post_init__(self) -> None:
        _check_range("nodes", self.nodes, 1, 100_000)
        _check_range("hours", self.hours, 0, 100_000)
        _check_range("rate", self.rate, 0, 100)
        _check_range("group", self.group, 1, 100_000)
        _check_range("zones", self.zones, 1, 1000)
        _check_range("available", self.present_share, 0.01, 1)
        _check_range("grant", self.grant, 1, 100_000)
        _check_range("tail", self.tail, 0.1, 10)

    @classmethod
    def parse(cls, text: str) -> MarketModel:
        """Parse `rate=0.10,group=2.1,zones=3`; fields that are not named keep their defaults."""
        values: dict[str, float | int] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            values[name.strip()] = _parse_value(name.strip(), value.strip(), part)
        return cls(**values)  # type: ignore[arg-type]  # _parse_value converts each to its field's type

    @property
    def present_share(self) -> float:
        """Share of the wanted nodes that are present, in the long run."""
        return present_share(self.rate) if self.available is None else self.available

    @property
    def wait_h(self) -> float:
        """Mean waiting time for a missing node; infinite if none is ever lost."""
        lost = self.present_share * self.rate
        return (1 - self.present_share) / lost if lost > _NEGLIGIBLE_RATE else math.inf


def generate_trace(market: MarketModel, seed: int) -> MarketTrace:
    """Generate a trace of the market; the same seed gives the same trace."""
    return _TraceGenerator(market, seed).run()


class _TraceGenerator:
    """State of a generation: the present nodes by zone, with the hour at which each joined."""

    def __init__(self, market: MarketModel, seed: int) -> None:
        self.market = market
        import numpy as np  # imported here, so that other commands start faster

        self.np = np
        self.random = np.random.default_rng(seed)
        self.names: list[list[str]] = [[] for _ in range(market.zones)]
        self.birth_hours: list[list[float]] = [[] for _ in range(market.zones)]
        self.events: list[NodeEvent] = []
        self.node_count = 0
        shape = market.tail
        self.scale: float = market.rate**shape * shape * math.gamma(1 + 1 / shape) ** shape

    def run(self) -> MarketTrace:
        """Sample event times by thinning: propose at the highest rate of a window, reject some by the actual rate."""
        market, now = self.market, 0.0
        for number in range(max(1, round(market.nodes * market.present_share))):
            self._add_node(now, number % market.zones)
        while now < market.hours:
            end = min(now + self._window_h(), market.hours)
            grant_rate = self._grant_rate()
            max_rate = grant_rate + sum(self._loss_rates(now if market.tail <= 1 else end))
            wait_h = self.random.exponential(1 / max_rate) if max_rate else math.inf
            now, proposed = (now + wait_h, True) if now + wait_h < end else (end, False)
            if proposed:
                self._apply_draw(now, self.random.random() * max_rate, grant_rate)
        return MarketTrace(tuple(self.events), market.hours * HOUR, "generated")

    def _window_h(self) -> float:
        """Rates that fall with age are highest now; rising rates need a short window."""
        return math.inf if self.market.tail <= 1 else 0.25

    def _apply_draw(self, now: float, draw: float, grant_rate: float) -> None:
        loss_rates = self._loss_rates(now)
        if draw < grant_rate:
            missing = self.market.nodes - self._alive_count()
            zone = int(self.random.integers(self.market.zones))
            for _ in range(self._draw_group_size(self.market.grant, missing)):
                self._add_node(now, zone)
        elif draw < grant_rate + sum(loss_rates):
            self._remove_group(now, bisect_left(list(accumulate(loss_rates)), draw - grant_rate))

    def _alive_count(self) -> int:
        return sum(map(len, self.names))

    def _node_hazards(self, now: float, zone: int) -> NDArray[np.float64]:
        """Hazard of each node of a zone, per hour."""
        ages = now - self.np.array(self.birth_hours[zone]) + _MIN_AGE_H
        return self.np.asarray(self.scale * ages ** (self.market.tail - 1))

    def _zone_hazard(self, now: float, zone: int) -> float:
        """The sum of the hazards of a zone; in plain Python where that is faster."""
        births, power = self.birth_hours[zone], self.market.tail - 1
        if power == 0:
            return self.scale * len(births)
        if len(births) > _NUMPY_FROM:
            return float(self._node_hazards(now, zone).sum())
        since = now + _MIN_AGE_H
        return self.scale * math.fsum([(since - birth) ** power for birth in births])

    def _loss_rates(self, now: float) -> list[float]:
        """Loss events per hour, by zone: fewer than lost nodes, because each event takes several."""
        group = self.market.group
        return [
            self._zone_hazard(now, zone) / _truncated_mean(group, len(names)) if names else 0.0
            for zone, names in enumerate(self.names)
        ]

    def _grant_rate(self) -> float:
        missing, wait = self.market.nodes - self._alive_count(), self.market.wait_h
        if not missing or math.isinf(wait):
            return 0.0
        return missing / max(wait, _MIN_WAIT_H) / _truncated_mean(self.market.grant, missing)

    def _add_node(self, now: float, zone: int) -> None:
        self.node_count += 1
        self.names[zone].append(f"node{self.node_count}")
        self.birth_hours[zone].append(now)
        self.events.append(NodeEvent(now * HOUR, "add", f"node{self.node_count}", f"zone{zone + 1}"))

    def _remove_group(self, now: float, zone: int) -> None:
        names, births, hazards = self.names[zone], self.birth_hours[zone], self._node_hazards(now, zone)
        size = self._draw_group_size(self.market.group, len(names))
        chosen = self.random.choice(len(names), size, replace=False, p=hazards / hazards.sum())
        for index in sorted(map(int, chosen), reverse=True):
            self.events.append(NodeEvent(now * HOUR, "remove", names.pop(index), f"zone{zone + 1}"))
            births.pop(index)

    def _draw_group_size(self, mean: float, most: int) -> int:
        return min(int(self.random.geometric(1 / mean)), most)


def _truncated_mean(mean: float, most: int) -> float:
    """The mean of a geometric distribution with that mean, truncated at `most`."""
    return mean * (1 - (1 - 1 / mean) ** most) if most else 1.0


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"market {name} is {value:g}: use {low:g} to {high:g}")


def _parse_value(name: str, value: str, part: str) -> float | int:
    known = {f.name: f.type for f in fields(MarketModel)}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
        raise UsageError(f"--market has {part!r}: {hint}")
    try:
        return int(value) if known[name] == "int" else float(value)
    except ValueError:
        kind = "whole number" if known[name] == "int" else "number"
        raise UsageError(f"--market has {part!r}: {name} is a {kind}, as in rate=0.10,group=2.1,zones=3") from None


P3 = MarketModel(nodes=32, hours=11.37, rate=0.638, group=2.2, zones=3, available=0.742, grant=1.92, tail=1.0)
"""A pool of p3 kept at 32 nodes: 24 alive on average, 61 % of them lost per hour, half within the first hour."""
G4DN = MarketModel(nodes=24, hours=10.77, rate=0.564, group=1.57, zones=3, available=0.529, grant=1.56, tail=0.915)
"""A pool of g4dn kept at 24 nodes: 13 alive on average, 55 % of them lost per hour."""

PRESETS = {"p3": P3, "g4dn": G4DN}
"""Markets that `culm trace fit --zones 3` fitted to two published traces of AWS spot pools (2020 and 2021)."""
