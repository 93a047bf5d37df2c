"""The pictures of docs/how-recovery-works.md, drawn from a simulated run. To draw them again:

    python -m benchmarks.resilience.recovery_pictures

Two pipelines of three stages, eight micro-batches, 1F1B; the worker in the middle of the second pipeline is lost after
its second backward. F, I and W take one unit of time each, B two; the nodes of the second pipeline are slightly slower,
so that not everything happens at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.resilience.simulated_pause import STAGES, action_units, prepare_setup

from culm.schedule import Action, Plan, render_svg
from culm.schedule.plan_timing import ActionSpan, Timeline
from culm.testing import Faults
from culm.testing.simulated_cluster import run_prepared

PIPELINES, MICRO_BATCHES_PER_PIPELINE = 2, 4
LOST_NODE, KILL_ACTION, STEP = 4, "1B5", 2
IMAGE_FOLDER = Path(__file__).parents[2] / "docs" / "images"


@dataclass(frozen=True)
class _TimedAction:
    """An action of a node in a step, in virtual time."""

    node: int
    step: int
    action: Action
    start: float
    end: float


def record_run(faults: Faults) -> tuple[list[_TimedAction], float]:
    """All actions of a run that take time, and when a node was lost."""
    actions: list[_TimedAction] = []

    def cost(node: int, step: int, action: str) -> float:
        duration = action_units(action) * (1.0 if node < STAGES else 1.07)
        if duration:
            now = asyncio.get_running_loop().time()
            actions.append(_TimedAction(node, step, Action.parse(action), now, now + duration))
        return duration

    setup, job = prepare_setup("reroute", "1f1b", PIPELINES, MICRO_BATCHES_PER_PIPELINE)
    run = run_prepared(job, setup, faults=faults, cost=cost)
    return actions, next((entry.t for entry in run.history.entries if entry.what == "killed"), float("inf"))


def draw_recovery() -> dict[str, str]:
    """The SVG pictures by file name."""
    failure_free, _ = record_run(Faults())
    disturbed, killed_at = record_run(Faults().kill(LOST_NODE, at=KILL_ACTION, step=STEP))
    step_start = min(each.start for each in failure_free if each.step == STEP)
    before = [each for each in disturbed if each.start < killed_at]
    after = [each for each in disturbed if each.start >= killed_at]
    return {
        "recovery-1-failure-free.svg": _draw_step("failure-free", failure_free, step_start, lambda each: each.end),
        "recovery-2-held.svg": _draw_step(
            "held",
            [each for each in before if each.node != LOST_NODE],
            step_start,
            lambda each: min(each.end, killed_at),
            lost=True,
        ),
        "recovery-3-rest.svg": _draw_step("rest", after, killed_at, lambda each: each.end, lost=True),
        "recovery-4-completed.svg": _draw_step(
            "completed",
            disturbed,
            step_start,
            lambda each: each.end if each.start >= killed_at else min(each.end, killed_at),
        ),
    }


def _draw_step(
    name: str,
    actions: Sequence[_TimedAction],
    origin: float,
    end: Callable[[_TimedAction], float],
    *,
    lost: bool = False,
) -> str:
    """Draw the actions of the hit step, with times relative to `origin`."""
    rows: list[list[ActionSpan]] = [[] for _ in range(PIPELINES * STAGES)]
    for each in actions:
        if each.step == STEP:
            rows[each.node].append(ActionSpan(each.action, each.start - origin, end(each) - origin))
    lists = tuple(tuple(span.action for span in row) for row in rows)
    plan = Plan(
        name, PIPELINES, STAGES, STAGES, PIPELINES * MICRO_BATCHES_PER_PIPELINE, lists, (LOST_NODE,) if lost else ()
    )
    makespan = max(span.end for row in rows for span in row)
    busy = tuple(sum(span.end - span.start for span in row) for row in rows)
    return render_svg(Timeline(plan, makespan, tuple(map(tuple, rows)), busy))


def main() -> None:
    torch.set_num_threads(1)
    for name, picture in draw_recovery().items():
        (IMAGE_FOLDER / name).write_text(picture)
        print(IMAGE_FOLDER / name)


if __name__ == "__main__":
    main()
