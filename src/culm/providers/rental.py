"""What a run that wants so many nodes makes of a market: whom it rents, and when. Pure.

The run begins when the market has as many nodes as it wants for the first time. From then on it takes every node that
there is, up to that number: who is taken away is replaced at once if the market has somebody, else when somebody comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.trace import Event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from culm.market.trace import Trace


@dataclass(frozen=True)
class Rental:
    """Times are seconds of the run, which begins at 0."""

    first: tuple[Event, ...]
    """Who is there at the beginning."""
    moves: tuple[Event, ...]
    """Who is rented, and who is taken away, from then on."""
    begins_s: float
    """Where in the trace, in its own time."""
    notice_s: float = 0.0
    """Seconds of notice that comes before a removal; 0: none."""

    def share(self, until_s: float) -> float:
        """The mean share of the wanted nodes that was rented: what the best run under this market could make use of."""
        if until_s <= 0:
            return 1.0
        there, steps = len(self.first), [(0.0, len(self.first))]
        for move in self.moves:
            there += 1 if move.kind == "add" else -1
            steps.append((min(move.t, until_s), there))
        steps.append((until_s, there))
        return sum(count * (end - start) for (start, count), (end, _) in pairwise(steps)) / until_s / len(self.first)


@dataclass(frozen=True)
class Market:
    """A trace as a run is to meet it."""

    trace: Trace
    speedup: float = 1.0
    notice_s: float = 0.0
    """Seconds of notice before a node is taken; 0: none."""

    def __post_init__(self) -> None:
        _check("--speedup", self.speedup, above=0.0)
        _check("--notice", self.notice_s, above=-1e-9)

    def rental(self, nodes: int) -> Rental:
        """What a run that wants so many nodes makes of it: see `rent`."""
        return rent(self.trace, nodes, speedup=self.speedup, notice_s=self.notice_s)


def rent(trace: Trace, nodes: int, *, speedup: float = 1.0, notice_s: float = 0.0) -> Rental:
    """Raises UsageError for a speed-up or a notice that is none, and for a market that never has enough nodes."""
    _check("--speedup", speedup, above=0.0)
    _check("--notice", notice_s, above=-1e-9)
    market: dict[str, Event] = {}
    rented: dict[str, Event] = {}
    first: tuple[Event, ...] = ()
    moves: list[Event] = []
    begins = 0.0
    for t, moment in groupby(trace.events, key=lambda event: event.t):
        went = _happen(market, moment)
        if not first and len(market) >= nodes:
            begins, first = t, tuple(list(market.values())[:nodes])
            rented = {event.node: event for event in first}
        elif first:
            for node in [node for node in dict.fromkeys(went) if node in rented]:
                moves.append(Event((t - begins) / speedup, "remove", node, rented.pop(node).zone))
            for event in [event for node, event in market.items() if node not in rented][: nodes - len(rented)]:
                rented[event.node] = event
                moves.append(event._replace(t=(t - begins) / speedup))
    if not first:
        raise UsageError(
            f"{trace.source} never has {nodes} nodes at once: use --nodes {max(1, trace.peak)}, or another trace"
        )
    return Rental(first, tuple(moves), begins, notice_s)


def _happen(market: dict[str, Event], moment: Iterable[Event]) -> list[str]:
    """Let the events of one moment happen; returns who went. One that goes and comes back in it is another machine."""
    went = []
    for event in moment:
        if event.kind == "add":
            market[event.node] = event
        else:
            market.pop(event.node, None)
            went.append(event.node)
    return went


def _check(option: str, value: float, *, above: float) -> None:
    if not (math.isfinite(value) and value > above):
        raise UsageError(f"{option} is {value:g}: use a number {'above 0' if above == 0 else 'of at least 0'}")
