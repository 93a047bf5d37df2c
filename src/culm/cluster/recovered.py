"""Losses that a run went on from. Beside the record, which has them: a launcher reads them without torch."""

from __future__ import annotations

import msgspec


class Recovered(msgspec.Struct, frozen=True):
    """A loss that the run went on from, as it stands in summary.json."""

    step: int
    """The newest that was open."""
    lost: tuple[int, ...]
    detect_ms: float
    """Since the blow where culm struck itself, else since the first sign that somebody was missed."""
    decide_ms: float
    move_ms: float
    redo_ms: float
    redone_actions: int
    source: str
    """Where the lost layers came from: peers, shadow or checkpoint."""


class Recoveries(msgspec.Struct, frozen=True):
    """Of a record, what is about losses."""

    recoveries: tuple[Recovered, ...]


decode_recoveries = msgspec.msgpack.Decoder(Recoveries).decode
