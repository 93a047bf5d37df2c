"""Write market traces in culm's own format and in those of other tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby

from culm.errors import UsageError
from culm.market.market_trace import MarketTrace


def format_trace(trace: MarketTrace, trace_format: str, *, gap_s: float = 60.0) -> str:
    """The trace as text. `gap_s` is the interval of SkyPilot's format, which has one count per interval.

    Raises UsageError for an unknown format.
    """
    if trace_format not in TRACE_FORMATS:
        raise UsageError(f"there is no trace format {trace_format!r}: use {', '.join(TRACE_FORMATS)}")
    if not gap_s > 0:
        raise UsageError(f"the gap is {gap_s:g} s: use a number above 0")
    return TRACE_FORMATS[trace_format](trace, gap_s)


def _format_culm(trace: MarketTrace, _: float) -> str:
    lines = (f"{e.t:.3f},{e.kind},{e.node},{e.zone}".replace(".000,", ",", 1) for e in trace.events)
    return "\n".join(["t_s,kind,node,zone", *lines]) + "\n"


def _format_events(trace: MarketTrace, _: float) -> str:
    return "".join(f"{round(e.t * 1e3)},{e.kind},{e.node}\n" for e in trace.events)


def _format_counts(trace: MarketTrace, _: float) -> str:
    """In milliseconds, with the end of the trace as its last line."""
    rows = [*trace.counts, (trace.span_s, trace.counts[-1].alive if trace.counts else 0)]
    return "".join(f"{round(t * 1e3)},{alive}\n" for t, alive in rows)


def _format_skypilot(trace: MarketTrace, gap_s: float) -> str:
    data, alive, counts = [], 0, iter(trace.counts)
    upcoming = next(counts, None)
    for tick in range(int(trace.span_s / gap_s) + 1):
        while upcoming is not None and upcoming.t <= tick * gap_s:
            alive, upcoming = upcoming.alive, next(counts, None)
        data.append(alive)
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": data}) + "\n"


def _format_parcae(trace: MarketTrace, _: float) -> str:
    lines = []
    for (t, kind), moment in groupby(trace.events, key=lambda event: (event.t, event.kind)):
        lines.append(json.dumps([round(t * 1e3), kind, {"nodes": [event.node for event in moment]}]))
    return "\n".join(lines) + "\n"


TRACE_FORMATS: dict[str, Callable[[MarketTrace, float], str]] = {
    "culm": _format_culm,
    "events": _format_events,
    "counts": _format_counts,
    "skypilot": _format_skypilot,
    "parcae": _format_parcae,
}
"""By name: t_s,kind,node,zone; time_ms,kind,node; time_ms,alive; a list of counts; one JSON array per line."""
