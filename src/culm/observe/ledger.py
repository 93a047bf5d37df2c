"""The ledger: which steps are committed, and the proof that every sample was counted once. Pure: reports in, facts out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.runtime.epoch import EvaluationReport, StepReport


@dataclass(frozen=True)
class CommittedStep:
    """A step that every holder has the complete sums of."""

    step: int
    loss: float
    samples: int
    lost: int
    duplicated: int
    at: float
    norm: float | None
    skipped: bool
    evaluation: float | None


@dataclass
class _Open:
    reports: dict[int, StepReport] = field(default_factory=dict)
    evaluations: list[EvaluationReport] = field(default_factory=list)


@dataclass
class Ledger:
    """Collects reports of the workers, in any order, and gives committed steps, in order."""

    workers: int
    micro_batch: int
    evaluate_every: int = 0
    evaluation_parts: int = 0
    """Micro-batches of one evaluation: it is complete when all are in."""
    next_step: int = 0
    samples: int = 0
    lost: int = 0
    duplicated: int = 0
    skipped: int = 0
    committed: list[CommittedStep] = field(default_factory=list)
    _open: dict[int, _Open] = field(default_factory=dict)

    def note(self, report: StepReport | EvaluationReport) -> list[CommittedStep]:
        """Take a report; returns the steps that it completes."""
        entry = self._open.setdefault(report.step, _Open())
        if hasattr(report, "counted"):
            entry.reports[report.node] = report  # type: ignore[assignment]
        else:
            entry.evaluations.append(report)
        done = []
        while self._complete(self.next_step):
            done.append(self._commit(self.next_step))
            self.next_step += 1
        return done

    def _complete(self, step: int) -> bool:
        entry = self._open.get(step)
        if entry is None or len(entry.reports) < self.workers:
            return False
        return not self._evaluates(step) or sum(e.parts for e in entry.evaluations) >= self.evaluation_parts

    def _evaluates(self, step: int) -> bool:
        return bool(self.evaluate_every) and (step + 1) % self.evaluate_every == 0

    def _commit(self, step: int) -> CommittedStep:
        entry = self._open.pop(step)
        reports = list(entry.reports.values())
        least = [min(counts) for counts in zip(*(r.counted for r in reports), strict=True)]
        most = [max(counts) for counts in zip(*(r.counted_most for r in reports), strict=True)]
        spoken = next(r for r in reports if r.loss_sum is not None)
        assert spoken.loss_sum is not None
        made = CommittedStep(
            step=step,
            loss=spoken.loss_sum / (spoken.weight_sum or 1.0),
            samples=sum(count > 0 for count in least) * self.micro_batch,
            lost=sum(count == 0 for count in least) * self.micro_batch,
            duplicated=sum(max(0, count - 1) for count in most) * self.micro_batch,
            at=max(r.at for r in reports),
            norm=spoken.norm,
            skipped=spoken.skipped,
            evaluation=self._evaluation(entry),
        )
        self.samples += made.samples
        self.lost += made.lost
        self.duplicated += made.duplicated
        self.skipped += made.skipped
        self.committed.append(made)
        return made

    def _evaluation(self, entry: _Open) -> float | None:
        ordered = sorted(entry.evaluations, key=lambda e: e.node)
        weight = sum(e.weight_sum for e in ordered)
        return sum(e.loss_sum for e in ordered) / weight if weight else None
