"""A market whose traces look like a given one: by trying, and correcting what is off."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.generate import Market, generate
from culm.market.statistics import Statistics, average, statistics

if TYPE_CHECKING:
    from culm.market.trace import Trace

ROUNDS = 12
LOSSES = 4000
"""A round generates traces until about so many nodes are lost: from 4 to 24 traces, the same seeds in each round, so
that rounds differ by the numbers of the market alone."""


@dataclass(frozen=True)
class Fit:
    """A market, and how near its traces come: on seeds that had no part in the fit."""

    market: Market
    given: Statistics
    generated: Statistics


def fit(trace: Trace, *, zones: int | None = None) -> Fit:
    """The market that is like the trace in rate, group size, median life and share alive.

    Zones are those of the trace; where it names none, one. Raises UsageError for a trace without a node.
    """
    given = statistics(trace)
    if not given.peak or not given.span_h:
        raise UsageError(f"{trace.source} has no nodes over time: there is nothing to fit")
    market = Market(
        nodes=int(given.peak),
        hours=given.span_h,
        rate=given.rate,
        group=max(1.0, given.group),
        zones=zones or len(trace.zones) or 1,
        available=min(1.0, max(0.02, given.fraction)),
        grant=max(1.0, given.grant),
        tail=1.0,
    )
    seeds = int(min(24, max(4, LOSSES // max(1, given.removes))))
    best, error = market, math.inf
    for _ in range(ROUNDS if given.removes else 0):
        seen = sample(market, range(seeds))
        if (off := distance(given, seen)) < error:
            best, error = market, off
        market = _corrected(market, given, seen)
    return Fit(best, given, sample(best, range(seeds, 3 * seeds)))


def sample(market: Market, seeds: range) -> Statistics:
    """The mean statistics of a few of its traces; the share alive is that of the nodes wanted."""
    found = average([statistics(generate(market, seed)) for seed in seeds])
    return replace(found, fraction=found.alive / market.nodes)


def distance(given: Statistics, seen: Statistics) -> float:
    """The sum of the four relative errors."""
    pairs = ((getattr(given, name), getattr(seen, name)) for name in ("rate", "group", "life_h", "fraction"))
    return sum(abs(math.log(max(b, 1e-9) / a)) for a, b in pairs if a > 0)


def _corrected(market: Market, given: Statistics, seen: Statistics) -> Market:
    """Each number moved by as much as its statistic is off; a damped step where they hang together."""
    return replace(
        market,
        rate=market.rate * _ratio(given.rate, seen.rate),
        group=min(1e5, 1 + max(market.group - 1, 1e-3) * _ratio(given.group - 1, seen.group - 1)),
        available=_odds(market.available, given.fraction, seen.fraction),
        tail=min(4.0, max(0.15, market.tail * _ratio(given.life_h, seen.life_h) ** 0.6)),
    )


def _ratio(given: float, seen: float) -> float:
    """How much more is wanted; 1 where one of them says nothing."""
    return min(3.0, max(1 / 3, given / seen)) if given > 0 and seen > 0 else 1.0


def _odds(share: float, given: float, seen: float) -> float:
    """A share moved in its odds, so that it stays between 0 and 1."""
    wanted, got = min(given, 0.999), min(seen, 0.999)
    odds = min(share, 0.9995) / (1 - min(share, 0.9995)) * _ratio(wanted / (1 - wanted), got / (1 - got))
    return max(0.02, odds / (1 + odds))
