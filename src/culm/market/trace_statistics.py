"""Summary statistics of a market trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING

from culm.market.market_trace import HOUR, MarketTrace, group_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class TraceStatistics:
    """Statistics that a generator can be fitted to."""

    span_h: float
    adds: float
    removes: float
    peak: float
    """The most nodes at once."""
    alive: float
    """Mean number of nodes alive over time."""
    fraction: float
    """The same as a share of the peak."""
    rate: float
    """Nodes lost in an hour, as a share of those alive."""
    moments: float
    """Number of times at which nodes were lost."""
    group: float
    """Mean number of nodes lost at such a time."""
    largest: float
    """The most nodes lost at once."""
    life_h: float
    """Median lifetime of the nodes that were lost; nan if none was."""
    grant: float
    """Mean number of nodes that join at once, after the first time."""


def compute_statistics(trace: MarketTrace) -> TraceStatistics:
    """The statistics of one trace."""
    losses = group_sizes(trace.events, "remove")
    alive = mean_node_count(trace)
    node_hours = alive * trace.span_s / HOUR
    first = trace.events[0].t if trace.events else 0.0
    grants = group_sizes((event for event in trace.events if event.t > first), "add")
    lifetimes = node_lifetimes(trace)
    return TraceStatistics(
        span_h=trace.span_s / HOUR,
        adds=sum(event.kind == "add" for event in trace.events),
        removes=sum(losses),
        peak=trace.peak,
        alive=alive,
        fraction=alive / trace.peak if trace.peak else 0.0,
        rate=sum(losses) / node_hours if node_hours else 0.0,
        moments=len(losses),
        group=_mean(losses),
        largest=max(losses, default=0),
        life_h=median(lifetimes) / HOUR if lifetimes else float("nan"),
        grant=_mean(grants),
    )


def average_statistics(statistics: Sequence[TraceStatistics]) -> TraceStatistics:
    """The mean of each statistic over several traces; missing values (nan) are ignored."""
    return TraceStatistics(
        **{f.name: _mean([v for s in statistics if (v := getattr(s, f.name)) == v]) for f in fields(TraceStatistics)}
    )


def mean_node_count(trace: MarketTrace) -> float:
    """Mean number of nodes alive over the span."""
    if not trace.span_s:
        return float(trace.peak)
    ends = [*(count.t for count in trace.counts[1:]), trace.span_s]
    return sum(c.alive * (end - c.t) for c, end in zip(trace.counts, ends, strict=False)) / trace.span_s


def node_lifetimes(trace: MarketTrace) -> list[float]:
    """Seconds from joining to loss, of the nodes that were lost."""
    joined_at: dict[str, float] = {}
    lifetimes = []
    for event in trace.events:
        if event.kind == "add":
            joined_at[event.node] = event.t
        else:
            lifetimes.append(event.t - joined_at.pop(event.node))
    return lifetimes


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
