"""Writing traces: our own form, and those that other tools read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby

from culm.errors import UsageError
from culm.market.trace import Trace


def written(trace: Trace, form: str, *, gap_s: float = 60.0) -> str:
    """The trace as text. `gap_s` is the time between two ticks of SkyPilot's form, which has no others.

    Raises UsageError for a form that is not there.
    """
    if form not in FORMS:
        raise UsageError(f"there is no form {form!r} of a trace: use {', '.join(FORMS)}")
    if not gap_s > 0:
        raise UsageError(f"the gap is {gap_s:g} s: use a number above 0")
    return FORMS[form](trace, gap_s)


def _culm(trace: Trace, _: float) -> str:
    lines = (f"{e.t:.3f},{e.kind},{e.node},{e.zone}".replace(".000,", ",", 1) for e in trace.events)
    return "\n".join(["t_s,kind,node,zone", *lines]) + "\n"


def _events(trace: Trace, _: float) -> str:
    return "".join(f"{round(e.t * 1e3)},{e.kind},{e.node}\n" for e in trace.events)


def _counts(trace: Trace, _: float) -> str:
    """In milliseconds, with the end of the trace as its last line."""
    rows = [*trace.counts, (trace.span_s, trace.counts[-1].alive if trace.counts else 0)]
    return "".join(f"{round(t * 1e3)},{alive}\n" for t, alive in rows)


def _skypilot(trace: Trace, gap_s: float) -> str:
    data, alive, counts = [], 0, iter(trace.counts)
    coming = next(counts, None)
    for tick in range(int(trace.span_s / gap_s) + 1):
        while coming is not None and coming.t <= tick * gap_s:
            alive, coming = coming.alive, next(counts, None)
        data.append(alive)
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": data}) + "\n"


def _parcae(trace: Trace, _: float) -> str:
    lines = []
    for (t, kind), moment in groupby(trace.events, key=lambda event: (event.t, event.kind)):
        lines.append(json.dumps([round(t * 1e3), kind, {"nodes": [event.node for event in moment]}]))
    return "\n".join(lines) + "\n"


FORMS: dict[str, Callable[[Trace, float], str]] = {
    "culm": _culm,
    "events": _events,
    "counts": _counts,
    "skypilot": _skypilot,
    "parcae": _parcae,
}
"""By name: t_s,kind,node,zone; time_ms,kind,node; time_ms,alive; a list of ticks; an array a line."""
