"""How machines came and went: one form for traces of every origin."""

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

Kind: TypeAlias = Literal["add", "remove"]

HOUR = 3600.0


class Event(NamedTuple):
    """A node comes or goes."""

    t: float
    """Seconds since the start of the trace."""
    kind: Kind
    node: str
    zone: str = ""
    """Empty where the trace does not say."""


class Count(NamedTuple):
    """So many nodes were alive from `t` on."""

    t: float
    alive: int


@dataclass(frozen=True)
class Trace:
    """Events in order of time. Nobody is added who is there, and nobody removed who is not.

    Raises UsageError, one sentence, for events that break this.
    """

    events: tuple[Event, ...]
    span_s: float
    """How long was watched: at least until the last event."""
    source: str = "trace"
    notes: tuple[str, ...] = ()
    """What a reader had to assume."""

    def __post_init__(self) -> None:
        there = Presence()
        for event in self.events:
            if fault := there.fault(event):
                raise UsageError(f"{self.source}, at {event.t:g} s, {fault}")
        last = self.events[-1].t if self.events else 0.0
        if not (math.isfinite(self.span_s) and self.span_s >= last):
            raise UsageError(
                f"{self.source} spans {self.span_s:g} s: use at least {last:g}, the time of its last event"
            )

    @cached_property
    def counts(self) -> tuple[Count, ...]:
        """How many are alive after each moment at which something happened."""
        alive, found = 0, []
        for t, moment in groupby(self.events, key=lambda event: event.t):
            alive += sum(1 if event.kind == "add" else -1 for event in moment)
            found.append(Count(t, alive))
        return tuple(found)

    @property
    def peak(self) -> int:
        """The most nodes alive at once; at least 0."""
        return max((count.alive for count in self.counts), default=0)

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(sorted({event.zone for event in self.events if event.zone}))

    def until(self, span_s: float) -> Trace:
        """The first part of the trace; a longer time than it spans holds what was at its end."""
        return replace(self, events=tuple(event for event in self.events if event.t < span_s), span_s=span_s)

    def initial(self) -> int:
        """How many nodes are there at time 0."""
        return self.counts[0].alive if self.counts and self.counts[0].t == 0 else 0


class Presence:
    """Who is there, event by event; tells of an event why it can not be."""

    def __init__(self) -> None:
        self._there: set[str] = set()
        self._now = 0.0

    def fault(self, event: Event) -> str:
        """What is wrong with the event, or nothing: then it has happened."""
        fault = self._wrong(event)
        if not fault:
            self._now = event.t
            (self._there.add if event.kind == "add" else self._there.discard)(event.node)
        return fault

    def _wrong(self, event: Event) -> str:
        if not (math.isfinite(event.t) and event.t >= 0):
            return f"has the time {event.t:g} s: use a number of at least 0"
        if event.t < self._now:
            return f"goes back in time, from {self._now:g} s to {event.t:g} s: sort the events"
        if event.kind == "add" and event.node in self._there:
            return f"adds {event.node}, which is there already: remove it first, or name the new one differently"
        if event.kind == "remove" and event.node not in self._there:
            return f"removes {event.node}, which is not there: add it first, or leave the event out"
        return ""


def from_counts(counts: Sequence[Count], *, zone: str = "") -> tuple[Event, ...]:
    """Events that lead to these numbers of nodes. Counts do not say who went: victims are drawn, always the same."""
    draw = random.Random(0)
    alive: list[str] = []
    events: list[Event] = []
    born = 0
    for t, wanted in counts:
        while len(alive) > wanted:
            at = draw.randrange(len(alive))
            alive[at], alive[-1] = alive[-1], alive[at]
            events.append(Event(t, "remove", alive.pop(), zone))
        while len(alive) < wanted:
            born += 1
            alive.append(f"node{born}")
            events.append(Event(t, "add", alive[-1], zone))
    return tuple(events)


def groups(events: Iterable[Event], kind: Kind) -> list[int]:
    """How many come, or go, at each moment at which any do."""
    return list(Counter(event.t for event in events if event.kind == kind).values())
