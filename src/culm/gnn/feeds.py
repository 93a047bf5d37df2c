"""Who has sent what: the last pass in which each interval scattered its rows, for those who gather from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Feed = tuple[int, int]
"""An interval of any server: (server, interval)."""
_NEVER = -1


class Feeds:
    """Of one server: for each of its intervals, the intervals of any server that it gathers from."""

    def __init__(self, rows: Sequence[Sequence[Feed]], server: int) -> None:
        self._known = sorted({feed for row in rows for feed in row} | {(server, i) for i in range(len(rows))})
        self._places: dict[Feed, int] = {feed: i for i, feed in enumerate(self._known)}
        self._rows = [np.array([self._places[feed] for feed in row], np.int64) for row in rows]
        self._sent: dict[tuple[int, bool], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        """By layer and direction."""

    def sent(self, feed: Feed, layer: int, back: bool, number: int) -> None:
        """The rows of an interval for a layer are here, as of that pass. Of one that nobody gathers from: nothing."""
        place = self._places.get(feed)
        if place is not None:
            table = self._table(layer, back)
            table[place] = max(table[place], number)

    def lagging(self, interval: int, layer: int, back: bool, needed: int) -> Feed | None:
        """Whose rows are the oldest that an interval would gather, if older than needed; None: all are there."""
        rows = self._rows[interval]
        if not len(rows):
            return None
        numbers = self._table(layer, back)[rows]
        oldest = int(numbers.argmin())
        return self._known[rows[oldest]] if numbers[oldest] < needed else None

    def _table(self, layer: int, back: bool) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        found = self._sent.get((layer, back))
        if found is None:
            found = self._sent[layer, back] = np.full(len(self._places), _NEVER, np.int64)
        return found
