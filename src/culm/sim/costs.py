"""What a disturbance costs, in seconds: everything that the simulator assumes about a real cluster, in one place.

The defaults are for machines with a network of 10 Gbit/s and state in the memory of the nodes. `culm bench simulator`
takes its own from measured runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.sim.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Charges:
    """Seconds, unless said otherwise. Raises UsageError for one that is negative."""

    detect_s: float = 3.0
    """Until a vanished node is missed. A dead process is seen in milliseconds; a silent machine when its lease ends."""
    decide_s: float = 0.5
    """Reports of the survivors, the new epoch with its plan, new connections."""
    join_s: float = 2.0
    """A newcomer takes its slot: the pipelines drain, epoch and connections are new."""
    warm_up_s: float = 45.0
    """From the grant of a machine until it can join: boot, imports, building layers. As in Bamboo's simulator."""
    bandwidth: float = 1.25e9
    """Bytes per second between two nodes, for state on the move."""
    restart_s: float = 30.0
    """Ending and starting all processes again, where a strategy can not go on without: as long as torchrun takes."""
    storage: float = 1.0e9
    """Bytes per second from and to checkpoint storage, for all nodes together."""
    checkpoint_every_s: float = 300.0
    """Between two asynchronous checkpoints, if writing one does not take longer."""
    stall_s: float = 1.0
    """How long an asynchronous checkpoint holds up training."""
    notice_s: float = 0.0
    """How long before the fact a loss is announced; 0: never. Then there is nothing to detect and nothing to redo."""
    shadow: float = 0.07
    """What keeping a shadow current costs, as a share of the step (Bamboo, lazy: 7.0 % for BERT, 7.7 % for ResNet)."""
    bubble_use: float = 0.5
    """Share of the bubble that redundant forwards can fill (from Bamboo's eager 19.8 % for BERT with 12 stages)."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{f.name} is {value}: use a number of at least 0")
        for name in ("bandwidth", "storage", "checkpoint_every_s"):
            if not getattr(self, name):
                raise UsageError(f"{name} is 0: use a number above 0")

    def move_s(self, workload: Workload, stages: float | None = None) -> float:
        """The state of one stage from a peer to a newcomer."""
        return workload.state_bytes / (stages or workload.stages) / self.bandwidth

    def load_s(self, workload: Workload) -> float:
        """The state of the whole model from storage."""
        return workload.state_bytes / self.storage

    def redo_s(self, workload: Workload, *, pipelines: int, phase: float) -> float:
        """What Bamboo's predecessor runs again: the backwards that the lost worker had done of the step.

        What its neighbours sent it they have kept, and its forwards were run ahead. With a notice nothing is.
        """
        done = phase * workload.micro_batches / pipelines
        return 0.0 if self.notice_s else done * workload.stage_s * (1 - workload.forward_share)

    def handed_over(self, workload: Workload) -> bool:
        """Whether a node that goes has the time to give its state to somebody else."""
        return self.notice_s > 0 and self.move_s(workload) <= self.notice_s

    @property
    def alarm(self) -> dict[str, float]:
        """From the loss to the decision."""
        return {"detect": 0.0 if self.notice_s else self.detect_s, "decide": self.decide_s}
