"""`culm down`: end the run and every machine of a launch."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.launching.head_launch import end_on_head
from culm.errors import RunError, UsageError
from culm.machines.head_registry import forget_head_launch, known_head_launches
from culm.machines.launch_registry import FoundLaunch, find_launches, is_registered, known_launches
from culm.machines.machine_fleet import tear_down
from culm.providers.supervisor.run_registry import find_job
from culm.providers.supervisor.run_window import stop_job
from culm.runtime.clock import RealClock


def down(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Name of the job or of the launch.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything that was launched from this machine.")] = False,
    now: Annotated[bool, typer.Option("--now", help="End a run at once, without a checkpoint.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Leave the list, also if the engine does not confirm that nothing is left.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """End a launch: its run, with a checkpoint, and everything that was started for it. May be repeated."""
    with report_errors(debug=debug):
        if (job is None) == (not all_):
            raise UsageError("name a job, or give --all: culm list shows what is launched")
        heads = [each for each in known_head_launches() if job in (None, each.job, each.launch)]
        launches = known_launches() if job is None else find_launches(job) if not heads else []
        if not launches and not heads:
            print("nothing is launched from this machine")
        left = [launch for launch in launches if not asyncio.run(_end(launch, at_once=now))]
        left_on_heads = [head for head in heads if not end_on_head(head, at_once=now)]
        if forget:
            for launch in left:
                launch.forget()
                _print_line(
                    f"{launch.record.job} is forgotten: look for what carries the name {launch.record.order.launch}"
                )
            for head in left_on_heads:
                forget_head_launch(head)
                _print_line(f"{head.job} is forgotten: it may go on on {head.head}")
            return
        failed = [*(launch.record.job for launch in left), *(head.job for head in left_on_heads)]
        if failed:
            raise RunError(
                f"machines may be left of {', '.join(failed)}: repeat culm down when the engine answers, or add "
                "--forget if it is gone"
            )


async def _end(launch: FoundLaunch, *, at_once: bool) -> bool:
    """End a launch. Returns whether nothing is left."""
    name = launch.record.job
    if launch.is_supervised:
        try:
            ended = await stop_job(find_job(name), at_once=at_once, on_line=_print_line)
            _print_line(ended.stopped or "the job has ended")
        except (RunError, UsageError):
            pass  # it has just ended, or its supervisor does not answer: end its machines in any case
    if is_registered(launch.folder):  # otherwise its supervisor has ended everything of it
        try:
            await tear_down(launch.open_provider(), RealClock(), _print_line)
        except (RunError, UsageError) as error:
            _print_line(f"{name}: {error}")
            return False
        launch.forget()
    _print_line(f"nothing of {name} ({launch.record.order.launch} on {launch.record.order.provider}) is left")
    return True


def _print_line(text: str) -> None:
    print(f"culm: {text}", flush=True)
