"""What a run folder records about its training: launches, checkpoints, and whether it can be reproduced. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from culm.errors import UsageError
from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.writers.run_folder import saved_checkpoint_steps
from culm.text_format import count_noun

CHEAP_S = 600.0
"""A run with a single checkpoint is retrained from step 0 without being asked if its workers took at most so long."""


class CheckpointRange(NamedTuple):
    """Steps `first` to `last` - 1: from the state after `first` completed steps to that after `last`."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


@dataclass(frozen=True)
class Launch:
    """One start of the run: the first, or a resume. From the event `run_started`."""

    first_step: int
    reference: str
    """FILE[:function] as given; empty: the job was a Python object."""
    job_file: str
    """FILE[:function] with an absolute path."""
    overrides: dict[str, str]

    @property
    def training(self) -> tuple[str, dict[str, str]]:
        """What decides the weights. The number of steps does not."""
        return self.job_file or self.reference, {k: v for k, v in self.overrides.items() if k != "steps"}


@dataclass(frozen=True)
class RecordedRun:
    """A run that has ended, as its folder describes it."""

    folder: str
    checkpoints: tuple[int, ...]
    """Completed steps of every committed checkpoint, rising."""
    launches: tuple[Launch, ...]
    exact: bool
    pipelines: int
    """The largest number of pipelines at any time."""
    incomplete_steps: tuple[int, ...] = ()
    """Steps that left out or repeated samples."""
    losses: Mapping[int, float | None] = field(default_factory=dict)
    """Loss by step."""
    worker_s_per_step: float = 0.0
    """Seconds that a step took, times the number of workers."""
    summary: Mapping[str, Any] | None = None

    @property
    def checkpoint_root(self) -> str:
        return f"{self.folder.rstrip('/')}/checkpoints"

    def launch_of(self, steps: CheckpointRange) -> Launch:
        """The launch that trained these steps. Raises UsageError if there are several with different jobs."""
        found = self._launch_at(steps.first)
        for later in self.launches:
            inside = steps.first < later.first_step < steps.last and self._launch_at(later.first_step) is later
            if inside and later.training != found.training:
                raise UsageError(
                    f"{self.folder} was resumed at step {later.first_step} with another job or other fields: verify "
                    f"the steps before and after it apart, as in --steps {later.first_step}:{steps.last}"
                )
        return found

    def _launch_at(self, step: int) -> Launch:
        """The last launch that began at or before the step: a resume runs the steps after its checkpoint again."""
        return next((launch for launch in reversed(self.launches) if launch.first_step <= step), self.launches[0])


def read_recorded_run(folder: str) -> RecordedRun:
    """Read the folder of a run. Raises UsageError if it is none, if the run goes on or trains a graph network, or if
    it has no checkpoint."""
    contents = RunFolderReader(folder).read()
    if contents.has_open_writer:
        raise UsageError(f"the run in {folder} goes on: verify it when it has ended")
    started = [event for event in contents.events if event["kind"] == "run_started"]
    if any("graph" in event for event in started):
        raise UsageError(f"{folder} is a run of culm gnn: culm verify retrains runs of culm run and culm.train")
    checkpoints = tuple(saved_checkpoint_steps(folder))
    if not checkpoints:
        raise UsageError(f"{folder} has no checkpoint to verify: run the job with --out, and --checkpoint-every N")
    if not started:
        raise UsageError(f"{folder}/events.jsonl has no event run_started: the folder is not that of a complete run")
    return RecordedRun(
        folder=folder,
        checkpoints=checkpoints,
        launches=tuple(_launch(event) for event in started),
        exact=all(event.get("exact") is True for event in started),
        pipelines=_most_pipelines(contents.events),
        incomplete_steps=tuple(step.step for step in contents.steps if step.samples_lost or step.samples_duplicated),
        losses={step.step: step.loss for step in contents.steps},
        worker_s_per_step=_step_seconds(contents) * max(int(event.get("nodes") or 1) for event in started),
        summary=contents.summary,
    )


def _launch(event: Mapping[str, Any]) -> Launch:
    overrides = event.get("overrides")
    return Launch(
        first_step=int(event.get("start") or 0),
        reference=str(event.get("job") or ""),
        job_file=str(event.get("job_file") or ""),
        overrides={str(k): str(v) for k, v in overrides.items()} if isinstance(overrides, Mapping) else {},
    )


def _most_pipelines(events: Sequence[Mapping[str, Any]]) -> int:
    """From the launches and from the slots of every epoch: a run may have been reshaped."""
    launched = [int(event.get("pipelines") or 1) for event in events if event["kind"] == "run_started"]
    slots = [slot for event in events if event["kind"] == "epoch" for slot in event.get("slots") or ()]
    return max([*launched, *(int(str(slot).partition(".")[0]) + 1 for slot in slots)])


def _step_seconds(contents: RunContents) -> float:
    times = [step.t for step in contents.steps]
    return statistics.median(max(0.0, b - a) for a, b in pairwise(times)) if len(times) > 1 else 0.0


def choose_steps(run: RecordedRun, asked: CheckpointRange | None) -> CheckpointRange:
    """The steps to retrain: those asked for, or all between the first and the last checkpoint.

    With a single checkpoint they begin at step 0, if that takes at most CHEAP_S. Raises UsageError if steps asked for
    do not begin at step 0 or a checkpoint and end at a checkpoint, and if there is nothing to retrain.
    """
    known = ", ".join(map(str, run.checkpoints))
    if asked is not None:
        if asked.first not in (0, *run.checkpoints) or asked.last not in run.checkpoints:
            raise UsageError(f"--steps {asked}: begin at 0 or a checkpoint and end at one; {run.folder} has {known}")
        return asked
    first, last = run.checkpoints[0], run.checkpoints[-1]
    if last == 0:
        raise UsageError(f"{run.folder} has only the checkpoint of step 0: there are no steps to verify")
    if first < last:
        return CheckpointRange(first, last)
    needed_s = run.worker_s_per_step * last
    if needed_s > CHEAP_S:
        raise UsageError(
            f"{run.folder} has one checkpoint, and retraining from step 0 takes about {needed_s / 60:.0f} min: ask for "
            f"it with --steps 0:{last}, or keep more with --keep-last"
        )
    return CheckpointRange(0, last)


def check_reproducible(run: RecordedRun, steps: CheckpointRange) -> None:
    """Raise UsageError if the bits of these steps depend on more than the job: then a difference proves nothing."""
    if not run.exact and run.pipelines > 1:
        raise UsageError(
            f"{run.folder} was trained by {count_noun(run.pipelines, 'pipeline')} without exact: its gradients were "
            "summed in an order that is not recorded; run the job with --exact to verify it"
        )
    incomplete = [step for step in run.incomplete_steps if steps.first <= step < steps.last]
    if incomplete:
        raise UsageError(
            f"{run.folder} left out or repeated samples in step {incomplete[0]} (strategy drop does): its weights are "
            "not those of the job; verify steps before it with --steps, or use another strategy"
        )


def find_job_reference(launch: Launch, given: str | None) -> str:
    """FILE[:function] of the job: as given with --job, or as recorded. Raises UsageError if there is no such file."""
    if given is not None:
        return given
    if not launch.reference:
        raise UsageError(
            "the run was started with a Job object, which its folder does not contain: put the job into a file and "
            "name it with --job FILE[:function]"
        )
    for reference in (launch.job_file, launch.reference):
        path = reference.partition(":")[0]
        if path and Path(path).is_file():
            return reference
    raise UsageError(
        f"the job file {launch.job_file or launch.reference!r} of the run is not there: name it with --job "
        "FILE[:function]"
    )
