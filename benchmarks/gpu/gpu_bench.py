"""`culm bench gpu`: culm next to the plain loop, to torch.distributed.pipelining, and to itself without a strategy.

Sides alternate within a row. Rows are chosen by name, measured one at a time where a machine is lent for minutes only,
and combined afterwards. On GPUs torch uses NCCL, on the CPU Gloo. Workers that have to share GPUs run on slices of them
if CUDA MPS is running (each with an equal part of the multiprocessors), and in turns without it; such rows are marked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal, TypeAlias, TypedDict

import torch
from benchmarks.common.gpt_job import GPTSpec, StageCut, even_cut
from benchmarks.common.paired_rounds import PairedComparison, TimedSide, compare_rounds
from benchmarks.pipeline.culm_pipeline import CulmPool
from benchmarks.pipeline.pipeline_bench import PipelineEffort, measure_sides
from benchmarks.pipeline.torch_pipeline import PlainLoop, TorchPipeline
from rich.table import Table

from culm.errors import UsageError

Peer: TypeAlias = Literal["plain loop", "torch 1f1b", "culm without a strategy"]
GPT_406M = GPTSpec(
    name="gpt 406 M",
    width=1024,
    tokens=1024,
    blocks=24,
    heads=16,
    vocab=50304,
    micro_batch=8,
    micro_batches=8,
    items=128,
    device="cuda",
    precision="bf16",
)
GPT_1500M = replace(GPT_406M, name="gpt 1.5 B", width=2048, blocks=26, micro_batch=4)
GPT_CPU = GPTSpec(name="gpt small", width=64, tokens=32, items=64, precision="bf16")
"""A trial of the bench on a machine without a GPU: its figures say nothing about GPUs."""
_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
FULL = PipelineEffort(jobs=(), rounds=20, starts=2, round_s=2.0)
QUICK = PipelineEffort(jobs=(), rounds=6, starts=1, round_s=0.3)


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """What a row measures."""

    peer: Peer
    pipelines: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    """Of culm."""
    strategy: str = "none"
    large: bool = False
    """Whether the job is the large one."""

    @property
    def workers(self) -> int:
        return self.pipelines * self.stages


def _pipeline(stages: int, **changes: bool | int | str) -> GpuCase:
    return GpuCase(peer="torch 1f1b", stages=stages, **changes)  # type: ignore[arg-type]


def _overhead(strategy: str) -> GpuCase:
    return GpuCase(peer="culm without a strategy", pipelines=2, stages=2, strategy=strategy)


CASES: dict[str, GpuCase] = {
    "plain": GpuCase(peer="plain loop"),
    **{f"1f1b-{stages}": _pipeline(stages) for stages in (2, 4, 8)},
    **{f"zb-{stages}": _pipeline(stages, schedule="zb") for stages in (4, 8)},
    **{f"large-{stages}": _pipeline(stages, large=True) for stages in (4, 8)},
    **{f"2x{stages}": _pipeline(stages, pipelines=2, strategy="reroute") for stages in (2, 4)},
    **{strategy: _overhead(strategy) for strategy in ("reroute", "shadow-lazy", "shadow")},
}
"""By name of the row."""


class GpuRow(TypedDict):
    """One row. Seconds are per step, medians; a ratio above 1: culm is faster than its peer."""

    job: str
    pipelines: int
    stages: int
    schedule: str
    strategy: str
    micro_batches: int
    peer: str
    culm: float
    other: float
    ratio: float
    ci: list[float]
    rounds: int
    device: str
    sharing: str
    """How workers share GPUs."""


class GpuResult(TypedDict):
    """The JSON of the bench."""

    rows: dict[str, GpuRow]


def run(
    *,
    rows: Sequence[str] = (),
    device: str | None = None,
    combine: Sequence[str] = (),
    quick: bool = False,
    rounds: int | None = None,
    spec: GPTSpec | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> GpuResult:
    """Measure rows (default: all, or none if results are combined only) and add those of earlier JSON files
    (`combine`); a row that is measured replaces an earlier one. `device`: default: cuda. `spec`: instead of the jobs of
    the device.

    Raises UsageError before anything is started, and RunError if a process of a side died.
    """
    names = _check_rows(rows, only_combines=bool(combine))
    found = GpuResult(rows={})
    for file in combine:
        found["rows"] |= _read_rows(file)
    place = device or "cuda"
    if names and place not in ("cpu", "cuda"):
        raise UsageError(f"--device is {place!r}: use cuda or cpu")
    if names and place == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no GPU that torch can use: add --device cpu to try the bench itself")
    effort = QUICK if quick else FULL
    if rounds is not None:
        effort = replace(effort, rounds=rounds, starts=min(effort.starts, rounds))
    for name in names:
        row = measure_row(CASES[name], place, effort, spec)
        progress(f"{name}: {row['peer']} / culm {row['ratio']:.3f} ({row['ci'][0]:.3f} to {row['ci'][1]:.3f})")
        found["rows"][name] = row
    return found


def _check_rows(rows: Sequence[str], *, only_combines: bool) -> tuple[str, ...]:
    for name in rows:
        if name not in CASES:
            raise UsageError(f"--rows has {name!r}: use some of {', '.join(CASES)}")
    return tuple(rows) or (() if only_combines else tuple(CASES))


def _read_rows(file: str) -> dict[str, GpuRow]:
    try:
        rows: dict[str, GpuRow] = json.loads(Path(file).read_text())["rows"]
        return dict(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--combine {file!r} is no result of culm bench gpu --json: {error}") from None


def measure_row(case: GpuCase, device: str, effort: PipelineEffort, spec: GPTSpec | None = None) -> GpuRow:
    """One row: both sides are started `effort.starts` times, and alternate in every start."""
    if spec is None:
        spec = GPT_CPU if device == "cpu" else GPT_1500M if case.large else GPT_406M
    cut = even_cut(spec.blocks + 2, case.stages)
    found: list[PairedComparison] = []
    with sharing_of_gpus(case.workers, device) as sharing:
        for _ in range(effort.starts):
            with _both_sides(case, spec, cut) as (ours, theirs):
                found.append(measure_sides(ours, theirs, effort))
    comparison = compare_rounds([s for c in found for s in c.a_s], [s for c in found for s in c.b_s])
    return GpuRow(
        job=spec.name,
        pipelines=case.pipelines,
        stages=case.stages,
        schedule=case.schedule,
        strategy=case.strategy,
        micro_batches=spec.micro_batches,
        peer=case.peer + (" + DDP" if case.peer == "torch 1f1b" and case.pipelines > 1 else ""),
        culm=median(comparison.a_s),
        other=median(comparison.b_s),
        ratio=comparison.ratio_median,
        ci=list(comparison.ci),
        rounds=len(comparison.ratios),
        device="CPU" if device == "cpu" else torch.cuda.get_device_name(),
        sharing=sharing,
    )


@contextmanager
def sharing_of_gpus(workers: int, device: str) -> Iterator[str]:
    """While this is open, processes that are started get an equal share of a GPU, if workers have to share GPUs and MPS
    is running. Yields how GPUs are shared, for the row."""
    gpus = torch.cuda.device_count() if device == "cuda" else workers
    if gpus >= workers:
        yield "" if device == "cpu" else "a GPU each"
        return
    per_gpu = -(-workers // gpus)
    if _MPS_PIPES not in os.environ:
        yield f"{per_gpu} workers take turns on a GPU"
        return
    before = os.environ.get(_MPS_SHARE)
    os.environ[_MPS_SHARE] = str(100 // per_gpu)
    try:
        yield f"virtual GPUs: MPS slices of {100 // per_gpu} %"
    finally:
        os.environ.pop(_MPS_SHARE)
        if before is not None:
            os.environ[_MPS_SHARE] = before


@contextmanager
def _both_sides(case: GpuCase, spec: GPTSpec, cut: StageCut) -> Iterator[tuple[TimedSide, TimedSide]]:
    with ExitStack() as stack:
        pool = stack.enter_context(CulmPool())
        theirs: TimedSide
        if case.peer == "plain loop":
            theirs = stack.enter_context(PlainLoop(spec))
        elif case.peer == "torch 1f1b":
            theirs = stack.enter_context(TorchPipeline(spec, cut, "1f1b", pipelines=case.pipelines))
        else:
            same = {"pipelines": case.pipelines, "strategy": "none"}
            theirs = stack.enter_context(closing(pool(spec, cut, case.schedule, **same)))
        ours = pool(spec, cut, case.schedule, pipelines=case.pipelines, strategy=case.strategy)
        yield stack.enter_context(closing(ours)), theirs


def render_table(result: GpuResult) -> Table:
    """The rows as a table."""
    table = Table(title="seconds per step")
    table.add_column("row")
    table.add_column("job")
    for name in ("shape", "schedule", "culm", "other", "other / culm", "95 %", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("compared with")
    table.add_column("device")
    for name, row in result["rows"].items():
        table.add_row(
            name,
            row["job"],
            f"{row['pipelines']} x {row['stages']}",
            row["schedule"],
            f"{row['culm']:.4f}",
            f"{row['other']:.4f}",
            f"{row['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*row["ci"]),
            str(row["rounds"]),
            row["peer"],
            ", ".join(filter(None, (row["device"], row["sharing"]))),
        )
    return table
