"""How long tasks take, by their kind, and how long to wait for one before somebody else is asked, too. Pure."""

from __future__ import annotations

_LEAST_S, _FACTOR = 0.5, 5.0
_FIRST_S = 5.0
"""While no task of a kind has ever come back: nobody knows yet what is slow."""
_SMOOTHING = 0.2


class Pace:
    """Moving averages."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def note(self, kind: str, seconds: float) -> None:
        """A task of that kind is done."""
        before = self._seconds.get(kind, seconds)
        self._seconds[kind] = before + _SMOOTHING * (seconds - before)

    def patience(self, kind: str) -> float:
        """Seconds until a task is launched again."""
        known = self._seconds.get(kind)
        return _FIRST_S if known is None else max(_LEAST_S, _FACTOR * known)
