"""The leader's snapshot: written to the store after every commit, so that any node can become the next leader.

Its history grows with every loss, evaluation and checkpoint. It is encoded and stored apart, and only when it has
changed: a run of weeks with thousands of losses writes as little per step as a young one (`stored_snapshot.py`).
"""

from __future__ import annotations

import msgspec

from culm.cluster.leader.checkpoints.checkpoint_tracker import CheckpointCheck
from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.cluster.leader.spending import SpendingSnapshot
from culm.market.rental_cost import Rental
from culm.observe.ledger import StepRange
from culm.observe.step_metrics import StepMetrics
from culm.runtime.messages import FailedAction


class FailureRecord(msgspec.Struct, frozen=True):
    """An exception in the code that a worker ran."""

    node: int
    host: str
    at: float
    """When it was reported, by the clock."""
    where: str
    """The worker, the step and the action as text."""
    message: str
    action: FailedAction

    @property
    def cause(self) -> tuple[str, str]:
        """What is compared between nodes: the class of the exception and its location."""
        return self.action.exception, self.action.location


class RemovalRecord(msgspec.Struct, frozen=True):
    """The nodes that were removed on purpose, and the machines that have to wait or are refused because of them."""

    evicted_nodes: tuple[int, ...] = ()
    """Nodes that were removed because they hung or were given up."""
    failures_by_host: dict[str, int] = {}
    """How many nodes of a host were removed."""
    blocked_until: dict[str, float] = {}
    """By host: when its next node is admitted, by the clock."""
    quarantined_nodes: dict[int, str] = {}
    """The reason, by node."""
    quarantined_hosts: dict[str, str] = {}
    """The reason, by host."""


class MemoryRecord(msgspec.Struct, frozen=True):
    """A worker that ran out of memory."""

    worker: int
    stages: tuple[int, ...]
    """What it ran and replicated."""
    step: int
    """The newest step in which it did."""


class SnapshotHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened so far. It changes with events, not with steps."""

    recoveries: tuple[RecoveryRecord, ...] = ()
    departed_nodes: tuple[int, ...] = ()
    """Nodes that were lost or left."""
    checkpoints: tuple[int, ...] = ()
    evaluations: dict[int, float] = {}
    evaluation_values: dict[int, dict[str, float]] = {}
    chosen_evaluations: tuple[int, ...] = ()
    """The evaluations that were chosen by time, by the steps completed before them."""
    runs: tuple[StepRange, ...] = ()
    """All ranges of committed steps but the last, which grows with every step."""
    failures: tuple[FailureRecord, ...] = ()
    """Exceptions of workers."""
    ended_rentals: tuple[Rental, ...] = ()


class LeaderProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the run: it changes with every step."""

    started_at: float
    first_step_at: float | None
    next_step: int
    steps: int
    samples: int
    lost_samples: int
    duplicated_samples: int
    skipped_steps: int
    last_step: StepMetrics | None
    last_run: StepRange | None = None
    """The last range of committed steps."""
    evaluation_waited_s: float | None = None
    """Seconds since the time to the next evaluation began."""
    checkpoint_waited_s: float | None = None
    """The same for the next checkpoint."""
    chosen_checkpoints: tuple[int, ...] = ()
    """The last checkpoint that was chosen by time, and the open ones, by the steps completed before them."""
    at_risk_s: float
    unrecovered_nodes: tuple[int, ...] = ()
    """Departed nodes whose loss the run has not recovered from yet."""
    redone_samples: int = 0
    end_step: int | None = None
    """The run ends before this step; None: not decided yet."""
    all_nodes_leaving: bool = False
    """Whether the run ends early because every node has notice."""
    pending_line: StepMetrics | None = None
    """The last committed step, if its line was not written at the commit: it waits for the values of a hook."""
    corruptions: int = 0
    """Damaged frames and replicas that were found."""
    returns_to_verified: bool = False
    """Whether the next epoch starts from the newest verified checkpoint, because holders of a layer differed."""
    returned_causes: tuple[tuple[str, str], ...] = ()
    """Causes of exceptions after which the run has returned to a checkpoint."""
    failing_nodes: dict[int, int] = {}
    """Nodes with a worker that raised an exception, which still hand over their state, and the step of the action."""
    removals: RemovalRecord = RemovalRecord()
    out_of_memory: tuple[MemoryRecord, ...] = ()
    """Workers whose caches were emptied because they ran out of memory."""
    memory_relief: dict[int, int] = {}
    """By worker: how often another layout was tried because it ran out of memory with the work of lost workers."""
    impossible_stages: tuple[tuple[int, int], ...] = ()
    """(worker, stage): stages for which the memory of a worker does not suffice."""
    unresolved: tuple[CheckpointCheck, ...] = ()
    """Differences of holders that a replay is to explain, or that it has not explained."""
    returns: int = 0
    """Returns to the newest verified checkpoint."""
    last_commit_at: float | None = None
    """When the last failure-free step was committed, by the clock."""
    usual_step_s: float | None = None
    slowest_action_s: float = 0.0
    """The longest action so far: a worker that is silent for as long may still be computing."""
    spending: SpendingSnapshot | None = None
    """What the nodes have cost; None: nothing."""


class LeaderSnapshot(LeaderProgress, frozen=True, kw_only=True):
    """The progress of the run and its history: the next leader continues from it."""

    history: SnapshotHistory


decode_snapshot = msgspec.msgpack.Decoder(LeaderSnapshot).decode
