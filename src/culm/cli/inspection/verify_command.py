"""`culm verify`: prove a finished run by retraining it between its checkpoints."""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import ProgressDisplay, make_console, make_display
from culm.errors import UsageError
from culm.job import find_job_file
from culm.observe.writers.run_folder import RunFolder, local_path
from culm.text_format import count_noun
from culm.verify.recorded_run import (
    CheckpointRange,
    RecordedRun,
    check_reproducible,
    choose_steps,
    find_job_reference,
    read_recorded_run,
)

if TYPE_CHECKING:
    from culm.verify.retrain import Verification


def verify(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run that has ended.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Retrain from checkpoint A (0: initial weights) to checkpoint B.")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="FILE[:function]", help="The job; default: as recorded in RUN.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Retrain a run between its checkpoints in one process and compare all weights and optimizer states.

    Exit code 0: equal to the last bit; 1: different; 2: the run cannot be verified.
    """
    with report_errors(debug=debug):
        interval = None if steps is None else _parse_steps(steps)
        run = read_recorded_run(folder)
        chosen = choose_steps(run, interval)
        check_reproducible(run, chosen)
        launch = run.launch_of(chosen)
        reference = find_job_reference(launch, job)
        find_job_file(reference)
        display = make_display(make_console(stderr=True), quiet=False)
        try:
            with redirect_stdout(sys.stderr):  # stdout is only for the result
                found = _verify_run(run, reference, launch.overrides, chosen, display)
        finally:
            display.close()
        _write_verified(run, found)
        print(json.dumps(found.to_fields()) if json_ else result_sentence(found))
        if found.difference is not None:
            raise typer.Exit(1)


def _parse_steps(text: str) -> CheckpointRange:
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"--steps {text!r} is not a range: write the first and the last checkpoint, as in 100:200")
    return CheckpointRange(int(match[1]), int(match[2]))


def _verify_run(
    run: RecordedRun, reference: str, overrides: dict[str, str], steps: CheckpointRange, display: ProgressDisplay
) -> Verification:
    display.show_progress("importing torch and the job", 0, 0)
    from culm.providers.fork_server import JobSource, load_job_source
    from culm.verify.retrain import verify_steps

    job = load_job_source(JobSource(reference, overrides, path=tuple(sys.path)))
    return verify_steps(run, job, steps, display.show_progress)


def _write_verified(run: RecordedRun, found: Verification) -> None:
    """Write the number of proven steps to summary.json: the most of all verifications, and 0 after a difference.

    A run on a URL and a run without a summary are left as they are.
    """
    if run.summary is None or local_path(run.folder) is None:
        return
    before = run.summary.get("verified")
    proven = max(before if isinstance(before, int) else 0, found.proven_steps) if found.difference is None else 0
    RunFolder(run.folder).write_json("summary.json", {**run.summary, "verified": proven})


def result_sentence(found: Verification) -> str:
    """The result for people."""
    if found.difference is None:
        return (
            f"equal: {count_noun(found.proven_steps, 'step')} retrained ({found.steps}), weights and optimizer state "
            f"of {count_noun(found.layers, 'layer')} are the same bits"
        )
    at = found.difference
    damage = "" if found.damage is None else f"; {found.damage}"
    if at.what == "file":
        return f"different: the checkpoint of step {at.step} cannot be compared{damage}"
    if at.layer is None:
        return f"different: {at.what} in summary.json is not the digest of step {at.step}, whose checkpoint is equal"
    loss = "all losses are equal" if at.loss_step is None else f"the loss first differs in step {at.loss_step}"
    proven = f"{found.steps.first}:{at.after} is equal, " if at.after > found.steps.first else ""
    return (
        f"different: layer {at.layer}, {at.what} ({at.tensor}), in steps {at.after}:{at.step}; {proven}{loss}{damage}"
    )
