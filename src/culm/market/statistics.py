"""What a trace comes to, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING

from culm.market.trace import HOUR, Trace, groups

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Statistics:
    """Numbers that a generator can be fitted to."""

    span_h: float
    adds: float
    removes: float
    peak: float
    """The most nodes at once."""
    alive: float
    """Nodes alive on average over the time."""
    fraction: float
    """The same as a share of the peak."""
    rate: float
    """Nodes lost in an hour, as a share of those alive."""
    moments: float
    """Moments at which nodes were lost."""
    group: float
    """Nodes lost at such a moment, on average."""
    largest: float
    """The most at once."""
    life_h: float
    """The median life, of those whose end was seen; nan if none was."""
    grant: float
    """Nodes that come at once, on average, after the first moment."""


def statistics(trace: Trace) -> Statistics:
    """The numbers of one trace."""
    losses = groups(trace.events, "remove")
    alive = mean_alive(trace)
    node_hours = alive * trace.span_s / HOUR
    first = trace.events[0].t if trace.events else 0.0
    grants = groups((event for event in trace.events if event.t > first), "add")
    ended = lives(trace)
    return Statistics(
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
        life_h=median(ended) / HOUR if ended else float("nan"),
        grant=_mean(grants),
    )


def average(many: Sequence[Statistics]) -> Statistics:
    """The mean of each number over several traces; numbers that a trace does not have are left out."""
    return Statistics(
        **{f.name: _mean([v for s in many if (v := getattr(s, f.name)) == v]) for f in fields(Statistics)}
    )


def mean_alive(trace: Trace) -> float:
    """Nodes alive on average over the span."""
    if not trace.span_s:
        return float(trace.peak)
    ends = [*(count.t for count in trace.counts[1:]), trace.span_s]
    return sum(c.alive * (end - c.t) for c, end in zip(trace.counts, ends, strict=False)) / trace.span_s


def lives(trace: Trace) -> list[float]:
    """Seconds from coming to going, of those that went."""
    born: dict[str, float] = {}
    ended = []
    for event in trace.events:
        if event.kind == "add":
            born[event.node] = event.t
        else:
            ended.append(event.t - born.pop(event.node))
    return ended


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
