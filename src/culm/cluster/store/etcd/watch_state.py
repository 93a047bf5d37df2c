"""Watch state: what a watch has delivered, so that it can resume after a break without gaps or duplicates. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from culm.cluster.store.etcd.etcd_messages import EtcdEvent, KeyValue
from culm.cluster.store.store import StoreChange, VersionedChange


class WatchState:
    """The keys that the watcher knows, and the revision up to which it has seen all changes."""

    def __init__(self, key_prefix: str) -> None:
        self._key_prefix = key_prefix.encode()
        self._delivered_revisions: dict[bytes, int] = {}
        """By key: the revision of its last delivered change."""
        self.revision = 0

    def diff_with_listing(self, revision: int, listing: Iterable[KeyValue]) -> list[VersionedChange]:
        """The changes from the delivered state to a listing at a revision: deletions first, then the rest, by name.

        Used at the start, and when etcd has compacted the changes since.
        """
        current = {kv.key: kv for kv in listing}
        deleted = [
            self._to_change(KeyValue(key), None) for key in sorted(self._delivered_revisions.keys() - current.keys())
        ]
        new = [kv for key, kv in sorted(current.items()) if self._delivered_revisions.get(key) != kv.mod_revision]
        self._delivered_revisions = {key: kv.mod_revision for key, kv in current.items()}
        self.revision = revision
        return deleted + [self._to_change(kv, kv.value) for kv in new]

    def new_changes(self, events: Iterable[EtcdEvent]) -> list[VersionedChange]:
        """The changes among the events of one message that were not delivered yet."""
        fresh = [event for event in events if event.kv.mod_revision > self.revision]
        for event in fresh:
            self._mark_delivered(event)
        return [self._to_change(event.kv, event.value) for event in fresh]

    def _mark_delivered(self, event: EtcdEvent) -> None:
        self.revision = event.kv.mod_revision
        if event.value is None:
            self._delivered_revisions.pop(event.kv.key, None)
        else:
            self._delivered_revisions[event.kv.key] = event.kv.mod_revision

    def _to_change(self, kv: KeyValue, value: bytes | None) -> VersionedChange:
        return VersionedChange(StoreChange(kv.key.removeprefix(self._key_prefix).decode(), value), kv.key_version)
