"""What a run has come to so far: in the store after every commit, so that any node can lead next."""

from __future__ import annotations

import msgspec

from culm.cluster.recovered import Recovered
from culm.observe.ledger import CommittedStep, Run


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the run has come to, under the key `record`: whoever leads next goes on from here."""

    began: float
    first_step_at: float | None
    next_step: int
    steps: int
    samples: int
    lost: int
    duplicated: int
    skipped: int
    last: CommittedStep | None
    evaluations: dict[int, float]
    checkpoints: tuple[int, ...]
    gone: tuple[int, ...]
    """Nodes that were lost."""
    recoveries: tuple[Recovered, ...]
    at_risk_s: float
    owed: tuple[int, ...] = ()
    """Of those that are gone, whose loss is not made good yet."""
    redone: int = 0
    runs: tuple[Run, ...] = ()
    finish: int | None = None
    """The step before which the run ends, once that is decided."""
    evacuated: bool = False
    """Whether it ends there because every node has notice."""
    slowest_s: float = 0.0
    """The longest action: whoever has such is not hung because it is silent for as long."""


decode_record = msgspec.msgpack.Decoder(Record).decode
