"""Checkpoint tracker: the leader's view of checkpoints that are being written, and of the newest complete one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from culm.cluster.leader.checkpoints.replica_check import Checksums, Comparison, compare_holders

if TYPE_CHECKING:
    from culm.cluster.leader.evaluation_monitor import BestEvaluation
    from culm.cluster.leader.events import CommittedCheckpoint
    from culm.cluster.run_setup import RunSetup
    from culm.runtime.epoch import Epoch
    from culm.runtime.messages import ShardReport

_MAX_PAST_EPOCHS = 8
"""Past epochs whose shards may still arrive."""


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint that is being written: the workers that write a shard of it, and the shards on storage."""

    writers: frozenset[int]
    shards: dict[int, ShardReport] = field(default_factory=dict)

    @property
    def missing_writers(self) -> frozenset[int]:
        return self.writers - self.shards.keys()


class CheckpointCheck(NamedTuple):
    """A checkpoint whose shards are all on storage, and what the comparison of its holders found."""

    step: int
    checksums: Checksums
    comparison: Comparison

    def without_equal_layers(self) -> CheckpointCheck:
        """The same with the checksums of differing layers only, which are what a replay is compared with."""
        layers = self.comparison.differing_layers
        own = {worker: {at: held[at] for at in layers if at in held} for worker, held in self.checksums.items()}
        return self._replace(checksums={worker: held for worker, held in own.items() if held})


class CheckpointTracker:
    """Checkpoints by epoch and step.

    When all shards of a checkpoint are on storage and its last step is committed, one atomic write makes it valid: a
    run that resumes from it finds all of its steps in the ledger. Its epoch may have ended by then, as long as no node
    has departed whose shard is missing.
    """

    def __init__(self, setup: RunSetup) -> None:
        self.completed_steps: list[int] = []
        self._open_checkpoints: dict[tuple[int, int], _OpenCheckpoint] = {}
        self._writers_by_epoch: dict[int, frozenset[int]] = {}
        """By epoch: the workers that write its checkpoints. Only epochs whose writers are all still present."""
        self.verified_steps: set[int] = set()
        """Checkpoints of which all holders agreed."""
        self.best: BestEvaluation | None = None
        """The best evaluation so far, whose checkpoint is not deleted."""
        self.decisive_evaluations: Callable[[int], dict[int, dict[str, float]]] = lambda _: {}
        """The evaluations before a step that a resumed run needs for early_stop and keep_best."""
        self._epoch = 0
        self._setup = setup

    def __len__(self) -> int:
        """The number of checkpoints of the current epoch that are being written."""
        return sum(epoch == self._epoch for epoch, _ in self._open_checkpoints)

    def begin_epoch(self, epoch: Epoch, writers: Collection[int], departed_workers: Collection[int]) -> None:
        """Start an epoch with these checkpoint writers. Drop open checkpoints whose missing shards cannot arrive."""
        self.completed_steps = [step for step in self.completed_steps if step <= epoch.start]
        if epoch.rebuild:
            self._open_checkpoints, self._writers_by_epoch = {}, {}
        self._open_checkpoints = {
            key: begun
            for key, begun in self._open_checkpoints.items()
            if not begun.missing_writers.intersection(departed_workers)
        }
        whole = [
            (number, own) for number, own in self._writers_by_epoch.items() if not own.intersection(departed_workers)
        ]
        self._writers_by_epoch = dict(whole[-_MAX_PAST_EPOCHS:])
        self._writers_by_epoch[epoch.number] = frozenset(writers)
        self._epoch = epoch.number

    def is_checkpoint_overdue(
        self, epoch: Epoch, departed_workers: Collection[int], chosen: Collection[int] = ()
    ) -> bool:
        """Whether the last checkpoint due before this epoch is neither complete nor still being written. `chosen`: the
        checkpoints that are due by time."""
        if epoch.rebuild:
            return False
        due = max((step for step in chosen if step <= epoch.start), default=0)
        if epoch.checkpoint_every:
            due = max(due, epoch.start // epoch.checkpoint_every * epoch.checkpoint_every)
        coming = [
            step
            for (_, step), begun in self._open_checkpoints.items()
            if not begun.missing_writers.intersection(departed_workers)
        ]
        return due > max(self.completed_steps, default=self._setup.resume or 0) and due not in coming

    def add_shard(self, report: ShardReport) -> None:
        """Record that a shard is on storage."""
        key = report.epoch, report.step
        if key not in self._open_checkpoints:
            if report.epoch not in self._writers_by_epoch or report.step <= max(self.completed_steps, default=-1):
                return  # its other shards can never arrive, or a later checkpoint is complete
            self._open_checkpoints[key] = _OpenCheckpoint(self._writers_by_epoch[report.epoch])
        self._open_checkpoints[key].shards[report.worker] = report

    def compare_holders(self, epoch: int, step: int) -> CheckpointCheck | None:
        """Compare the holders of a checkpoint whose shards are all on storage; None: it is not complete.

        A checkpoint whose holders differ is dropped. One whose holders agree is committed as verified.
        """
        begun = self._open_checkpoints.get((epoch, step))
        if begun is None or begun.missing_writers:
            return None
        checksums = {worker: report.checksums for worker, report in begun.shards.items()}
        found = compare_holders(checksums, self._setup.segments[-1][1])
        if found.differing_layers:
            del self._open_checkpoints[epoch, step]
        elif found.is_verified:
            self.verified_steps.add(step)
        return CheckpointCheck(step, checksums, found)

    def keep_verified(self, step: int | None) -> None:
        """The run returns to a verified checkpoint: drop open ones and forget later ones. None: to the start."""
        self._open_checkpoints.clear()
        self.verified_steps = set() if step is None else {each for each in self.verified_steps if each <= step}

    @property
    def kept_steps(self) -> list[int]:
        """Checkpoints that are kept whatever their age: the newest verified one, which a run returns to when holders
        differ, and the best one."""
        newest_verified = [max(self.verified_steps)] if self.verified_steps else []
        return newest_verified + ([] if self.best is None else [self.best.completed_steps])

    def newest_whole(self, committed_steps: int) -> tuple[int, int] | None:
        """Epoch and step of the newest checkpoint whose shards and steps are all there."""
        whole = [
            key
            for key, begun in self._open_checkpoints.items()
            if not begun.missing_writers and key[1] <= committed_steps
        ]
        return max(whole, key=lambda key: key[1], default=None)

    def record_commit(self, made: CommittedCheckpoint) -> None:
        """A checkpoint is valid: it and older ones are not open any more."""
        self._open_checkpoints = {key: begun for key, begun in self._open_checkpoints.items() if key[1] > made.step}
        self.completed_steps.append(made.step)

    def shards_of(self, key: tuple[int, int]) -> list[ShardReport]:
        """The shards of an open checkpoint that are on storage."""
        return list(self._open_checkpoints[key].shards.values())
