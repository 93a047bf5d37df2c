"""`culm agent`: provide a node of this machine to a run that was started elsewhere."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from culm.cli.config_options import build_config, with_config_options
from culm.cli.error_reporting import report_errors
from culm.cluster.agent.preemption_notice import NOTICE_SOURCES
from culm.config import JoinOptions
from culm.errors import UsageError
from culm.machines.machine_provider import MACHINE_VARIABLE
from culm.providers.fork_server import GRACE_S
from culm.providers.process_title import set_process_title
from culm.training import join

DEFAULT_IDLE_S = 600.0
_FIRST = ("join", "job_name", "etcd")
JOIN_FIELDS = (*_FIRST, *(name for name in JoinOptions.__annotations__ if name not in _FIRST))


@with_config_options(JOIN_FIELDS)
def agent(
    zone: Annotated[str, typer.Option(help="Zone of this machine: layers are spread over zones.")] = "",
    notice: Annotated[str, typer.Option(help=f"Source of preemption notices: {', '.join(NOTICE_SOURCES)}.")] = "none",
    grace: Annotated[float, typer.Option(help="Seconds to hand over after SIGTERM.")] = GRACE_S,
    wait: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for the job, or inf; default: 600, or 0 if there are other jobs."),
    ] = None,
    machine: Annotated[
        str, typer.Option(envvar=MACHINE_VARIABLE, help="Id of this machine at the provider that started it.")
    ] = "",
    rented_at: Annotated[
        float | None, typer.Option(metavar="UNIX_TIME", help="Since when it is rented; default: since it registers.")
    ] = None,
    abandon_after: Annotated[
        float | None, typer.Option(help="Give up after this many seconds without a sign of the run; default: never.")
    ] = None,
    idle_timeout: Annotated[
        float, typer.Option(help="Leave when the node has had no slot for this many seconds; 0: wait on.")
    ] = DEFAULT_IDLE_S,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    **options: Any,
) -> None:
    """Join the run of a job from this machine, and rejoin after every loss, until the run has ended."""
    with report_errors(debug=debug):
        config = build_config(options)
        set_process_title("agent", config.job_name or "")  # the command line may contain a token
        if abandon_after is not None and not abandon_after > 0:
            raise UsageError(f"--abandon-after is {abandon_after:g}: use a number of seconds above 0")
        if wait is not None and not wait >= 0:
            raise UsageError(f"--wait is {wait:g}: use a number of seconds, 0 or more, or inf")
        join(
            config,
            zone=zone,
            notice_source=notice,
            grace=grace,
            wait_s=wait,
            machine=machine,
            rented_at=rented_at,
            abandon_after_s=abandon_after,
            idle_timeout_s=idle_timeout,
            on_line=_print_line,
            on_job=lambda name: set_process_title("agent", name),
        )


def _print_line(sentence: str) -> None:
    print(f"culm: {sentence}", flush=True)
