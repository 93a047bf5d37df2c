"""`culm bench gpu`, on the CPU with a tiny job: every kind of row runs, and rows are chosen and combined."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from benchmarks.common.gpt_job import GPTSpec
from benchmarks.gpu.gpu_bench import CASES, GpuRow, render_table, run, sharing_of_gpus
from rich.console import Console

from benchmarks.gpu import gpu_bench
from culm.errors import UsageError

TINY = GPTSpec(name="tiny", width=16, tokens=8, blocks=4, heads=2, vocab=32, micro_batch=2, items=32, precision="bf16")
ROW = GpuRow(
    job="tiny",
    pipelines=1,
    stages=2,
    schedule="1f1b",
    strategy="none",
    micro_batches=8,
    peer="torch 1f1b",
    culm=1.0,
    other=2.0,
    ratio=2.0,
    ci=[1.5, 2.5],
    rounds=6,
    device="CPU",
    sharing="",
)


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_each_kind_of_row_runs_on_the_cpu() -> None:
    said: list[str] = []
    names = ["plain", "1f1b-2", "2x2", "reroute"]
    found = run(rows=names, device="cpu", quick=True, rounds=2, spec=TINY, progress=said.append)
    assert list(found["rows"]) == names
    assert all(row["culm"] > 0 and row["other"] > 0 and row["rounds"] == 2 for row in found["rows"].values())
    assert [row["peer"] for row in found["rows"].values()] == [
        "plain loop",
        "torch 1f1b",
        "torch 1f1b + DDP",
        "culm without a strategy",
    ]
    assert len(said) == 4
    assert json.loads(json.dumps(found)) == found


def test_rows_measured_one_at_a_time_are_combined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_bench, "measure_row", lambda *_: ROW)
    for number, name in enumerate(("1f1b-2", "zb-4")):
        found = run(rows=[name], device="cpu")
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    assert list(run(combine=files)["rows"]) == ["1f1b-2", "zb-4"]
    both = run(combine=files, rows=["plain"], device="cpu")
    assert list(both["rows"]) == ["1f1b-2", "zb-4", "plain"]
    console = Console(width=200, record=True)
    console.print(render_table(both))
    assert "1.500 to 2.500" in console.export_text()
    assert list(run(device="cpu")["rows"]) == list(CASES)


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
