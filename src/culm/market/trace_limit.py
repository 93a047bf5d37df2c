"""Rent at most this many nodes of a market trace: others of the market replace lost ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from culm.market.market_trace import NodeEvent

if TYPE_CHECKING:
    from culm.market.market_trace import MarketTrace


def limit_nodes(trace: MarketTrace, nodes: int) -> MarketTrace:
    """The trace of a renter who wants `nodes` nodes: each node that the market offers is rented while fewer are.

    A lost node is replaced at once by a node that the market has and the renter does not, the longest present first.
    """
    if trace.peak <= nodes:
        return trace
    rented: set[str] = set()
    offered: dict[str, str] = {}
    events: list[NodeEvent] = []
    for t, moment in groupby(trace.events, key=lambda event: event.t):
        for event in moment:
            if event.kind == "add":
                offered[event.node] = event.zone
            elif event.node in rented:
                rented.discard(event.node)
                events.append(event)
            else:
                offered.pop(event.node)
        for name in list(offered)[: nodes - len(rented)]:
            rented.add(name)
            events.append(NodeEvent(t, "add", name, offered.pop(name)))
    return replace(trace, events=tuple(events))
