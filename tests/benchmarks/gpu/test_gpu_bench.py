"""`culm bench gpu`, on the CPU with a tiny job: every kind of row runs, and rows are chosen and combined."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from benchmarks.common.gpt_job import GPTSpec
from benchmarks.gpu.gpu_bench import (
    GPT_406M,
    GpuResult,
    GpuRow,
    balanced_cut,
    render_table,
    run,
    sharing_of_gpus,
)
from rich.console import Console

from benchmarks.gpu import gpu_bench
from culm.errors import UsageError

TINY = GPTSpec(name="tiny", width=16, tokens=8, blocks=4, heads=2, vocab=32, micro_batch=2, items=32, precision="bf16")


def row_of(name: str, *, plain: float | None = None, stages: int = 2, schedule: str = "1f1b") -> GpuRow:
    return GpuRow(
        name=name,
        job="tiny",
        pipelines=1,
        stages=stages,
        schedule=schedule,
        strategy="none",
        micro_batches=8,
        peer="torch 1f1b",
        culm=1.0,
        torch=None if plain else 2.0,
        plain=plain,
        ratio=2.0,
        ci=[1.5, 2.5],
        rounds=6,
        bubble_bound=None,
        slowest_stage=1.0,
        device="CPU",
        devices=1,
        sharing="",
        memory={},
    )


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_each_kind_of_row_runs_on_the_cpu() -> None:
    said: list[str] = []
    names = ["plain", "1f1b-2", "2x2", "reroute", "pause-reroute"]
    found = run(rows=names, device="cpu", quick=True, rounds=2, spec=TINY, losses=1, progress=said.append)
    plain, pipeline, several = found["rows"]
    assert [row["peer"] for row in found["rows"]] == ["plain loop", "torch 1f1b", "torch 1f1b + DDP"]
    assert plain["torch"] is None
    for row in (pipeline, several):
        assert row["culm"] > 0
        assert row["torch"]
        assert row["rounds"] == 2
        assert row["plain"] == plain["plain"]
        assert row["bubble_bound"]
    assert list(found["overhead"]) == ["reroute"]
    pause = found["pause_s"]["reroute"]
    assert pause["preemptions"] == len(pause["pauses"]) == 1
    assert pause["bit_identical"]
    assert pause["reduce"] == ["gloo"]
    assert found["device"] == "CPU"
    assert len(said) == len(names)
    assert json.loads(json.dumps(found)) == found


def test_rows_measured_one_at_a_time_are_combined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(name: str, *_: object) -> GpuResult:
        row = row_of(name, plain=0.4 if name == "plain" else None)
        return GpuResult(rows=[row], overhead={}, pause_s={}, device="CPU")

    monkeypatch.setattr(gpu_bench, "_measure_case", measured)
    for number, name in enumerate(("1f1b-2", "zb-4")):
        found = run(rows=[name], device="cpu")
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    alone = run(combine=files)
    assert [row["name"] for row in alone["rows"]] == ["1f1b-2", "zb-4"]
    assert [row["bubble_bound"] for row in alone["rows"]] == [None, None]
    both = run(combine=files, rows=["plain"], device="cpu")
    assert [row["name"] for row in both["rows"]] == ["1f1b-2", "zb-4", "plain"]
    assert both["rows"][0]["plain"] == 0.4
    assert both["rows"][0]["bubble_bound"] == pytest.approx(0.4 * (1 + 1 / 8))
    assert run(combine=files, rows=["zb-4"], device="cpu")["rows"][-1]["name"] == "zb-4", "measured again"
    console = Console(width=250, record=True)
    console.print(render_table(both))
    assert "1.500 to 2.500" in console.export_text()


def test_stages_are_cut_so_that_the_output_head_is_no_bottleneck() -> None:
    for stages in (2, 4):
        cut, slowest = balanced_cut(GPT_406M, stages)
        assert slowest < 1.1
        assert len(cut[-1]) < len(cut[0])


def test_pauses_are_not_measured_under_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    with pytest.raises(UsageError, match="measure rows of pauses without MPS"):
        run(rows=["pause-reroute"], spec=TINY)


def test_what_cannot_be_measured_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU that torch can use: add --device cpu"):
        run()
    with pytest.raises(UsageError, match="--rows has '1f1b-3': use some of plain, 1f1b-2"):
        run(rows=["1f1b-3"])
    with pytest.raises(UsageError, match="--device is 'tpu'"):
        run(device="tpu")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UsageError, match="is no result of culm bench gpu"):
        run(combine=[str(tmp_path / "other.json")])


def test_workers_that_share_a_gpu_are_marked_and_get_slices_under_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    with sharing_of_gpus(1, "cuda") as alone, sharing_of_gpus(4, "cuda") as turns:
        assert (alone, turns) == ("a GPU each", "4 workers take turns on a GPU")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    with sharing_of_gpus(8, "cuda") as sliced:
        assert sliced == "virtual GPUs: MPS slices of 12 %"
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
