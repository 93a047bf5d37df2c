"""Costs of a disturbance, in seconds: everything that the simulator assumes about a real cluster, in one place.

The defaults are for nodes with a 10 Gbit/s network that keep the state in memory. `culm bench simulator` uses values
from measured runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.sim.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """Seconds, unless stated otherwise. Raises UsageError for a negative value."""

    detect_s: float = 3.0
    """Until a lost node is detected. A dead process is seen in milliseconds; a silent node when its lease expires."""
    decide_s: float = 0.5
    """Reports of the survivors, the new epoch with its plan, new connections."""
    join_s: float = 2.0
    """A new node takes its slot: the pipelines drain, a new epoch starts with new connections."""
    warm_up_s: float = 45.0
    """From the grant of a node until it can join: boot, imports, building layers. As in Bamboo's simulator."""
    bandwidth: float = 1.25e9
    """Bytes per second between two nodes, for state transfers."""
    restart_s: float = 30.0
    """Restarting all processes, for strategies that need it: as long as torchrun takes."""
    storage: float = 1.0e9
    """Bytes per second of each node from and to checkpoint storage: nodes write and read their shards in parallel."""
    checkpoint_every_s: float = 300.0
    """Interval between two asynchronous checkpoints, unless writing one takes longer."""
    stall_s: float = 1.0
    """How long an asynchronous checkpoint blocks training."""
    notice_s: float = 0.0
    """Notice time before a loss; 0: no notice. With a notice there is nothing to detect and nothing to recompute."""
    shadow: float = 0.07
    """Cost of keeping a shadow up to date, as a share of the step (Bamboo, lazy: 7.0 % for BERT, 7.7 % for ResNet)."""
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
        """Time to send the state of one stage from a peer to a new node."""
        return workload.state_bytes / (stages or workload.stages) / self.bandwidth

    def load_s(self, workload: Workload) -> float:
        """Time to load the state of the whole model from storage, each node its share."""
        return workload.state_bytes / (self.storage * workload.nodes)

    def shadow_redo_s(self, workload: Workload, *, pipelines: int, phase: float) -> float:
        """What Bamboo's predecessor recomputes: the backwards that the lost worker had finished in the open step.

        The neighbours have kept what they sent to it, and its forwards were run redundantly. With a notice: nothing.
        """
        finished = phase * workload.micro_batches / pipelines
        return 0.0 if self.notice_s else finished * workload.stage_s * (1 - workload.forward_share)

    def can_hand_over(self, workload: Workload) -> bool:
        """Whether the notice is long enough for a leaving node to send its state to another node."""
        return self.notice_s > 0 and self.move_s(workload) <= self.notice_s

    @property
    def detection_pauses(self) -> dict[str, float]:
        """Pauses from the loss to the decision, by kind."""
        return {"detect": 0.0 if self.notice_s else self.detect_s, "decide": self.decide_s}
