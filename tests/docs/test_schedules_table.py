"""The shares in docs/schedules.md are those of culm's schedules. The column of torch's ZBV is not computed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from culm.plan.replan.planned_schedule import StepShape, plan_step
from culm.plan.replan.two_range_schedule import TwoRanges
from culm.schedule import Costs, generate_plan, time_plan

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
HALF = Costs(forward=0.5, input=0.5, weight=0.5)


def rows() -> list[list[str]]:
    """The cells of the table: stages, micro-batches, and a share for each schedule."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| [48] \| [0-9]+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def planned_share(stages: int, micro_batches: int, kept: int, *, clip_norm: bool) -> float:
    shape = StepShape(
        pipelines=1,
        stages=stages,
        micro_batches=micro_batches,
        costs=Costs(),
        max_activations=(kept,) * stages,
        staggered=not clip_norm,
        two_ranges=TwoRanges(costs=HALF, activation=(1,) * (2 * stages), room=(2 * kept,) * stages),
    )
    return 3 * micro_batches / plan_step(shape).step_s


def simple_share(name: str, stages: int, micro_batches: int) -> float:
    plan = generate_plan(name, pipelines=1, stages=stages, micro_batches=micro_batches)
    return 3 * micro_batches / time_plan(plan, HALF if name == "interleaved" else Costs()).makespan


@pytest.mark.parametrize("row", rows(), ids=lambda row: " x ".join(row[:2]))
def test_the_shares_are_those_of_the_schedules(row: list[str]) -> None:
    stages, micro_batches = int(row[0]), int(row[1])
    computed = [simple_share(name, stages, micro_batches) for name in ("1f1b", "interleaved")]
    for clip_norm in (False, True):
        computed += [
            planned_share(stages, micro_batches, kept, clip_norm=clip_norm) for kept in (stages, 3 * stages // 2)
        ]
    written = [*row[2:4], *row[5:]]
    assert written == [f"{share:.1%}".replace("%", " %") for share in computed]


def test_every_cell_is_there() -> None:
    assert [(int(row[0]), int(row[1])) for row in rows()] == [(P, M) for P in (4, 8) for M in (8, 16, 32)]
