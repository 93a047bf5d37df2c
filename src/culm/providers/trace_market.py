"""Rental of a fixed number of nodes from a market trace: which nodes, and when. Pure.

The run begins when the market first has as many nodes as the run wants. From then on the run rents every available node
up to that number. A node that is removed is replaced at once if the market has another one, else when one appears.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.market_trace import NodeEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from culm.market.market_trace import MarketTrace


@dataclass(frozen=True)
class RentalSchedule:
    """Nodes that a run rents. Times are seconds since the start of the run."""

    initial_nodes: tuple[NodeEvent, ...]
    """Nodes at the start of the run."""
    changes: tuple[NodeEvent, ...]
    """Nodes that are rented or removed later."""
    trace_start_s: float
    """Start of the run in the time of the trace."""
    notice_s: float = 0.0
    """Seconds of notice before a removal; 0: none."""

    def mean_capacity(self, until_s: float) -> float:
        """Mean share of the wanted nodes that was rented until then: an upper bound on the goodput of a run."""
        if until_s <= 0:
            return 1.0
        there, steps = len(self.initial_nodes), [(0.0, len(self.initial_nodes))]
        for move in self.changes:
            there += 1 if move.kind == "add" else -1
            steps.append((min(move.t, until_s), there))
        steps.append((until_s, there))
        return (
            sum(count * (end - start) for (start, count), (end, _) in pairwise(steps))
            / until_s
            / len(self.initial_nodes)
        )


@dataclass(frozen=True)
class TraceMarket:
    """A market trace and how it is replayed."""

    trace: MarketTrace
    speedup: float = 1.0
    notice_s: float = 0.0
    """Seconds of notice before a node is removed; 0: none."""

    def __post_init__(self) -> None:
        _check_above("--speedup", self.speedup, above=0.0)
        _check_above("--notice", self.notice_s, above=-1e-9)

    def rental_schedule(self, nodes: int) -> RentalSchedule:
        """The rental of a run with that many nodes: see `schedule_rental`."""
        return schedule_rental(self.trace, nodes, speedup=self.speedup, notice_s=self.notice_s)


def schedule_rental(trace: MarketTrace, nodes: int, *, speedup: float = 1.0, notice_s: float = 0.0) -> RentalSchedule:
    """The rental of a run with that many nodes. Raises UsageError for a wrong speedup or notice, or if the market never
    has enough nodes."""
    _check_above("--speedup", speedup, above=0.0)
    _check_above("--notice", notice_s, above=-1e-9)
    market: dict[str, NodeEvent] = {}
    rented: dict[str, NodeEvent] = {}
    first: tuple[NodeEvent, ...] = ()
    moves: list[NodeEvent] = []
    begins = 0.0
    for t, moment in groupby(trace.events, key=lambda event: event.t):
        went = _apply_events(market, moment)
        if not first and len(market) >= nodes:
            begins, first = t, tuple(list(market.values())[:nodes])
            rented = {event.node: event for event in first}
        elif first:
            for node in [node for node in dict.fromkeys(went) if node in rented]:
                moves.append(NodeEvent((t - begins) / speedup, "remove", node, rented.pop(node).zone))
            for event in [event for node, event in market.items() if node not in rented][: nodes - len(rented)]:
                rented[event.node] = event
                moves.append(event._replace(t=(t - begins) / speedup))
    if not first:
        raise UsageError(
            f"{trace.source} never has {nodes} nodes at once: use --nodes {max(1, trace.peak)}, or another trace"
        )
    return RentalSchedule(first, tuple(moves), begins, notice_s)


def _apply_events(market: dict[str, NodeEvent], moment: Iterable[NodeEvent]) -> list[str]:
    """Apply the events of one moment. Returns removed nodes, also those added again: they are other machines."""
    went = []
    for event in moment:
        if event.kind == "add":
            market[event.node] = event
        else:
            market.pop(event.node, None)
            went.append(event.node)
    return went


def _check_above(option: str, value: float, *, above: float) -> None:
    if not (math.isfinite(value) and value > above):
        raise UsageError(f"{option} is {value:g}: use a number {'above 0' if above == 0 else 'of at least 0'}")
