"""Spot prices that move: what a node costs at each time, by zone. Pure.

A series comes from published prices of one instance, of which there is one every two weeks or so. Between two of them
prices are drawn: a random walk in the logarithm, pinned to the published prices at both ends (a Brownian bridge), whose
size is that of the published changes. `price_series` starts on a random published day, so that many seeds see what an
instance went through in years.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from culm.errors import UsageError
from culm.market.csv_rows import read_rows
from culm.market.market_trace import HOUR

STEP_S = 6 * HOUR
"""Time between two drawn prices. Prices of EC2 have moved a few times a day at most since 2017."""
_DAY_S = 24 * HOUR


class PriceMove(NamedTuple):
    """A new price, in one zone or (empty) in all."""

    t: float
    usd_h: float
    zone: str = ""


@dataclass(frozen=True)
class PriceSeries:
    """Prices in order of time. The first price of a zone also holds before it."""

    moves: tuple[PriceMove, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.moves or any(b.t < a.t for a, b in pairwise(self.moves)):
            raise UsageError(f"the prices {self.source or 'of the series'} are not in order of time, or there are none")

    @classmethod
    def constant(cls, usd_h: float) -> PriceSeries:
        """One price at all times and everywhere."""
        return cls((PriceMove(0.0, usd_h),))

    def at(self, t: float, zone: str = "") -> float:
        """The price in a zone at a time; in a zone that the series does not know, the price of its first zone."""
        own = [move for move in self.moves if move.zone in ("", zone)]
        own = own or [move for move in self.moves if move.zone == self.moves[0].zone]
        return own[max(0, bisect_right(own, t, key=lambda move: move.t) - 1)].usd_h

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(move.zone for move in self.moves))


PublishedPrices = Mapping[str, Sequence[tuple[date, float]]]
"""By zone: the days of published prices of one instance and the prices, oldest first."""


def published_prices(text: str, source: str, instance: str) -> PublishedPrices:
    """The prices of an instance from a CSV with the columns date, instance, zone and spot_usd_h.

    Raises UsageError if there are none.
    """
    found: dict[str, list[tuple[date, float]]] = {}
    text = text.replace(",nan", ",")  # no price was listed
    for row in read_rows(text, source, ("date", "instance", "zone", "spot_usd_h")):
        price, day = row.get_optional_number("spot_usd_h"), row.get_date("date")
        if row.get_text("instance") == instance and price is not None and math.isfinite(price) and day is not None:
            found.setdefault(row.get_text("zone"), []).append((day, price))
    known = {zone: sorted(prices) for zone, prices in found.items() if len(prices) > 1}
    if not known:
        raise UsageError(f"{source} has no prices of {instance} over time")
    return known


def weekly_volatility(published: PublishedPrices) -> float:
    """Standard deviation of the change of the logarithm of the price in a week: a robust estimate from all zones."""
    scaled = [
        abs(math.log(after / before)) / math.sqrt(max(1, (day - start).days) / 7)
        for prices in published.values()
        for (start, before), (day, after) in pairwise(prices)
    ]
    return median(scaled) * 1.4826


def price_series(published: PublishedPrices, zones: Sequence[str], hours: float, seed: int) -> PriceSeries:
    """Prices of a run of this many hours in these zones, from a random published day on; the same seed gives the same.

    Each zone of the run follows the published prices of another zone, as long as there are enough.
    """
    rng = random.Random(seed)
    longest = max(published.values(), key=len)
    last_start = max(1, sum((longest[-1][0] - day).days * 24 >= hours for day, _ in longest))
    begin = longest[rng.randrange(last_start)][0]
    sigma = weekly_volatility(published)
    names = [name for name, prices in published.items() if prices[0][0] <= begin] or list(published)
    rng.shuffle(names)
    moves: list[PriceMove] = []
    for number, zone in enumerate(zones or [""]):
        prices = published[names[number % len(names)]]
        moves += _zone_moves(prices, begin, zone, hours, sigma, rng)
    return PriceSeries(tuple(sorted(moves, key=lambda move: move.t)), f"published prices from {begin} on")


def _zone_moves(
    prices: Sequence[tuple[date, float]], begin: date, zone: str, hours: float, sigma: float, rng: random.Random
) -> Iterable[PriceMove]:
    """Drawn prices of a zone: pinned to the published ones, with the usual size of changes in between."""
    now, end = 0.0, hours * HOUR
    log_price = math.log(_price_on(prices, begin))
    yield PriceMove(0.0, round(math.exp(log_price), 4), zone)
    pins = [((day - begin).days * _DAY_S, math.log(price)) for day, price in prices if day > begin]
    for pin_s, pin_log in pins:
        while now + STEP_S < min(pin_s, end):
            left_s = pin_s - now
            mean = log_price + (pin_log - log_price) * STEP_S / left_s
            spread = sigma * math.sqrt(STEP_S / (7 * _DAY_S) * (1 - STEP_S / left_s))
            now, log_price = now + STEP_S, rng.gauss(mean, spread)
            yield PriceMove(now, round(math.exp(log_price), 4), zone)
        if pin_s >= end:
            return
        now, log_price = pin_s, pin_log
        yield PriceMove(now, round(math.exp(log_price), 4), zone)


def _price_on(prices: Sequence[tuple[date, float]], day: date) -> float:
    """The price that was valid on a day; before the first, that one."""
    return next((price for valid, price in reversed(prices) if valid <= day), prices[0][1])
