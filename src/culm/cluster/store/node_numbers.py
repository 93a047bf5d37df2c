"""Node numbers: unique within a run, even if a machine leaves and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.cluster.store.store import Store

_COUNTER_KEY = "numbers"
"""Holds how many numbers have been allocated."""


async def allocate_node_numbers(store: Store, count: int = 1) -> range:
    """Allocate the next `count` numbers."""
    while True:
        found = await store.get(_COUNTER_KEY)
        first = int(found or b"0")
        if await store.swap(_COUNTER_KEY, found, str(first + count).encode()):
            return range(first, first + count)
