"""Layout of the leader's snapshot in the store: progress under `record`, history under `history/0` or `history/1`.

The progress names the slot of its history and that history's checksum. A changed history goes to the other slot before
the progress that names it: whenever a leader is lost, the progress in the store has its history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

if TYPE_CHECKING:
    from culm.cluster.store.store import Store

PROGRESS_KEY = "record"
_decode_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.msgpack.encode


class EncodedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot in its two parts. `history` is the same object until the history changes."""

    progress: bytes
    history: bytes

    def join(self) -> bytes:
        """The snapshot as one value."""
        return _encode(_decode_fields(self.progress) | {"history": msgspec.Raw(self.history)})


class HistoryPlace(NamedTuple):
    """Where a history is stored."""

    slot: int
    checksum: int

    @property
    def key(self) -> str:
        return f"history/{self.slot}"


class StoredSnapshot:
    """The snapshot in the store, as this process knows it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._place: HistoryPlace | None = None
        self._history: bytes | None = None
        """The history at `_place`; None: it was written by another leader."""

    async def write(self, snapshot: EncodedSnapshot) -> None:
        """Write the progress, and before it the history if that has changed."""
        place, history = self._place, snapshot.history
        if place is None or history is not self._history:
            checksum = xxhash.xxh3_64_intdigest(history)
            if place is None or place.checksum != checksum:
                place = HistoryPlace(0 if place is None else 1 - place.slot, checksum)
                await self._store.put(place.key, history)
        fields = _decode_fields(snapshot.progress) | {"history": msgspec.Raw(_encode(place))}
        await self._store.put(PROGRESS_KEY, _encode(fields))
        self._place, self._history = place, history

    async def read(self) -> bytes | None:
        """The whole snapshot; None: there is none."""
        while (progress := await self._store.get(PROGRESS_KEY)) is not None:
            place = history_place(progress)
            history = await self._store.get(place.key)
            if history is not None and (snapshot := join_snapshot(progress, {place.slot: history})) is not None:
                self._place = place
                return snapshot
        return None


def history_place(progress: bytes) -> HistoryPlace:
    """Where the history of a snapshot is stored."""
    return msgspec.msgpack.decode(_decode_fields(progress)["history"], type=HistoryPlace)


def join_snapshot(progress: bytes, histories: Mapping[int, bytes]) -> bytes | None:
    """The whole snapshot, with its history by slot; None: that is not there, or another one has taken its slot."""
    place = history_place(progress)
    history = histories.get(place.slot)
    if history is None or xxhash.xxh3_64_intdigest(history) != place.checksum:
        return None
    return EncodedSnapshot(progress, history).join()
