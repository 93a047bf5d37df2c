"""A part of a market trace, from any time on, as a trace of its own: many markets out of one published trace. Pure."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from culm.market.market_trace import MarketTrace, NodeEvent

if TYPE_CHECKING:
    from collections.abc import Iterator


def trace_window(trace: MarketTrace, start_s: float, span_s: float) -> MarketTrace:
    """The market of a trace from `start_s` on, for `span_s` seconds. After its end the trace continues at its start:
    as many nodes as possible stay, and the rest join or are lost at once."""
    present: dict[str, NodeEvent] = {}
    events: list[NodeEvent] = []
    names = (f"w{number}" for number in count(1))
    for event in _endless(trace, start_s, span_s, names):
        if event.t > 0:
            events.append(event)
        elif event.kind == "add":
            present[event.node] = event
        else:
            del present[event.node]
    first = tuple(event._replace(t=0.0) for event in present.values())
    return MarketTrace((*first, *events), span_s, f"{trace.source} from {start_s / 3600:.2f} h on")


def _endless(trace: MarketTrace, start_s: float, span_s: float, names: Iterator[str]) -> Iterator[NodeEvent]:
    """The events of the trace again and again, with unique names and times since `start_s`, up to `span_s`."""
    known: dict[str, str] = {}
    """The name of each node that is present, by its name in the trace."""
    zones: dict[str, str] = {}
    left: list[str] = []
    """At the start of another round: nodes that are still there from the round before."""
    now = -start_s
    for number in count():
        begin_s = now = max(now, number * trace.span_s - start_s)  # rounding must not go back in time
        for event in trace.events:
            now = max(now, begin_s + event.t)
            if now >= span_s:
                return
            if event.t > 0 and left:
                yield from (NodeEvent(begin_s, "remove", name, zones[name]) for name in left)
                left = []
            if event.kind == "remove":
                name = known.pop(event.node)
                yield NodeEvent(now, "remove", name, zones[name])
            elif event.t == 0 and left:
                known[event.node] = left.pop(0)
            else:
                name = known[event.node] = next(names)
                zones[name] = event.zone
                yield NodeEvent(now, "add", name, event.zone)
        if begin_s + trace.span_s >= span_s:
            return
        now = max(now, begin_s + trace.span_s)
        left, known = list(known.values()), {}
