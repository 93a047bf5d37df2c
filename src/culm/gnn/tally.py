"""Sums in which everyone counts once: gradients of an epoch, over the intervals of a server or over the servers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

K = TypeVar("K", bound=Hashable)


class Tally(Generic[K]):
    """Adds up what every one of `expected` gives for a key, in their order and not in that of arrival.

    So the sum has the same bits whoever was slow, died or was asked twice.
    """

    def __init__(self, expected: Collection[K]) -> None:
        self._expected = dict.fromkeys(sorted(expected))  # type: ignore[type-var]
        self._given: dict[Hashable, dict[K, Mapping[str, Tensor]]] = {}
        self.duplicates = 0

    def add(self, key: Hashable, who: K, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The complete sum, when this was the last; None before. What is given a second time is not counted."""
        given = self._given.setdefault(key, {})
        if who in given or who not in self._expected:
            self.duplicates += 1
            return None
        given[who] = values
        if len(given) < len(self._expected):
            return None
        del self._given[key]
        return self._sum(given)

    def _sum(self, given: Mapping[K, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for who in self._expected:
            for name, value in given[who].items():
                total[name] = total[name].add_(value) if name in total else value.clone()
        return total
