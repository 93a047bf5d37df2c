"""What losses of servers cost: a row a recovery, from the first sign to the epoch that had been reached. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Open:
    """A recovery that is under way; times are those at which something was known."""

    sign: float
    lost: list[str] = field(default_factory=list)
    known: float = 0.0
    decided: float = 0.0
    moved: float = 0.0
    version: int = 0
    reached: int = 0
    """Epochs that were done before; those from `version` on are done again."""


@dataclass
class Recoveries:
    """Losses in, rows of summary.json out. Several servers that are lost at once are one recovery."""

    _now: _Open | None = None
    _rows: list[dict[str, Any]] = field(default_factory=list)

    def sign(self, now: float) -> None:
        """A connection broke, or a process ended: the first one counts."""
        if self._now is None or self._now.moved:
            self._close(now)
            self._now = _Open(now)

    def lost(self, seat: str, now: float) -> None:
        """A seat is free."""
        self.sign(now)
        assert self._now is not None
        self._now.known = self._now.known or now
        self._now.lost.append(seat)

    def decided(self, now: float, version: int, reached: int) -> None:
        """A generation begins with a version of the weights; `reached`: epochs that have been done."""
        if self._now is not None:
            self._now.decided, self._now.version, self._now.reached = now, version, reached

    def moved(self, now: float) -> None:
        """Everyone is there."""
        if self._now is not None and self._now.decided:
            self._now.moved = now
            self.done(self._now.version, now)

    def done(self, epochs: int, now: float) -> None:
        """So many epochs are done."""
        if self._now is not None and self._now.moved and epochs >= self._now.reached:
            self._close(now)

    def _close(self, now: float) -> None:
        if self._now is not None and self._now.lost:
            self._rows.append(_row(self._now, now))
        self._now = None

    def rows(self, now: float) -> list[dict[str, Any]]:
        """All recoveries; one that is under way as far as it has come."""
        return [*self._rows, *([_row(self._now, now)] if self._now is not None and self._now.lost else [])]


def _row(one: _Open, now: float) -> dict[str, Any]:
    decided = one.decided or now
    moved = one.moved or now
    return {
        "step": one.version,
        "lost": list(one.lost),
        "detect_ms": _ms(one.sign, one.known),
        "decide_ms": _ms(one.known, decided),
        "move_ms": _ms(decided, moved),
        "redo_ms": _ms(moved, now),
        "redone_actions": max(0, one.reached - one.version),
        "source": "checkpoint",
    }


def _ms(start: float, end: float) -> float:
    return round(max(0.0, end - start) * 1e3, 1)
