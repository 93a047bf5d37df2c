"""The ledger: which steps are committed, and that every sample was counted once. Pure: reports in, facts out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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


class Run(NamedTuple):
    """Steps in a row that each counted, and lost, as many samples, and moved the weights or did not."""

    first: int
    steps: int
    samples: int
    lost: int
    skipped: bool


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
    redone: int = 0
    """Samples of steps that were committed, and are run once more: they count once, and their time is lost."""
    runs: list[Run] = field(default_factory=list)
    """All steps that count, as few runs as they make: so a part of them can be taken back."""
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
        """To a checkpoint: the steps since then will be run, and counted, again. It may be ahead of what everyone has
        reported: whoever saved it has made all steps that it holds, and so they count."""
        while self.next_step < step and self._presumed() is not None:
            pass
        before = self.samples
        left = [run._replace(steps=min(run.steps, step - run.first)) for run in self.runs if run.first < step]
        self.runs, self.next_step = left, step
        self.steps = sum(run.steps for run in left)
        self.samples = sum(run.steps * run.samples for run in left)
        self.lost = sum(run.steps * run.lost for run in left)
        self.skipped = sum(run.steps * run.skipped for run in left)
        self.redone += before - self.samples
        self.evaluations = {at: loss for at, loss in self.evaluations.items() if at < step}
        self._open.clear()

    def _presumed(self) -> CommittedStep | None:
        """Enter the next step by the reports that there are or, without any, as one like the last."""
        entry = self._open.pop(self.next_step, _Open())
        if any(report.loss_sum is not None for report in entry.reports.values()):
            made: CommittedStep | None = _committed(self.next_step, entry, self.micro_batch)
        else:
            made = None if self.last is None else replace(self.last, step=self.next_step, evaluation=None)
        if made is not None:
            self._enter(made)
        return made

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
        self._lengthen(Run(made.step, 1, made.samples, made.lost, made.skipped))
        self.next_step += 1
        self.steps += 1
        self.samples += made.samples
        self.lost += made.lost
        self.duplicated += made.duplicated
        self.skipped += made.skipped
        self.last = made
        if made.evaluation is not None:
            self.evaluations[made.step] = made.evaluation

    def _lengthen(self, one: Run) -> None:
        """Another step: like those before it, or the first of another run."""
        before = self.runs.pop() if self.runs else one._replace(steps=0)
        if before[2:] == one[2:]:
            self.runs.append(before._replace(steps=before.steps + 1))
        else:
            self.runs += [before, one]


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
