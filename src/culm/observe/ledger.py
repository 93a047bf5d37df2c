"""The ledger: which steps are committed, and whether every sample was counted once. Pure: reports in, steps out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from culm.data.stream import other_items_message
from culm.errors import JobError
from culm.metric import Metric
from culm.monitor import EvaluationInterval
from culm.observe.step_metrics import StepMetrics
from culm.runtime.compute.weight_update import sequential_sum
from culm.runtime.messages import CountRun, EvaluationReport, StepReport
from culm.runtime.microbatch_stats import combine_values


class StepRange(NamedTuple):
    """Consecutive steps with the same number of counted and lost samples, and the same `skipped`."""

    first_step: int
    steps: int
    samples: int
    samples_lost: int
    skipped: bool
    samples_duplicated: int = 0


@dataclass
class _OpenStep:
    """The reports of a step that is not committed, by worker: a report that arrives twice counts once."""

    reports: dict[int, StepReport] = field(default_factory=dict)
    evaluations: dict[int, EvaluationReport] = field(default_factory=dict)


@dataclass
class Ledger:
    """Collects the reports of the workers, in any order, and returns committed steps, in order.

    It keeps totals, the last step and the evaluations only, so that its size does not grow with the number of steps;
    the steps themselves are in the run folder.
    """

    workers: int
    micro_batch: int
    evaluate_every: int = 0
    chosen_evaluations: Collection[int] = ()
    """Evaluations that are due by time: the steps completed before each. The leader adds to them."""
    evaluation_parts: int = 0
    """Micro-batches of one evaluation: it is complete when all are reported."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The metrics of the job, which evaluations have, too."""
    next_step: int = 0
    started_at: float = 0.0
    """When the run started, by the clock that reports carry: `StepMetrics.t` counts from it."""
    steps: int = 0
    """Committed steps; a resumed run counts from its checkpoint on."""
    samples: int = 0
    samples_lost: int = 0
    samples_duplicated: int = 0
    skipped_steps: int = 0
    samples_redone: int = 0
    """Samples of committed steps that are run again after a rewind: they count once."""
    step_ranges: list[StepRange] = field(default_factory=list)
    """All committed steps, in as few ranges as possible: `rewind` subtracts a part of them from the totals."""
    last_step: StepMetrics | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    """Evaluation losses by step."""
    evaluation_values: dict[int, dict[str, float]] = field(default_factory=dict)
    """The loss and the named values of evaluations by step: eval_loss, eval_accuracy, ..."""
    _open_steps: dict[int, _OpenStep] = field(default_factory=dict)

    def add_report(self, report: StepReport | EvaluationReport) -> list[StepMetrics]:
        """Add a report and return the steps that it completes. A report of a committed step is ignored."""
        if report.step < self.next_step:
            return []
        entry = self._open_steps.setdefault(report.step, _OpenStep())
        if isinstance(report, StepReport):
            entry.reports[report.worker] = report
        else:
            entry.evaluations[report.worker] = report
        return list(self._commit_complete_steps())

    def start_epoch(self, workers: int) -> None:
        """Start an epoch with this many workers: reports of open steps are dropped, all workers report them again."""
        self.workers = workers
        self._open_steps.clear()

    def rewind(self, step: int) -> None:
        """Go back to a checkpoint with this many steps; later steps will be run and counted again.

        The checkpoint may be ahead of the reports: the workers that saved it have completed its steps, so they count.
        """
        while self.next_step < step and self._commit_presumed_step() is not None:
            pass
        before = self.samples
        left = [
            run._replace(steps=min(run.steps, step - run.first_step))
            for run in self.step_ranges
            if run.first_step < step
        ]
        self.step_ranges, self.next_step = left, step
        self.steps = sum(run.steps for run in left)
        self.samples = sum(run.steps * run.samples for run in left)
        self.samples_lost = sum(run.steps * run.samples_lost for run in left)
        self.samples_duplicated = sum(run.steps * run.samples_duplicated for run in left)
        self.skipped_steps = sum(run.steps * run.skipped for run in left)
        self.samples_redone += before - self.samples
        self.evaluations = {at: loss for at, loss in self.evaluations.items() if at < step}
        self.evaluation_values = {at: values for at, values in self.evaluation_values.items() if at < step}
        self._open_steps.clear()

    def _commit_presumed_step(self) -> StepMetrics | None:
        """Commit the next step from the reports that have arrived; without any, as a copy of the last step."""
        entry = self._open_steps.pop(self.next_step, _OpenStep())
        if any(report.loss_sum is not None for report in entry.reports.values()):
            committed: StepMetrics | None = self._merge_reports(entry)
        elif self.last_step is None:
            committed = None
        else:
            ours = {evaluation_name(name) for name in self.metrics}
            values = {name: value for name, value in self.last_step.values.items() if name not in ours}
            committed = msgspec.structs.replace(self.last_step, step=self.next_step, eval_loss=None, values=values)
        if committed is not None:
            self._add_committed(committed)
        return committed

    def _commit_complete_steps(self) -> Iterator[StepMetrics]:
        while self._is_complete(self.next_step):
            committed = self._merge_reports(self._open_steps.pop(self.next_step))
            self._add_committed(committed)
            yield committed

    def _is_complete(self, step: int) -> bool:
        entry = self._open_steps.get(step)
        if entry is None or len(entry.reports) < self.workers:
            return False
        return not self._has_evaluation(step) or len(_evaluation_parts(entry)) >= self.evaluation_parts

    def _has_evaluation(self, step: int) -> bool:
        return EvaluationInterval(self.evaluate_every).is_due_by_count(step + 1) or step + 1 in self.chosen_evaluations

    def _add_committed(self, committed: StepMetrics) -> None:
        self._extend_step_ranges(
            StepRange(
                committed.step,
                1,
                committed.samples,
                committed.samples_lost,
                committed.skipped,
                committed.samples_duplicated,
            )
        )
        self.next_step += 1
        self.steps += 1
        self.samples += committed.samples
        self.samples_lost += committed.samples_lost
        self.samples_duplicated += committed.samples_duplicated
        self.skipped_steps += committed.skipped
        self.last_step = committed
        if committed.eval_loss is not None:
            self.evaluations[committed.step] = committed.eval_loss
            named = {name: committed.values[name] for name in map(evaluation_name, self.metrics)}
            self.evaluation_values[committed.step] = {"eval_loss": committed.eval_loss, **named}

    def _extend_step_ranges(self, step_range: StepRange) -> None:
        """Add a step to the last range if it is like the steps there, else begin another range."""
        before = self.step_ranges.pop() if self.step_ranges else step_range._replace(steps=0)
        if before[2:] == step_range[2:]:
            self.step_ranges.append(before._replace(steps=before.steps + 1))
        else:
            self.step_ranges += [before, step_range]

    def _merge_reports(self, entry: _OpenStep) -> StepMetrics:
        """The metrics of the next step from all of its reports: a sample is lost if any layer missed it, duplicated if
        any layer counted it twice."""
        reports = list(entry.reports.values())
        self._check_streams(reports)
        distinct = {report.counts for report in reports}  # usually one: every worker has each micro-batch once
        least = [min(counts) for counts in zip(*(_expand(runs, "least") for runs in distinct), strict=True)]
        most = [max(counts) for counts in zip(*(_expand(runs, "most") for runs in distinct), strict=True)]
        last_stage = next(r for r in reports if r.loss_sum is not None)
        assert last_stage.loss_sum is not None
        return StepMetrics(
            step=self.next_step,
            t=round(max(r.reported_at for r in reports) - self.started_at, 6),
            loss=last_stage.loss_sum / (last_stage.weight_sum or 1.0),
            samples=sum(count > 0 for count in least) * self.micro_batch,
            norm=last_stage.grad_norm,
            eval_loss=_mean_evaluation_loss(entry),
            skipped=last_stage.skipped,
            samples_lost=sum(count == 0 for count in least) * self.micro_batch,
            samples_duplicated=sum(max(0, count - 1) for count in most) * self.micro_batch,
            values={**last_stage.values, **self._evaluation_values(entry)},
        )

    def _check_streams(self, reports: Iterable[StepReport]) -> None:
        """Raise JobError if workers have read different items from a stream."""
        readers = {report.stream_digest: report.worker for report in reports if report.stream_digest is not None}
        if len(readers) > 1:
            one, other, *_ = sorted(readers.values())
            first = self.next_step
            raise JobError(other_items_message(f"gave worker {other} other items in step {first} than worker {one}"))

    def _evaluation_values(self, entry: _OpenStep) -> dict[str, float]:
        """The values of Job.metrics over the evaluation set, in micro-batch order; empty without an evaluation."""
        parts = _evaluation_parts(entry)
        if not parts or not sequential_sum(weight for _, _, weight, _ in parts):
            return {}
        weights = [weight for _, _, weight, _ in parts]
        return {
            evaluation_name(name): combine_values(metric, [values[column] for *_, values in parts], weights)
            for column, (name, metric) in enumerate(self.metrics.items())
        }


def _expand(runs: Iterable[CountRun], which: Literal["least", "most"]) -> list[int]:
    """One count for each micro-batch."""
    return [getattr(run, which) for run in runs for _ in range(run.micro_batches)]


def evaluation_name(name: str) -> str:
    """The name of a value of Job.metrics where it is computed on the evaluation set."""
    return f"eval_{name}"


def _mean_evaluation_loss(entry: _OpenStep) -> float | None:
    """The mean over all micro-batches, added in micro-batch order so that the order of reports does not matter."""
    parts = _evaluation_parts(entry)
    weight = sequential_sum(weight for _, _, weight, _ in parts)
    return sequential_sum(loss for _, loss, _, _ in parts) / weight if weight else None


def _evaluation_parts(entry: _OpenStep) -> list[tuple[int, float, float, tuple[float, ...]]]:
    return sorted(part for report in entry.evaluations.values() for part in report.micro_batch_losses)
