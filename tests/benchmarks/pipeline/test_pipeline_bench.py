from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest
from benchmarks.pipeline.pipeline_bench import (
    FULL,
    PROBES,
    QUICK,
    PipelineResult,
    available_core_count,
    describe_machine,
    render_table,
    run,
)
from benchmarks.pipeline.rank_processes import TorchUnavailable
from rich.console import Console

from culm.errors import CulmError, PlanError, RunError, ScheduleError, UsageError

if TYPE_CHECKING:
    from benchmarks.common.gpt_job import GPTSpec, StageCut


class Fake:
    """A factory and its pipelines: every step takes the same time, and open pipelines are counted."""

    def __init__(self, step_s: float, *, refuses: str = "", fails: bool = False) -> None:
        self.step_s, self.refuses, self.fails = step_s, refuses, fails
        self.made: list[tuple[str, str, int]] = []
        self.open = 0
        self.steps: list[int] = []

    def __call__(self, spec: GPTSpec, stages: StageCut, schedule: str) -> Fake:
        if schedule == self.refuses:
            raise TorchUnavailable("torch cannot run this pipeline: it says no")
        self.made.append((spec.name, schedule, len(stages)))
        self.open += 1
        return self

    def run_round(self, steps: int) -> float:
        if self.fails:
            raise RunError("rank 1 died")
        self.steps.append(steps)
        return steps * self.step_s

    def close(self) -> None:
        self.open -= 1


def quick(culm: Fake, torch: Fake, **options: object) -> PipelineResult:
    return run(culm=culm, torch=torch, quick=True, **options)  # type: ignore[arg-type]


def test_every_job_depth_and_schedule_is_a_row_with_at_least_twenty_rounds() -> None:
    culm, torch = Fake(0.1), Fake(0.12)
    result = run(culm=culm, torch=torch)
    asked = {(j, s, p) for j in ("large", "small") for p in (2, 4, 8) for s in ("gpipe", "1f1b", "zb")}
    assert {(row["job"], row["schedule"], row["stages"]) for row in result["rows"]} == asked
    assert set(culm.made) == set(torch.made) == asked
    assert all(row["rounds"] >= 20 for row in result["rows"])
    assert (culm.open, torch.open) == (0, 0)


def test_a_row_holds_seconds_per_step_and_the_ratio_of_torch_to_culm() -> None:
    [row] = quick(Fake(0.1), Fake(0.15), stages=[2], schedules=["1f1b"])["rows"]
    assert row["culm"] == pytest.approx(0.1)
    assert row["torch"] == pytest.approx(0.15)
    assert row["ratio"] == pytest.approx(1.5)
    assert row["ci"] == pytest.approx([1.5, 1.5])
    assert (row["micro_batches"], row["stages"], row["schedule"]) == (8, 2, "1f1b")


def test_the_result_has_the_documented_json_keys() -> None:
    result = json.loads(json.dumps(quick(Fake(0.1), Fake(0.15), stages=[2, 4], schedules=["gpipe"])))
    assert result.keys() >= {"rows", "ratio_median", "exact_cost", "us_per_action", "cores", "workers"}
    names = {"job", "schedule", "stages", "micro_batches", "culm", "torch", "ratio", "ci", "rounds", "cores"}
    assert all(row.keys() == names for row in result["rows"])
    assert result["ratio_median"] == pytest.approx(1.5)
    assert (result["workers"], result["cores"]) == (4, available_core_count())


def test_steps_of_a_round_follow_the_speed_of_the_sides() -> None:
    culm = Fake(0.01)
    quick(culm, Fake(0.02), stages=[2], schedules=["gpipe"])
    assert culm.steps[-1] == round(0.3 / 0.015)


def test_a_row_that_torch_refuses_has_the_reason_and_the_others_are_measured() -> None:
    culm, torch = Fake(0.1), Fake(0.1, refuses="zb")
    result = quick(culm, torch, stages=[2], schedules=["zb", "gpipe"])
    missing, measured = result["rows"]
    assert missing["unavailable"].endswith("it says no")
    assert (missing["ratio"], missing["ci"], missing["rounds"]) == (None, None, 0)
    assert measured["ratio"] == result["ratio_median"] == 1.0
    assert "it says no" in rendered(result)
    assert culm.open == 0


def test_a_side_that_ends_ends_the_bench_and_both_sides_are_closed() -> None:
    culm, torch = Fake(0.1), Fake(0.1, fails=True)
    with pytest.raises(RunError, match="rank 1 died"):
        quick(culm, torch)
    assert (culm.open, torch.open) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"stages": [2, 17]}, PlanError, "stages is 17"),
        ({"schedules": ["gpipe", "dualpipe"]}, ScheduleError, "'dualpipe'"),
        ({"stages": []}, UsageError, "empty"),
    ],
)
def test_an_invalid_request_is_refused_before_anything_starts(
    wrong: dict[str, list[object]], error: type[CulmError], says: str
) -> None:
    culm, torch = Fake(0.1), Fake(0.1)
    with pytest.raises(error, match=says):
        quick(culm, torch, **wrong)
    assert culm.made == torch.made == []


def test_interleaved_rows_cut_the_model_into_two_stages_a_worker() -> None:
    culm = Fake(0.1)
    result = quick(culm, Fake(0.1), stages=[4], schedules=["interleaved"])
    assert set(culm.made) == {("small", "interleaved", 8)}
    assert result["rows"][0]["stages"] == 4


def test_probes_fill_the_figures_beside_the_rows() -> None:
    figures = {name: 0.25 * number for number, name in enumerate(PROBES, 1)}
    probes = {name: (lambda value=value: value) for name, value in figures.items()}
    result = quick(Fake(0.1), Fake(0.1), stages=[2], schedules=["gpipe"], probes=probes)
    assert (result["exact_cost"], result["us_per_action"]) == (0.25, 0.5)


def test_fewer_cores_than_workers_give_a_warning() -> None:
    assert "fewer cores than workers" in describe_machine(2, 8)
    assert describe_machine(8, 8) == "8 cores for up to 8 workers, one thread each"


def test_progress_reports_the_machine_first_and_then_every_row() -> None:
    lines: list[str] = []
    quick(Fake(0.1), Fake(0.15), stages=[2], schedules=["gpipe", "zb"], progress=lines.append)
    assert lines[0] == describe_machine(available_core_count(), 2)
    assert lines[1:] == [f"small {s}, 2 stages: torch / culm 1.500 (1.500 to 1.500)" for s in ("gpipe", "zb")]


def test_the_table_shows_the_figures_of_the_rows_and_their_median() -> None:
    shown = rendered(quick(Fake(0.1), Fake(0.15), stages=[2], schedules=["1f1b"]))
    for text in ("small", "1f1b", "0.1000", "0.1500", "1.500 to 1.500", "median", f"{available_core_count()} cores"):
        assert text in shown


def test_the_full_bench_covers_both_jobs() -> None:
    assert [spec.name for spec in FULL.jobs] == ["large", "small"]


def rendered(result: PipelineResult) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render_table(result))
    return out.getvalue()


def test_both_sides_are_restarted_within_a_row() -> None:
    culm, torch = Fake(0.1), Fake(0.1)
    [row] = quick(culm, torch, stages=[2], schedules=["1f1b"])["rows"]
    assert len(culm.made) == len(torch.made) == QUICK.starts
    assert row["rounds"] == QUICK.rounds
