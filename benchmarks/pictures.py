"""The pictures of docs/how-recovery-works.md, made from a simulated run: `python -m benchmarks.pictures`.

Two pipelines of three stages, eight micro-batches, 1F1B; the worker in the middle of the second pipeline is lost when
it has run its second backward. F, I and W take one unit of time each, B two; the machines of the second pipeline are a
little slower, so that not everything happens at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pause import STAGES, prepared, units
from culm.schedule import Action, Plan, svg
from culm.schedule.timing import Span, Timeline
from culm.testing import Faults
from culm.testing.cluster import enact

PIPELINES, EACH = 2, 4
VICTIM, AT, STEP = 4, "1B5", 2
FOLDER = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True)
class _Done:
    """An action of a node in a step, in virtual time."""

    node: int
    step: int
    action: Action
    start: float
    end: float


def record(faults: Faults) -> tuple[list[_Done], float]:
    """All actions of a run that take time, and when a node was lost."""
    done: list[_Done] = []

    def cost(node: int, step: int, action: str) -> float:
        taken = units(action) * (1.0 if node < STAGES else 1.07)
        if taken:
            now = asyncio.get_running_loop().time()
            done.append(_Done(node, step, Action.parse(action), now, now + taken))
        return taken

    setup, job = prepared("reroute", "1f1b", PIPELINES, EACH)
    run = enact(job, setup, faults=faults, cost=cost)
    return done, next((entry.t for entry in run.history.entries if entry.what == "killed"), float("inf"))


def pictures() -> dict[str, str]:
    """By file name: SVG."""
    calm, _ = record(Faults())
    hurt, killed = record(Faults().kill(VICTIM, at=AT, step=STEP))
    began = min(one.start for one in calm if one.step == STEP)
    before = [one for one in hurt if one.start < killed]
    after = [one for one in hurt if one.start >= killed]
    return {
        "recovery-1-undisturbed.svg": _picture("undisturbed", calm, began, lambda one: one.end),
        "recovery-2-held.svg": _picture(
            "held", [one for one in before if one.node != VICTIM], began, lambda one: min(one.end, killed), lost=True
        ),
        "recovery-3-rest.svg": _picture("rest", after, killed, lambda one: one.end, lost=True),
        "recovery-4-completed.svg": _picture(
            "completed", hurt, began, lambda one: one.end if one.start >= killed else min(one.end, killed)
        ),
    }


def _picture(
    name: str, done: Sequence[_Done], began: float, end: Callable[[_Done], float], *, lost: bool = False
) -> str:
    """The hit step alone, from its beginning or from the loss on."""
    rows: list[list[Span]] = [[] for _ in range(PIPELINES * STAGES)]
    for one in done:
        if one.step == STEP:
            rows[one.node].append(Span(one.action, one.start - began, end(one) - began))
    lists = tuple(tuple(span.action for span in row) for row in rows)
    plan = Plan(name, PIPELINES, STAGES, STAGES, PIPELINES * EACH, lists, (VICTIM,) if lost else ())
    makespan = max(span.end for row in rows for span in row)
    busy = tuple(sum(span.end - span.start for span in row) for row in rows)
    return svg(Timeline(plan, makespan, tuple(map(tuple, rows)), busy))


def main() -> None:
    torch.set_num_threads(1)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
