"""What a run has come to so far: losses by epoch, accuracies, when to stop. Pure: reports in, facts out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from culm.gnn.passes import Pass
    from culm.gnn.setup import Report


class Evaluation(NamedTuple):
    """Accuracies after an epoch."""

    epoch: int
    train: float
    val: float
    test: float


class Epoch(NamedTuple):
    """One training epoch, complete."""

    epoch: int
    loss: float


@dataclass
class Ledger:
    """Everything that graph servers have told. An epoch that is run again after a loss replaces itself."""

    servers: int
    total: int
    """Training vertices of the graph."""
    plan: Sequence[Pass]
    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    vertices: dict[int, int] = field(default_factory=dict)
    """By epoch: training vertices that counted in it."""
    _open_losses: dict[tuple[int, int], dict[int, tuple[float, int]]] = field(default_factory=dict)
    _open_counts: dict[tuple[int, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)
    _ends: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    _latest: dict[int, Report] = field(default_factory=dict)
    _before: dict[str, float] = field(default_factory=dict)

    def add(self, report: Report) -> tuple[list[Epoch], list[Evaluation]]:
        """What became complete by a report."""
        for number, at in report.ended.items():
            self._ends.setdefault((report.generation, number), {})[report.server] = at
        self._remember(report)
        epochs = [self._loss(report, epoch, loss) for epoch, loss in report.losses.items()]
        evaluations = [self._evaluation(report, epoch, counts) for epoch, counts in report.evaluations.items()]
        return [e for e in epochs if e is not None], [e for e in evaluations if e is not None]

    def _remember(self, report: Report) -> None:
        """Counters start at zero in every generation: what the one before came to is added up."""
        last = self._latest.get(report.server)
        if last is not None and last.generation != report.generation:
            for name in ("relaunches", "refused", "worker_seconds", "worker_tasks"):
                self._before[name] = self._before.get(name, 0) + getattr(last, name)
        self._latest[report.server] = report

    def _loss(self, report: Report, epoch: int, loss: tuple[float, int]) -> Epoch | None:
        given = self._open_losses.setdefault((report.generation, epoch), {})
        given[report.server] = loss
        if len(given) < self.servers:
            return None
        del self._open_losses[report.generation, epoch]
        self.losses[epoch] = sum(given[s][0] for s in range(self.servers)) / self.total
        self.vertices[epoch] = sum(count for _, count in given.values())
        return Epoch(epoch, self.losses[epoch])

    def _evaluation(self, report: Report, epoch: int, counts: tuple[int, ...]) -> Evaluation | None:
        given = self._open_counts.setdefault((report.generation, epoch), {})
        given[report.server] = counts
        if len(given) < self.servers:
            return None
        sums = [sum(column) for column in zip(*given.values(), strict=True)]
        shares = [right / count if count else float("nan") for right, count in zip(sums[::2], sums[1::2], strict=True)]
        self.evaluations[epoch] = Evaluation(epoch, *shares)
        return self.evaluations[epoch]

    def total_of(self, name: str) -> float:
        """A counter of the reports, over all servers and generations."""
        return self._before.get(name, 0) + sum(float(getattr(r, name)) for r in self._latest.values())

    def now_of(self, name: str) -> int:
        """A gauge of the reports, over all servers."""
        return sum(int(getattr(r, name)) for r in self._latest.values())

    @property
    def reached(self) -> int:
        """Epochs that are done."""
        return max(self.losses, default=-1) + 1

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the best validation accuracy, the latest of equals; the last where nobody validates."""
        return max(
            self.evaluations.values(), key=lambda e: (-1.0 if math.isnan(e.val) else e.val, e.epoch), default=None
        )

    def epoch_times(self) -> list[float]:
        """Seconds of every training epoch that followed another pass without a break."""
        found = []
        for (generation, number), ends in sorted(self._ends.items()):
            before = self._ends.get((generation, number - 1), {})
            if self.plan[number].train and len(ends) == len(before) == self.servers:
                found.append(max(ends.values()) - max(before.values()))
        return found

    def lost(self) -> int:
        """Training vertices that have not counted in an epoch that is done: zero, or something is broken."""
        return sum(max(0, self.total - count) for count in self.vertices.values())

    def duplicated(self) -> int:
        """And those that have counted more than once."""
        return sum(max(0, count - self.total) for count in self.vertices.values())


def exhausted(evaluations: Sequence[Evaluation], patience: int) -> str | None:
    """Why to stop early; None: go on. `patience` evaluations without a better validation accuracy are too many."""
    if patience <= 0 or len(evaluations) <= patience:
        return None
    best = max(e.val for e in evaluations[:-patience])
    if max(e.val for e in evaluations[-patience:]) > best:
        return None
    return f"validation accuracy has not passed {best:.4f} in {patience} evaluations"
