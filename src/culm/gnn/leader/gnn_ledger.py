"""The ledger of a run: losses by training epoch, accuracies, counters, and the rule for early stopping. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from culm.gnn.leader.server_recoveries import ServerRecoveries

if TYPE_CHECKING:
    from culm.gnn.scheduler.passes import Pass
    from culm.gnn.server.store_records import GraphServerReport
    from culm.runtime.compute.snapshot import Snapshot


class Evaluation(NamedTuple):
    """Accuracies after a training epoch."""

    epoch: int
    train: float
    val: float
    test: float


class EpochLoss(NamedTuple):
    """Loss of a completed training epoch."""

    epoch: int
    loss: float


@dataclass
class GnnLedger:
    """Collects the reports of graph servers. An epoch that is repeated after a lost server replaces its former
    entries."""

    servers: int
    train_vertices: int
    """Training vertices of the whole graph."""
    passes: Sequence[Pass]
    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    counted_vertices: dict[int, int] = field(default_factory=dict)
    """By epoch: training vertices that were counted."""
    _partial_losses: dict[tuple[int, int], dict[int, tuple[float, int]]] = field(default_factory=dict)
    _partial_counts: dict[tuple[int, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)
    _pass_end_times: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    _latest_reports: dict[int, GraphServerReport] = field(default_factory=dict)
    _previous_totals: dict[str, float] = field(default_factory=dict)

    def add_report(self, report: GraphServerReport) -> tuple[list[EpochLoss], list[Evaluation]]:
        """Add a report. Returns the epochs and evaluations that became complete."""
        for number, end_time in report.pass_end_times.items():
            self._pass_end_times.setdefault((report.generation, number), {})[report.server] = end_time
        self._carry_over_counters(report)
        epochs = [self._add_loss(report, epoch, loss) for epoch, loss in report.losses.items()]
        evaluations = [self._add_evaluation(report, epoch, counts) for epoch, counts in report.evaluations.items()]
        return [e for e in epochs if e is not None], [e for e in evaluations if e is not None]

    def _carry_over_counters(self, report: GraphServerReport) -> None:
        """Carry counters over to a new generation, in which they start at zero."""
        last = self._latest_reports.get(report.server)
        if last is not None and last.generation != report.generation:
            for name in ("relaunches", "refused", "worker_seconds", "worker_tasks"):
                self._previous_totals[name] = self._previous_totals.get(name, 0) + getattr(last, name)
        self._latest_reports[report.server] = report

    def _add_loss(self, report: GraphServerReport, epoch: int, loss: tuple[float, int]) -> EpochLoss | None:
        parts = self._partial_losses.setdefault((report.generation, epoch), {})
        parts[report.server] = loss
        if len(parts) < self.servers:
            return None
        del self._partial_losses[report.generation, epoch]
        self.losses[epoch] = sum(parts[s][0] for s in range(self.servers)) / self.train_vertices
        self.counted_vertices[epoch] = sum(count for _, count in parts.values())
        return EpochLoss(epoch, self.losses[epoch])

    def _add_evaluation(self, report: GraphServerReport, epoch: int, counts: tuple[int, ...]) -> Evaluation | None:
        parts = self._partial_counts.setdefault((report.generation, epoch), {})
        parts[report.server] = counts
        if len(parts) < self.servers:
            return None
        sums = [sum(column) for column in zip(*parts.values(), strict=True)]
        shares = [right / count if count else float("nan") for right, count in zip(sums[::2], sums[1::2], strict=True)]
        self.evaluations[epoch] = Evaluation(epoch, *shares)
        return self.evaluations[epoch]

    def counter_total(self, name: str) -> float:
        """Return the sum of a counter over all servers and generations."""
        return self._previous_totals.get(name, 0) + sum(float(getattr(r, name)) for r in self._latest_reports.values())

    def gauge_total(self, name: str) -> int:
        """Return the sum of a gauge over the latest reports of all servers."""
        return sum(int(getattr(r, name)) for r in self._latest_reports.values())

    @property
    def epochs_done(self) -> int:
        """Number of completed training epochs."""
        return max(self.losses, default=-1) + 1

    @property
    def best_evaluation(self) -> Evaluation | None:
        """The evaluation with the best validation accuracy, the latest of equals; the last one without validation
        vertices."""
        return max(
            self.evaluations.values(), key=lambda e: (-1.0 if math.isnan(e.val) else e.val, e.epoch), default=None
        )

    def epoch_times(self) -> list[float]:
        """Return the seconds of each training epoch that directly followed another pass of the same generation."""
        times = []
        for (generation, number), ends in sorted(self._pass_end_times.items()):
            before = self._pass_end_times.get((generation, number - 1), {})
            if self.passes[number].train and len(ends) == len(before) == self.servers:
                times.append(max(ends.values()) - max(before.values()))
        return times

    def count_lost_vertices(self) -> int:
        """Return the training vertices that were not counted in a completed epoch: 0, unless there is a bug."""
        return sum(max(0, self.train_vertices - count) for count in self.counted_vertices.values())

    def count_duplicated_vertices(self) -> int:
        """Return the training vertices that were counted more than once: 0, unless there is a bug."""
        return sum(max(0, count - self.train_vertices) for count in self.counted_vertices.values())


@dataclass
class RunResults:
    """Results of a run, updated while it goes on."""

    ledger: GnnLedger
    final_state: dict[int, Snapshot] = field(default_factory=dict)
    """Weights and moments by layer at the end of the run."""
    best_state: dict[int, Snapshot] = field(default_factory=dict)
    """The same after the epoch with the best validation accuracy."""
    generations: int = 0
    stop_reason: str = ""
    recoveries: ServerRecoveries = field(default_factory=ServerRecoveries)
    checkpoints: list[int] = field(default_factory=list)
    """Versions that every parameter server has saved, in order."""


def early_stop_reason(evaluations: Sequence[Evaluation], patience: int) -> str | None:
    """Return why to stop early, or None: no better validation accuracy in the last `patience` evaluations."""
    if patience <= 0 or len(evaluations) <= patience:
        return None
    best = max(e.val for e in evaluations[:-patience])
    if max(e.val for e in evaluations[-patience:]) > best:
        return None
    return f"validation accuracy has not passed {best:.4f} in {patience} evaluations"
