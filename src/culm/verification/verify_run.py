"""`culm.verify`: retrain the steps of a run that has ended, compare every bit, and note the result in its folder."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from culm.errors import UsageError
from culm.job import Job, find_job_file
from culm.observe.writers.run_folder import RunFolder, local_path
from culm.providers.fork_server import JobSource, load_job_source
from culm.verification.recorded_run import (
    CheckpointRange,
    Launch,
    RecordedRun,
    check_reproducible,
    choose_steps,
    find_job_reference,
    read_recorded_run,
)
from culm.verification.verification_result import ProgressCallback, Verification


def verify(
    run: str | os.PathLike[str],
    steps: tuple[int, int] | None = None,
    *,
    job: Job | Callable[[], Job] | str | None = None,
    progress: ProgressCallback = lambda *_: None,
) -> Verification:
    """Retrain a run between its checkpoints in this process and compare all weights and optimizer states, as `culm
    verify` does.

    `run`: folder or URL of a run that has ended. `steps`: (first, last) checkpoint; a first of 0 means the initial
    weights; default: all steps between the first and the last checkpoint. `job`: "FILE[:function]", a Job or a function
    that returns one; default: the job file that the run has recorded. Fields of the job that the run replaced are
    replaced again, unless `job` is a Job or a function. `progress` is called with a text, the steps done and all steps.

    A local folder gets the number of proven steps as `verified` in its summary.json. Generators of random numbers of
    this process keep their states.

    Returns what was found: `equal`, `proven_steps`, `difference`; str() says it in a sentence. Raises UsageError if the
    run cannot be verified, and CheckpointError if the checkpoint of the first step is damaged.
    """
    recorded = read_recorded_run(os.fspath(run))
    chosen = choose_steps(recorded, None if steps is None else _checkpoint_range(steps))
    check_reproducible(recorded, chosen)
    launch = recorded.launch_of(chosen)
    if job is None or isinstance(job, str):
        job = find_job_reference(launch, job)
        find_job_file(job)  # refused before torch is imported
    progress("importing torch and the job", 0, 0)
    from culm.verification.retrain import verify_steps

    with _preserved_generators():
        found = verify_steps(recorded, _load(job, launch), chosen, progress)
    _write_verified(recorded, found)
    return found


def _checkpoint_range(steps: tuple[int, int]) -> CheckpointRange:
    are_numbers = isinstance(steps, tuple) and len(steps) == 2 and all(type(step) is int for step in steps)
    if not are_numbers or not 0 <= steps[0] < steps[1]:
        raise UsageError(f"steps is {steps!r}: use the steps of the first and the last checkpoint, as in (100, 200)")
    return CheckpointRange(*steps)


def _load(job: Job | Callable[[], Job] | str, launch: Launch) -> Job:
    if isinstance(job, str):
        return load_job_source(JobSource(job, launch.overrides, path=tuple(sys.path)))
    found: object = job if isinstance(job, Job) else job()
    if not isinstance(found, Job):
        raise UsageError(f"job is of type {type(found).__name__}: pass a culm.Job or a function that returns one")
    return found


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restore the generators of random numbers, which training seeds."""
    import numpy as np
    import torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _write_verified(run: RecordedRun, found: Verification) -> None:
    """Write the number of proven steps to summary.json: the most of all verifications, and 0 after a difference.

    A run on a URL and a run without a summary are left as they are.
    """
    if run.summary is None or local_path(run.folder) is None:
        return
    before = run.summary.get("verified")
    proven = max(before if isinstance(before, int) else 0, found.proven_steps) if found.difference is None else 0
    RunFolder(run.folder).write_json("summary.json", {**run.summary, "verified": proven})
