"""Fit a market model to a given market trace: generate, compare, correct, repeat."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.trace_generator import MarketModel, generate_trace
from culm.market.trace_statistics import TraceStatistics, average_statistics, compute_statistics

if TYPE_CHECKING:
    from culm.market.market_trace import MarketTrace

FIT_ROUNDS = 12
PREEMPTIONS_PER_ROUND = 4000
"""A round generates market traces until about this many nodes are lost: 4 to 24 traces, with the same seeds in each
round, so that rounds differ only by the parameters of the market."""


@dataclass(frozen=True)
class MarketFit:
    """A market model, and the statistics of its traces on seeds that were not used for the fit."""

    market: MarketModel
    target: TraceStatistics
    achieved: TraceStatistics


def fit_market(trace: MarketTrace, *, zones: int | None = None) -> MarketFit:
    """Fit a market model to the trace's preemption rate, group size, median life and share alive.

    The zones are those of the trace, or one if it names none. Raises UsageError for a trace without nodes.
    """
    target = compute_statistics(trace)
    if not target.peak or not target.span_h:
        raise UsageError(f"{trace.source} has no nodes: there is nothing to fit")
    market = MarketModel(
        nodes=int(target.peak),
        hours=target.span_h,
        rate=target.rate,
        group=max(1.0, target.group),
        zones=zones or len(trace.zones) or 1,
        available=min(1.0, max(0.02, target.fraction)),
        grant=max(1.0, target.grant),
        tail=1.0,
    )
    seeds = int(min(24, max(4, PREEMPTIONS_PER_ROUND // max(1, target.removes))))
    best, error = market, math.inf
    for _ in range(FIT_ROUNDS if target.removes else 0):
        achieved = sample_statistics(market, range(seeds))
        if (difference := distance(target, achieved)) < error:
            best, error = market, difference
        market = _correct(market, target, achieved)
    return MarketFit(best, target, sample_statistics(best, range(seeds, 3 * seeds)))


def sample_statistics(market: MarketModel, seeds: range) -> TraceStatistics:
    """Mean statistics of some generated traces; the share alive is relative to the wanted nodes."""
    mean = average_statistics([compute_statistics(generate_trace(market, seed)) for seed in seeds])
    return replace(mean, fraction=mean.alive / market.nodes)


def distance(target: TraceStatistics, achieved: TraceStatistics) -> float:
    """The sum of the four relative errors (absolute logarithms)."""
    pairs = ((getattr(target, name), getattr(achieved, name)) for name in ("rate", "group", "life_h", "fraction"))
    return sum(abs(math.log(max(b, 1e-9) / a)) for a, b in pairs if a > 0)


def _correct(market: MarketModel, target: TraceStatistics, achieved: TraceStatistics) -> MarketModel:
    """Change each parameter by the error of its statistic; damped where parameters interact."""
    return replace(
        market,
        rate=market.rate * _bounded_ratio(target.rate, achieved.rate),
        group=min(1e5, 1 + max(market.group - 1, 1e-3) * _bounded_ratio(target.group - 1, achieved.group - 1)),
        available=_adjust_odds(market.present_share, target.fraction, achieved.fraction),
        tail=min(4.0, max(0.15, market.tail * _bounded_ratio(target.life_h, achieved.life_h) ** 0.6)),
    )


def _bounded_ratio(target: float, achieved: float) -> float:
    """The factor by which the value should grow, limited to 1/3 to 3; 1 if either value is 0."""
    return min(3.0, max(1 / 3, target / achieved)) if target > 0 and achieved > 0 else 1.0


def _adjust_odds(share: float, target: float, achieved: float) -> float:
    """Adjust a share by its odds, so that it stays between 0 and 1."""
    target_share, achieved_share = min(target, 0.999), min(achieved, 0.999)
    odds = (
        min(share, 0.9995)
        / (1 - min(share, 0.9995))
        * _bounded_ratio(target_share / (1 - target_share), achieved_share / (1 - achieved_share))
    )
    return max(0.02, odds / (1 + odds))
