"""The cells of `culm bench pipeline --schedules planned`, with sides that take a fixed time."""

from __future__ import annotations

import io
from typing import Any

import pytest
from benchmarks.common.gpt_job import SMALL_GPT
from benchmarks.pipeline.pipeline_bench import QUICK
from benchmarks.pipeline.planned_bench import describe_row, list_cells, measure_cell, render_table
from benchmarks.pipeline.rank_processes import TorchUnavailable
from benchmarks.pipeline.torch_rank import stages_of_rank
from rich.console import Console

from culm.cli.checks.bench_command import PipelineRows
from culm.errors import UsageError

STEP_S = {"planned": 0.10, "1f1b": 0.14, "zb": 0.12, "interleaved": 0.11}


class FixedSide:
    """Every step of a schedule takes the same time."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def run_round(self, steps: int) -> float:
        return steps * self.step_s

    def close(self) -> None:
        pass


def open_side(spec: Any, cut: Any, schedule: str, *, max_activations: int | None = None) -> FixedSide:
    assert (max_activations is not None) == (schedule == "planned"), (
        "only planned is limited: the others are as they are"
    )
    if schedule == "zbv":
        raise TorchUnavailable("it says no")
    assert len(cut) == (8 if schedule == "interleaved" else 4)
    return FixedSide(STEP_S[schedule])


def test_a_cell_compares_planned_with_every_other_schedule_and_with_the_bound() -> None:
    (cell,) = list_cells(SMALL_GPT, [4], [16], [True])
    row = measure_cell(cell, QUICK, open_side, open_side, bound_s=0.096)
    assert (row["stages"], row["micro_batches"], row["clip_norm"], row["max_activations"]) == (4, 16, True, 5)
    assert row["of_bound"] == pytest.approx(0.96)
    assert row["ratios"] == pytest.approx(
        {"culm 1f1b": 1.4, "culm zb": 1.2, "torch 1f1b": 1.4, "torch interleaved": 1.1}
    )
    assert row["of_torch_best"] == pytest.approx(1.1)
    assert row["unavailable"] == {"torch zbv": "it says no"}
    assert "torch's best / planned 1.100, 0.960 of a step without bubbles" in describe_row(row)
    out = io.StringIO()
    Console(file=out, width=140).print(render_table({"planned": [row], "cores": 16, "workers": 4}))
    for text in ("planned, 5 kept", "0.0960", "torch interleaved", "1.100", "it says no"):
        assert text in out.getvalue()


def test_a_cell_for_every_depth_number_of_micro_batches_and_clipping() -> None:
    cells = list_cells(SMALL_GPT, [4, 8], [8, 16, 32], [False, True])
    assert len({(cell.stages, cell.spec.micro_batches, cell.spec.clip_norm) for cell in cells}) == 12
    with pytest.raises(UsageError, match="name at least one of each"):
        list_cells(SMALL_GPT, [], [8], [True])


def test_zbv_places_two_stages_on_a_rank_one_on_the_way_back() -> None:
    assert [stages_of_rank(rank, 4, 8, "zbv") for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert stages_of_rank(1, 4, 8, "interleaved") == [1, 5]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"rounds": 0}, "--rounds is 0"),
        ({"schedules": ("zbh2",)}, "--schedules has 'zbh2'"),
        ({"micro_batches": (8,)}, "add --schedules planned"),
    ],
)
def test_rows_that_do_not_exist_are_refused(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PipelineRows(**rows)
