"""The ledger: which steps are committed, and that every sample was counted once. Pure: reports in, facts out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from culm.runtime.epoch import EvaluationReport, StepReport
from culm.runtime.update import added


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
    """What has been heard of a step that is not committed, by node: a report that comes twice counts once."""

    reports: dict[int, StepReport] = field(default_factory=dict)
    evaluations: dict[int, EvaluationReport] = field(default_factory=dict)


@dataclass
class Ledger:
    """Collects reports of the workers, in any order, and gives committed steps, in order.

    It keeps totals, the last step and the evaluations, so that a run of a million steps takes no more room than one
    of ten: the steps themselves are in the run folder.
    """

    workers: int
    micro_batch: int
    evaluate_every: int = 0
    evaluation_parts: int = 0
    """Micro-batches of one evaluation: it is complete when all are in."""
    next_step: int = 0
    steps: int = 0
    """Committed here; a resumed run counts from its checkpoint on."""
    samples: int = 0
    lost: int = 0
    duplicated: int = 0
    skipped: int = 0
    last: CommittedStep | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    """By step."""
    _open: dict[int, _Open] = field(default_factory=dict)

    def note(self, report: StepReport | EvaluationReport) -> list[CommittedStep]:
        """Take a report; returns the steps that it completes. What comes for a committed step is passed over."""
        if report.step < self.next_step:
            return []
        entry = self._open.setdefault(report.step, _Open())
        if isinstance(report, StepReport):
            entry.reports[report.node] = report
        else:
            entry.evaluations[report.node] = report
        return list(self._completed())

    def regroup(self, workers: int) -> None:
        """Another epoch: what was heard of open steps is void, everyone who is left reports them anew."""
        self.workers = workers
        self._open.clear()

    def rewind(self, step: int) -> None:
        """Back to a checkpoint: the steps since then will be run, and counted, again."""
        again = self.next_step - step
        self.samples -= again * (self.samples // max(self.steps, 1))
        self.steps -= again
        self.next_step = step
        self.evaluations = {at: loss for at, loss in self.evaluations.items() if at < step}
        self._open.clear()

    def _completed(self) -> Iterator[CommittedStep]:
        while self._complete(self.next_step):
            made = _committed(self.next_step, self._open.pop(self.next_step), self.micro_batch)
            self._enter(made)
            yield made

    def _complete(self, step: int) -> bool:
        entry = self._open.get(step)
        if entry is None or len(entry.reports) < self.workers:
            return False
        return not self._evaluates(step) or len(_parts(entry)) >= self.evaluation_parts

    def _evaluates(self, step: int) -> bool:
        return bool(self.evaluate_every) and (step + 1) % self.evaluate_every == 0

    def _enter(self, made: CommittedStep) -> None:
        self.next_step += 1
        self.steps += 1
        self.samples += made.samples
        self.lost += made.lost
        self.duplicated += made.duplicated
        self.skipped += made.skipped
        self.last = made
        if made.evaluation is not None:
            self.evaluations[made.step] = made.evaluation


def _committed(step: int, entry: _Open, micro_batch: int) -> CommittedStep:
    """What all reports of a step come to: a sample is lost if any layer missed it, duplicated if any had it twice."""
    reports = list(entry.reports.values())
    least = [min(counts) for counts in zip(*(r.counted for r in reports), strict=True)]
    most = [max(counts) for counts in zip(*(r.counted_most for r in reports), strict=True)]
    spoken = next(r for r in reports if r.loss_sum is not None)
    assert spoken.loss_sum is not None
    return CommittedStep(
        step=step,
        loss=spoken.loss_sum / (spoken.weight_sum or 1.0),
        samples=sum(count > 0 for count in least) * micro_batch,
        lost=sum(count == 0 for count in least) * micro_batch,
        duplicated=sum(max(0, count - 1) for count in most) * micro_batch,
        at=max(r.at for r in reports),
        norm=spoken.norm,
        skipped=spoken.skipped,
        evaluation=_evaluation(entry),
    )


def _evaluation(entry: _Open) -> float | None:
    """The mean over all micro-batches, added in their order: the same sum, whoever ran them and reported first."""
    parts = _parts(entry)
    weight = added(weight for _, _, weight in parts)
    return added(loss for _, loss, _ in parts) / weight if weight else None


def _parts(entry: _Open) -> list[tuple[int, float, float]]:
    return sorted(part for report in entry.evaluations.values() for part in report.parts)
