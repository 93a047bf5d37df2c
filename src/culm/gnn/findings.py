"""What whoever leads a run has found out about it, while it goes and when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.ledger import Ledger
from culm.gnn.recoveries import Recoveries

if TYPE_CHECKING:
    from culm.runtime.state import Snapshot


@dataclass
class Findings:
    """What a run leaves."""

    ledger: Ledger
    state: dict[int, Snapshot] = field(default_factory=dict)
    """By layer, when the run was over."""
    best: dict[int, Snapshot] = field(default_factory=dict)
    """... and after the epoch that validation chooses."""
    generations: int = 0
    stopped: str = ""
    recoveries: Recoveries = field(default_factory=Recoveries)
    checkpoints: list[int] = field(default_factory=list)
    """Versions that every parameter server has saved, one after the other."""
