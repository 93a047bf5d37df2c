"""Recovery metrics: what losses cost a run, measured as they happen."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from culm.cluster.leader.phases import Phase
from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.schedule import Plan

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from culm.cluster.leader.next_epoch import NextEpoch
    from culm.plan.recover.lineage import WorkerInventory


@dataclass
class EpochHalt:
    """An epoch that is being left."""

    next_number: int
    """Number of the next epoch."""
    lost_nodes: set[int]
    expected_workers: set[int]
    """Workers that have to report what they hold."""
    started_at: float
    detect_s: float
    """Time from the failure to its detection."""
    committed_steps: int
    """Steps below this number were committed when the halt started."""
    waits_for_nodes: bool = False
    """Whether the leader waits for replacement nodes."""
    wait_expired: bool = False
    """Whether that wait is over."""
    inventories: dict[int, WorkerInventory] = field(default_factory=dict)
    """By worker."""

    @property
    def is_complete(self) -> bool:
        return self.inventories.keys() == self.expected_workers

    @property
    def is_deserted(self) -> bool:
        """Whether no worker of the epoch is left."""
        return not self.expected_workers

    @property
    def phase(self) -> Phase:
        """What the halt waits for."""
        if not self.is_complete:
            return Phase.HALTING
        return Phase.REPLACING if self.waits_for_nodes and not self.wait_expired else Phase.DECIDING


@dataclass
class OpenRecovery:
    """An epoch whose open steps are being completed."""

    halt: EpochHalt
    decided_at: float
    next_epoch: NextEpoch
    rerun_steps: int = 0
    """Committed steps that are run again after a return to a checkpoint."""
    ready_at: float | None = None
    lost_nodes: set[int] = field(default_factory=set)
    """Nodes whose loss this recovery covers, including those of an earlier recovery that was interrupted."""
    left_nodes: set[int] = field(default_factory=set)
    """Nodes that had a notice and have left meanwhile."""
    handoff_recipients: set[int] = field(default_factory=set)
    """Workers that have received everything that leaving nodes hand to them."""

    @property
    def last_step(self) -> int:
        """The step whose commit completes the recovery: everything committed or open before the loss is restored."""
        return (
            self.halt.committed_steps - 1
            if self.rerun_steps
            else self.next_epoch.epoch.start - 1 + self.restarts_open_step
        )

    @property
    def redone_actions(self) -> int:
        """Actions that are run a second time."""
        epoch = self.next_epoch.epoch
        return epoch.recovery.redone_actions + self.rerun_steps * len(Plan.from_text(epoch.plan).placement())

    @property
    def restarts_open_step(self) -> bool:
        """Whether the open step is discarded and run in another shape."""
        return self.next_epoch.epoch.changes_shape and bool(self.halt.lost_nodes)


class TimeSource(Protocol):
    """The time, and when nodes were killed, as far as it is known."""

    def now(self) -> float: ...
    def killed_at(self, node: int) -> float | None: ...


class RecoveryMetrics:
    """Completed recoveries with their times, the usual step time as reference, and the time at risk."""

    def __init__(self, clock: TimeSource) -> None:
        self.recoveries: list[RecoveryRecord] = []
        self.unrecovered_nodes: set[int] = set()
        """Lost members whose recovery is not complete."""
        self.at_risk_s = 0.0
        self.reshape_s: float | None = None
        """Recent duration of a change of shape (running mean); None: there was none."""
        self._clock = clock
        self._step_durations: collections.deque[float] = collections.deque(maxlen=32)
        self._epoch_step_durations: list[float] = []
        """Step durations of the current epoch only."""
        self._last_failure_free_commit_at: float | None = None
        """When the last step without a disturbance was committed."""
        self._first_suspicion_at: float | None = None
        """When a worker first reported an unreachable peer in this epoch."""
        self._at_risk_since: float | None = None

    def note_suspicion(self) -> None:
        """Record that a worker cannot reach a peer."""
        self._first_suspicion_at = self._first_suspicion_at or self._clock.now()

    def begin_epoch(self) -> None:
        """Reset what is measured per epoch."""
        self._first_suspicion_at = None
        self._epoch_step_durations.clear()

    def detection_time(self, lost_nodes: Collection[int]) -> float:
        """Seconds since the failure: since the kill if culm injected it, else since the first report of an unreachable
        peer. If a machine fell silent without any report, since the next step was overdue."""
        now = self._clock.now()
        killed_at = [at for at in map(self._clock.killed_at, lost_nodes) if at is not None]
        return now - min(now, *(killed_at or [self._missing_since(now, overdue=bool(lost_nodes))]))

    def _missing_since(self, now: float, *, overdue: bool) -> float:
        """When the failure first showed. A report later than a step after the overdue step is not the first sign."""
        sign = now if self._first_suspicion_at is None else self._first_suspicion_at
        if not overdue or self._last_failure_free_commit_at is None or self.usual_step_s is None:
            return sign
        due = self._last_failure_free_commit_at + self.usual_step_s
        return due if self._first_suspicion_at is None or sign > due + self.usual_step_s else sign

    @property
    def epoch_step_s(self) -> float:
        """Median step time in this epoch; 0 before the first step."""
        return statistics.median(self._epoch_step_durations) if self._epoch_step_durations else 0.0

    def record_reshape(self, recovery: OpenRecovery) -> float:
        """All members hold their layers in the new shape. Returns the seconds since the old one was left."""
        duration = self._clock.now() - recovery.halt.started_at
        self.reshape_s = duration if self.reshape_s is None else (self.reshape_s + duration) / 2
        return duration

    def set_at_risk(self, at_risk: bool) -> None:
        """Count the time at risk: while some layer has a single holder, losing it would cost more than a pause."""
        now = self._clock.now()
        if self._at_risk_since is not None:
            self.at_risk_s += now - self._at_risk_since
        self._at_risk_since = now if at_risk else None

    def record_commit(self) -> None:
        """Record a step without a disturbance: its duration enters the usual step time."""
        now = self._clock.now()
        if self._last_failure_free_commit_at is not None:
            self._step_durations.append(now - self._last_failure_free_commit_at)
            self._epoch_step_durations = [*self._epoch_step_durations[-31:], now - self._last_failure_free_commit_at]
        self._last_failure_free_commit_at = now

    def restart_step_timer(self) -> None:
        """Measure the next step from now on: the disturbance is over."""
        if self._last_failure_free_commit_at is not None:
            self._last_failure_free_commit_at = self._clock.now()

    @property
    def usual_step_s(self) -> float | None:
        """Median duration of a failure-free step in seconds; None: not known yet."""
        return statistics.median(self._step_durations) if self._step_durations else None

    def record_recovery(self, recovery: OpenRecovery) -> RecoveryRecord:
        """Record a recovery whose last open step has just been committed."""
        halt, epoch, now = recovery.halt, recovery.next_epoch.epoch, self._clock.now()
        decide = recovery.decided_at - halt.started_at
        move = (recovery.ready_at or now) - recovery.decided_at
        record = RecoveryRecord(
            step=max(halt.committed_steps, epoch.start - 1),
            lost=tuple(sorted({*recovery.lost_nodes, *recovery.left_nodes})),
            detect_ms=1e3 * halt.detect_s,
            decide_ms=1e3 * decide,
            move_ms=1e3 * move,
            redo_ms=1e3 * max(0.0, self._delay_s(recovery) - halt.detect_s - decide - move),
            redone_actions=recovery.redone_actions,
            source=recovery.next_epoch.source if recovery.lost_nodes else "notice",
        )
        self.recoveries.append(record)
        self.unrecovered_nodes -= recovery.lost_nodes
        return record

    @property
    def last_commit_at(self) -> float | None:
        """When the last step without a disturbance was committed."""
        return self._last_failure_free_commit_at

    def restore(
        self,
        recoveries: Sequence[RecoveryRecord],
        unrecovered_nodes: Collection[int],
        last_commit_at: float | None = None,
        usual_step_s: float | None = None,
    ) -> None:
        """Take over the records of the previous leader. Nodes lost since then stay unrecovered.

        With the time of its last commit and its usual step time, the recovery from its loss includes the time in which
        the run stood still without a leader.
        """
        self._last_failure_free_commit_at = last_commit_at
        if usual_step_s is not None:
            self._step_durations.append(usual_step_s)
        self.recoveries = list(recoveries)
        self.unrecovered_nodes = {*self.unrecovered_nodes, *unrecovered_nodes} - {
            node for recovered in recoveries for node in recovered.lost
        }

    def _delay_s(self, recovery: OpenRecovery) -> float:
        """How much later than usual, in seconds, the open steps were committed. A new leader does not know the usual
        step time, but steps that are run again are late by their whole duration."""
        halt, now = recovery.halt, self._clock.now()
        steps = len(recovery.next_epoch.epoch.recovery.steps) + recovery.restarts_open_step
        if self._last_failure_free_commit_at is not None and (self.usual_step_s is not None or not steps):
            return now - self._last_failure_free_commit_at - steps * (self.usual_step_s or 0.0)
        return now - halt.started_at + halt.detect_s if recovery.rerun_steps else 0.0
