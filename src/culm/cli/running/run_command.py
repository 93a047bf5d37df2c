"""`culm run`: train a job and show its progress."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from culm.cli.config_options import Losses, build_config, with_config_options
from culm.cli.error_reporting import report_errors
from culm.cli.option_values import parse_assignments
from culm.cli.progress_display import make_console, make_display
from culm.cli.run_tables import summary_table
from culm.cli.running.run_launcher import launch_detached, launch_run
from culm.errors import UsageError
from culm.job import find_job_file, import_root, parse_overrides
from culm.observe.writers.run_folder import to_plain_json
from culm.providers.execute_run import find_resources
from culm.providers.fork_server import JobSource
from culm.strategies.registry import add_search_folders

Number = int | None


@with_config_options()
def run(
    file: Annotated[str, typer.Argument(metavar="FILE[:function]", help="A Python file with job() -> culm.Job.")],
    exact: Annotated[bool, typer.Option("--exact", help="Bit for bit the same for any number of pipelines.")] = False,
    steps: Annotated[Number, typer.Option(help="Replaces Job.steps.")] = None,
    seed: Annotated[Number, typer.Option(help="Replaces Job.seed.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Replaces Job.FIELD.")] = None,
    losses: Losses = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the run has started: see culm attach.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only errors and the output of the job.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    **options: Any,
) -> None:
    """Train a job on nodes of this machine, a process each, or on several machines."""
    with report_errors(debug=debug):
        config = build_config(options, losses)
        overrides = job_overrides(set_ or [], steps=steps, seed=seed, exact=exact or None)
        job_file = find_job_file(file)
        add_search_folders(import_root(job_file), job_file.parent)  # --strategy module:Class
        parse_overrides(overrides)
        resources = find_resources(config, file)
        console = make_console(stderr=json_)
        source = JobSource(reference=file, overrides=overrides, path=tuple(sys.path))
        display = make_display(console, quiet=quiet)
        if detach:
            name = launch_detached(source, resources, display)
            print(json.dumps({"job": name}) if json_ else detached_words(name))
            return
        summary = launch_run(source, resources, display, stdout_fd=2 if json_ else 1)
        if not quiet:
            console.print(summary_table(summary, resources.config.out))
        if json_:
            print(json.dumps(to_plain_json(summary)))


def detached_words(name: str) -> str:
    """What to do with a run that goes on in the background."""
    return (
        f"job {name} runs in the background: culm attach {name} shows it, culm logs -f {name} prints its log, "
        f"culm stop {name} ends it with a checkpoint"
    )


def job_overrides(given: list[str], **options: int | None) -> dict[str, str]:
    """Replaced fields of the job, from --set and from options of their own."""
    found = parse_assignments(given)
    for name, value in options.items():
        if value is not None and name in found:
            raise UsageError(f"--{name} and --set {name}={found[name]} are both given: leave one out")
        found |= {name: str(value)} if value is not None else {}
    return found
