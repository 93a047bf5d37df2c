"""Numbers of nodes: no two nodes of a run ever have the same one, however often a machine comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.cluster.store import Store

_KEY = "numbers"
"""How many numbers have been given away."""


async def take_numbers(store: Store, count: int = 1) -> range:
    """The next numbers, for whoever asks first."""
    while True:
        found = await store.get(_KEY)
        first = int(found or b"0")
        if await store.swap(_KEY, found, str(first + count).encode()):
            return range(first, first + count)
