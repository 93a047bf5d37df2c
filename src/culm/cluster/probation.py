"""Machines that were given up, or whose workers hung, more than once: each time they wait longer for a place. Pure.

A machine that can reach etcd but not all others would come back at once, take its place and hold the run up again.
"""

from __future__ import annotations

from collections import Counter

_WAIT = 8
"""The first wait, in units of what it takes to believe that somebody is missed; each further one is twice as long: then
what is lost to a machine that never recovers grows with the logarithm of the time."""


class Probation:
    """Kept by who leads, by host."""

    def __init__(self) -> None:
        self._falls: Counter[str] = Counter()
        self._until: dict[str, float] = {}

    def fell(self, host: str, now: float, doubt_s: float) -> None:
        """A node there was as good as gone. The first time that may have been an accident."""
        self._falls[host] += 1
        if self._falls[host] > 1:
            self._until[host] = now + _WAIT * doubt_s * 2.0 ** (self._falls[host] - 2)

    def left_s(self, host: str, now: float) -> float:
        """How long its next node has to wait; 0: it may come in."""
        return max(0.0, self._until.get(host, now) - now)
