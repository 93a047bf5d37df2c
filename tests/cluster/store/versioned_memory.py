"""A store in memory that counts the writes of each key, as etcd does."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from culm.cluster.store.store import KeyVersion, StoreChange, VersionedChange, VersionedValue


class VersionedMemory:
    """Keys in memory. `values` is what an attacker sees; `overwrite` is what one does who may write to the store."""

    def __init__(self) -> None:
        self.values: dict[str, VersionedValue] = {}
        self._revision = 0
        self._log: list[VersionedChange] = []

    def overwrite(self, key: str, value: bytes) -> None:
        """Write a key as any client of the store can."""
        self._revision += 1
        before = self.values.get(key)
        version = KeyVersion(self._revision, 1) if before is None else before.version.next()
        self.values[key] = VersionedValue(value, version)
        self._log.append(VersionedChange(StoreChange(key, value), version))

    async def read_version(self, key: str) -> VersionedValue | None:
        return self.values.get(key)

    async def write_version(
        self, key: str, value: bytes, current: KeyVersion | None, *, session: bool = False, replaced: bytes = b""
    ) -> bool:
        before = self.values.get(key)
        if (None if before is None else before.version) != current:
            return False
        self.overwrite(key, value)
        return True

    async def delete(self, key: str) -> None:
        self._revision += 1
        before = self.values.pop(key, None)
        if before is not None:
            self._log.append(VersionedChange(StoreChange(key, None), before.version))

    async def evict(self, key: str) -> bool:
        found = key in self.values
        await self.delete(key)
        return found

    async def watch_versions(self, prefix: str) -> AsyncGenerator[VersionedChange, None]:
        """Every change so far, and then no more."""
        for found in self._log:
            if found.change.key.startswith(prefix):
                yield found
