"""When nodes joined and were lost: the common form of market traces of every origin."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NodeEventKind: TypeAlias = Literal["add", "remove"]

HOUR = 3600.0


class NodeEvent(NamedTuple):
    """A node joins or is lost."""

    t: float
    """Seconds since the start of the trace."""
    kind: NodeEventKind
    node: str
    zone: str = ""
    """Empty if the trace does not say."""


class NodeCount(NamedTuple):
    """The number of nodes alive from `t` on."""

    t: float
    alive: int


@dataclass(frozen=True)
class MarketTrace:
    """Events in order of time. A node that is present is not added, and one that is absent is not removed.

    Raises UsageError for events that violate this.
    """

    events: tuple[NodeEvent, ...]
    span_s: float
    """Length of the observation: at least until the last event."""
    source: str = "trace"
    notes: tuple[str, ...] = ()
    """Assumptions that the reader made."""

    def __post_init__(self) -> None:
        validator = TraceValidator()
        for event in self.events:
            if problem := validator.apply_or_explain(event):
                raise UsageError(f"{self.source}, at {event.t:g} s, {problem}")
        last = self.events[-1].t if self.events else 0.0
        if not (math.isfinite(self.span_s) and self.span_s >= last):
            raise UsageError(
                f"{self.source} spans {self.span_s:g} s: use at least {last:g}, the time of its last event"
            )

    @cached_property
    def counts(self) -> tuple[NodeCount, ...]:
        """The number of nodes alive after each time at which it changed."""
        alive, counts = 0, []
        for t, moment in groupby(self.events, key=lambda event: event.t):
            alive += sum(1 if event.kind == "add" else -1 for event in moment)
            counts.append(NodeCount(t, alive))
        return tuple(counts)

    @property
    def peak(self) -> int:
        """The most nodes alive at once; at least 0."""
        return max((count.alive for count in self.counts), default=0)

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(sorted({event.zone for event in self.events if event.zone}))

    def cut_at(self, span_s: float) -> MarketTrace:
        """The trace up to `span_s`; beyond its end the last state continues."""
        return replace(self, events=tuple(event for event in self.events if event.t < span_s), span_s=span_s)


class TraceValidator:
    """Tracks the present nodes event by event and explains why an event is not possible."""

    def __init__(self) -> None:
        self._present: set[str] = set()
        self._now = 0.0

    def apply_or_explain(self, event: NodeEvent) -> str:
        """Apply the event and return "", or return what is wrong with it."""
        problem = self._problem(event)
        if not problem:
            self._now = event.t
            (self._present.add if event.kind == "add" else self._present.discard)(event.node)
        return problem

    def _problem(self, event: NodeEvent) -> str:
        if not (math.isfinite(event.t) and event.t >= 0):
            return f"has the time {event.t:g} s: use a number of at least 0"
        if event.t < self._now:
            return f"goes back in time, from {self._now:g} s to {event.t:g} s: sort the events"
        if event.kind == "add" and event.node in self._present:
            return f"adds {event.node}, which is already present: remove it first, or name the new one differently"
        if event.kind == "remove" and event.node not in self._present:
            return f"removes {event.node}, which is not present: add it first, or delete the event"
        return ""


def events_from_counts(counts: Sequence[NodeCount], *, zone: str = "") -> tuple[NodeEvent, ...]:
    """Events that lead to these node counts. Counts do not name lost nodes: they are drawn with a fixed seed."""
    rng = random.Random(0)
    alive: list[str] = []
    events: list[NodeEvent] = []
    created = 0
    for t, target in counts:
        while len(alive) > target:
            index = rng.randrange(len(alive))
            alive[index], alive[-1] = alive[-1], alive[index]
            events.append(NodeEvent(t, "remove", alive.pop(), zone))
        while len(alive) < target:
            created += 1
            alive.append(f"node{created}")
            events.append(NodeEvent(t, "add", alive[-1], zone))
    return tuple(events)


def group_sizes(events: Iterable[NodeEvent], kind: NodeEventKind) -> list[int]:
    """How many nodes join, or are lost, at each time at which any do."""
    return list(Counter(event.t for event in events if event.kind == kind).values())
