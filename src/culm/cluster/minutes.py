"""The minutes of a run: what is written to the store as it goes on. A store that is out of reach holds nobody up: then
who works keeps the minutes, too, until it is back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.cluster.store import Store


class Minutes:
    """Everything is written in the order in which it was given; of several records only the last."""

    def __init__(self, store: Store, patience_s: float) -> None:
        """`patience_s`: a store that takes longer to answer is out of reach."""
        self._store, self._patience_s = store, patience_s
        self._writing: asyncio.Task[None] | None = None
        """The last thing to be written; it comes after all others."""
        self._newest: dict[str, bytes] = {}

    @property
    def behind(self) -> bool:
        """Whether the store lacks something that has been given."""
        return self._writing is not None and not self._writing.done()

    def give(self, key: str, value: bytes, *, each: bool = False) -> None:
        """Have a key written. With `each` it is, even if another value for it follows. What goes wrong, whoever waits
        next hears."""
        self._newest[key] = value
        self._writing = asyncio.create_task(self._write(self._writing, key, value, each))

    async def _write(self, before: asyncio.Task[None] | None, key: str, value: bytes, each: bool) -> None:
        if before is not None:
            await before
        if each or self._newest[key] is value:
            await self._store.put(key, value)

    async def patiently(self) -> bool:
        """Wait until the store has everything; False: it is out of reach, as it was for those who waited before."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=self._patience_s)
            if self._writing.done():
                self._writing.result()
        return not self.behind

    async def written(self) -> None:
        """Wait until the store has everything, however long that takes."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Give up what is not written yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
