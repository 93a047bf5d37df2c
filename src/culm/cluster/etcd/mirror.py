"""What a watch has told so far: enough to go on after a break without missing or repeating anything. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from culm.cluster.etcd.wire import Event, KeyValue
from culm.cluster.store import Change


class Mirror:
    """The keys that the listener knows of, and the revision up to which he knows everything."""

    def __init__(self, home: str) -> None:
        self._home = home.encode()
        self._told: dict[bytes, int] = {}
        """Key to the revision of its last change that was told."""
        self.revision = 0

    def settle(self, revision: int, found: Iterable[KeyValue]) -> list[Change]:
        """The changes from what was told to what is there at a revision: first what is gone, then the rest, by name.

        For the beginning, and for when etcd has forgotten the history since (compaction).
        """
        there = {kv.key: kv for kv in found}
        gone = [self._change(key, None) for key in sorted(self._told.keys() - there.keys())]
        new = [kv for key, kv in sorted(there.items()) if self._told.get(key) != kv.mod_revision]
        self._told = {key: kv.mod_revision for key, kv in there.items()}
        self.revision = revision
        return gone + [self._change(kv.key, kv.value) for kv in new]

    def apply(self, events: Iterable[Event]) -> list[Change]:
        """The changes among the events of one message that were not told yet."""
        fresh = [event for event in events if event.kv.mod_revision > self.revision]
        for event in fresh:
            self._note(event)
        return [self._change(event.kv.key, event.value) for event in fresh]

    def _note(self, event: Event) -> None:
        self.revision = event.kv.mod_revision
        if event.value is None:
            self._told.pop(event.kv.key, None)
        else:
            self._told[event.kv.key] = event.kv.mod_revision

    def _change(self, key: bytes, value: bytes | None) -> Change:
        return Change(key.removeprefix(self._home).decode(), value)
