"""Recovery records. Separate from the leader's snapshot, so that a launcher can decode them without importing torch."""

from __future__ import annotations

import msgspec


class RecoveryRecord(msgspec.Struct, frozen=True):
    """One recovery from a loss, as written to summary.json."""

    step: int
    """The newest open step at the loss."""
    lost: tuple[int, ...]
    detect_ms: float
    """Since the kill if culm injected it, else since the first sign of the failure."""
    decide_ms: float
    move_ms: float
    redo_ms: float
    redone_actions: int
    source: str
    """Where the lost layers came from: peers, shadow or checkpoint; "notice" if no node was lost."""


class RecoveryRecords(msgspec.Struct, frozen=True):
    """The part of the history of a run that holds the recoveries."""

    recoveries: tuple[RecoveryRecord, ...]


decode_recoveries = msgspec.msgpack.Decoder(RecoveryRecords).decode
