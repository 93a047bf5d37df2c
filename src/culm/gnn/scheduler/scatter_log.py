"""The last pass in which each interval scattered its rows, for the intervals that gather them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IntervalId = tuple[int, int]
"""An interval of any server: (server, interval)."""
_NEVER = -1


class ScatterLog:
    """Scatter log of one server. `gather_sources` lists, for each of its intervals, the intervals of any server that
    it gathers from."""

    def __init__(self, gather_sources: Sequence[Sequence[IntervalId]], server: int) -> None:
        self._interval_ids = sorted(
            {source for row in gather_sources for source in row} | {(server, i) for i in range(len(gather_sources))}
        )
        self._columns: dict[IntervalId, int] = {source: i for i, source in enumerate(self._interval_ids)}
        self._gathered_columns = [
            np.array([self._columns[source] for source in row], np.int64) for row in gather_sources
        ]
        self._last_pass: dict[tuple[int, bool], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        """By layer and direction."""

    def record_scatter(self, interval_id: IntervalId, layer: int, backward: bool, pass_number: int) -> None:
        """Record the rows of an interval for a layer. Nothing happens for an interval that no interval of this
        server gathers from."""
        column = self._columns.get(interval_id)
        if column is not None:
            table = self._last_pass_table(layer, backward)
            table[column] = max(table[column], pass_number)

    def find_lagging(self, interval: int, layer: int, backward: bool, oldest_usable_pass: int) -> IntervalId | None:
        """Return the interval with the oldest rows that `interval` gathers, if they are older than
        `oldest_usable_pass`; otherwise None."""
        rows = self._gathered_columns[interval]
        if not len(rows):
            return None
        numbers = self._last_pass_table(layer, backward)[rows]
        oldest = int(numbers.argmin())
        return self._interval_ids[rows[oldest]] if numbers[oldest] < oldest_usable_pass else None

    def _last_pass_table(self, layer: int, backward: bool) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        table = self._last_pass.get((layer, backward))
        if table is None:
            table = self._last_pass[layer, backward] = np.full(len(self._columns), _NEVER, np.int64)
        return table
