"""Sums in which every contributor counts once: gradients of a training epoch, over the intervals of a server or over
servers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

K = TypeVar("K", bound=Hashable)


class GradientReducer(Generic[K]):
    """Sums the contributions of all `contributors` for a key, in a fixed order that is not the order of arrival.

    So the sum has the same bits even if a contributor was slow, was restarted, or contributed twice.
    """

    def __init__(self, contributors: Collection[K]) -> None:
        self._contributors = dict.fromkeys(sorted(contributors))  # type: ignore[type-var]
        self._contributions: dict[Hashable, dict[K, Mapping[str, Tensor]]] = {}

    def add(self, key: Hashable, contributor: K, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Add a contribution. Returns the complete sum with the last one, None before. A second contribution is not
        counted."""
        contributions = self._contributions.setdefault(key, {})
        if contributor in contributions or contributor not in self._contributors:
            return None
        contributions[contributor] = values
        if len(contributions) < len(self._contributors):
            return None
        del self._contributions[key]
        return self._sum(contributions)

    def _sum(self, contributions: Mapping[K, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for contributor in self._contributors:
            for name, value in contributions[contributor].items():
                total[name] = total[name].add_(value) if name in total else value.clone()
        return total
