"""Launch a run from the command line: supervisor, signals, progress display, output of user code."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING, Any

from culm.cli.signal_handling import run_until_signal
from culm.providers.execute_run import execute_run
from culm.providers.graceful_stop import GracefulStop, interrupted_message
from culm.providers.supervisor.run_registry import registry_name
from culm.providers.supervisor.run_window import END_TIMEOUT_S, SupervisorClient
from culm.providers.supervisor.window_messages import StartRun

if TYPE_CHECKING:
    from culm.cli.progress_display import ProgressDisplay
    from culm.machines.launch_order import LaunchOrder
    from culm.providers.execute_run import RunResources
    from culm.providers.fork_server import JobSource
    from culm.providers.local_provider import ForkServerClient


def launch_run(
    source: JobSource,
    resources: RunResources,
    display: ProgressDisplay,
    *,
    stdout_fd: int = 1,
    fork_server: ForkServerClient | None = None,
    launch: LaunchOrder | None = None,
    end_timeout_s: float = END_TIMEOUT_S,
) -> dict[str, Any]:
    """Run a job to its end and return the fields of summary.json. Nothing is left running afterwards.

    The run is executed by a supervisor process; this process only shows it. With a `fork_server` the run is executed in
    this process, and the fork server is left open. Output of user code goes through a display that redraws, else to the
    descriptor `stdout_fd`. Ctrl-C or SIGTERM ends the run at the next step boundary, with a checkpoint if it has a
    folder; the second one ends it at once, within `end_timeout_s`. `launch`: machines to start for the run. Raises the
    error that ended the run, and Interrupted after a signal.
    """
    with contextlib.closing(display):
        display.show_progress("importing torch and the job", 0, 0)
        if fork_server is not None:
            return _launch_in_process(fork_server, source, resources, display)
        with SupervisorClient(
            stdout=stdout_fd, captures_output=display.redraws, end_timeout_s=end_timeout_s
        ) as supervisor:
            running = supervisor.execute_run(
                _start_message(source, resources, launch=launch),
                display,
                on_notice=display.show_event,
                on_output=display.print_line,
            )
            return run_until_signal(running, lambda _: interrupted_message(resources.config.out), supervisor.interrupt)


def launch_detached(
    source: JobSource, resources: RunResources, display: ProgressDisplay, *, launch: LaunchOrder | None = None
) -> str:
    """Start a run that goes on when this process has ended. Returns its name when everything is decided. Raises the
    error that ended it before that, and Interrupted after a signal."""
    with contextlib.closing(display):
        display.show_progress("importing torch and the job", 0, 0)
        none = subprocess.DEVNULL  # a reader of this command's output must not wait for the run
        with SupervisorClient(stdout=none, stderr=none, captures_output=True) as supervisor:
            message = _start_message(source, resources, detached=True, launch=launch)
            starting = supervisor.start_detached(message, display)
            return run_until_signal(starting, lambda _: "interrupted before the run has started")


def _start_message(
    source: JobSource, resources: RunResources, *, detached: bool = False, launch: LaunchOrder | None = None
) -> StartRun:
    config = resources.config
    name = registry_name(config.job_name if launch is None else launch.job, source.reference)
    return StartRun(source, config, name, detached=detached, launch=launch)


def _launch_in_process(
    fork_server: ForkServerClient, source: JobSource, resources: RunResources, display: ProgressDisplay
) -> dict[str, Any]:
    graceful_stop = GracefulStop(display.show_event)

    async def main() -> dict[str, Any]:
        return await execute_run(
            fork_server, source, resources, display, on_cancelled=fork_server.kill, graceful_stop=graceful_stop
        )

    return run_until_signal(main(), lambda _: interrupted_message(resources.config.out), graceful_stop.request)
