"""End launches from the machine that started them: their runs, and everything that was started for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from culm.errors import RunError, UsageError
from culm.machines.head_registry import HeadLaunch, forget_head_launch, known_head_launches
from culm.machines.launch_registry import FoundLaunch, find_launches, is_registered, known_launches
from culm.machines.machine_fleet import tear_down
from culm.machines.remote_head import list_on_head
from culm.providers.supervisor.run_registry import find_job
from culm.providers.supervisor.run_window import stop_job
from culm.runtime.clock import RealClock

RunOnHead: TypeAlias = Callable[[HeadLaunch, Sequence[str]], int]
"""Runs a command of culm on a head and returns its exit code."""


async def end_launches(
    job: str | None, *, at_once: bool, forget: bool, on_line: Callable[[str], None], run_on_head: RunOnHead
) -> None:
    """End the launches with this name or of this job; None: all of this machine. `on_line` is called with sentences.

    `at_once`: end a run without a checkpoint. `forget`: remove a launch from the registry also if its engine does not
    confirm that nothing is left. Raises UsageError if there is no such launch, and RunError if machines may be left.
    """
    heads = [each for each in known_head_launches() if job in (None, each.job, each.launch)]
    launches = known_launches() if job is None else find_launches(job) if not heads else []
    if not launches and not heads:
        on_line("nothing is launched from this machine")
    left = [launch for launch in launches if not await _end(launch, at_once=at_once, on_line=on_line)]
    left_on_heads = [
        head
        for head in heads
        if not await asyncio.to_thread(_end_on_head, head, at_once=at_once, on_line=on_line, run_on_head=run_on_head)
    ]
    if forget:
        for launch in left:
            launch.forget()
            on_line(f"{launch.record.job} is forgotten: look for what carries the name {launch.record.order.launch}")
        for head in left_on_heads:
            forget_head_launch(head)
            on_line(f"{head.job} is forgotten: it may go on on {head.head}")
        return
    failed = [*(launch.record.job for launch in left), *(head.job for head in left_on_heads)]
    if failed:
        raise RunError(
            f"machines may be left of {', '.join(failed)}: repeat culm down when the engine answers, or add --forget "
            "if it is gone"
        )


async def _end(launch: FoundLaunch, *, at_once: bool, on_line: Callable[[str], None]) -> bool:
    """End a launch. Returns whether nothing is left."""
    name = launch.record.job
    if launch.is_supervised:
        try:
            ended = await stop_job(find_job(name), at_once=at_once, on_line=on_line)
            on_line(ended.stopped or "the job has ended")
        except (RunError, UsageError):
            pass  # it has just ended, or its supervisor does not answer: end its machines in any case
    if is_registered(launch.folder):  # otherwise its supervisor has ended everything of it
        try:
            await tear_down(launch.open_provider(), RealClock(), on_line)
        except (RunError, UsageError) as error:
            on_line(f"{name}: {error}")
            return False
        launch.forget()
    on_line(f"nothing of {name} ({launch.record.order.launch} on {launch.record.order.provider}) is left")
    return True


def _end_on_head(head: HeadLaunch, *, at_once: bool, on_line: Callable[[str], None], run_on_head: RunOnHead) -> bool:
    """End a launch on its head. Returns whether nothing is left."""
    try:
        if list_on_head(head) is not None and run_on_head(head, ["down", head.launch, *["--now"] * at_once]) != 0:
            return False
    except RunError as error:
        on_line(f"{head.job}: {error}")
        return False
    forget_head_launch(head)
    on_line(f"nothing of {head.job} ({head.launch}) is left on {head.head}")
    return True
