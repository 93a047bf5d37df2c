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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal, TypeAlias, TypedDict

import torch
from benchmarks.common.gpt_job import GPTSpec, StageCut
from benchmarks.common.paired_rounds import PairedComparison, TimedSide, compare_rounds
from benchmarks.gpu.gpu_pauses import PAUSE_PARTS, PauseRow, PauseScenario, measure_pause
from benchmarks.pipeline.culm_pipeline import CulmPipeline, CulmPool, job_from_spec
from benchmarks.pipeline.pipeline_bench import PipelineEffort, available_core_count, measure_sides
from benchmarks.pipeline.torch_pipeline import PlainLoop, TorchPipeline
from rich.console import Group
from rich.table import Table

from culm.cluster.prepare_run import inspect_layers
from culm.errors import UsageError
from culm.plan.model.layer_partition import partition_layers
from culm.schedule import time_plan
from culm.schedule.builtin_schedules import one_f_one_b, zero_bubble
from culm.text_format import format_bytes

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
QUICK = PipelineEffort(jobs=(), rounds=6, starts=1, round_s=2.0)
"""Rounds of several steps: in a round of one step no work of the next one overlaps with its end."""
_TRIAL_ROUND_S = 0.3
"""On a CPU."""


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
    "plain-large": GpuCase(peer="plain loop", large=True),
    **{f"large-{stages}": _pipeline(stages, large=True) for stages in (4, 8)},
    **{f"2x{stages}": _pipeline(stages, pipelines=2, strategy="reroute") for stages in (2, 4)},
    **{strategy: _overhead(strategy) for strategy in ("reroute", "shadow-lazy", "shadow")},
}
"""By name of the row."""


PAUSES: dict[str, PauseScenario] = {
    f"pause-{strategy}": PauseScenario(strategy=strategy) for strategy in ("reroute", "shadow")
}
"""By name of the row: ten losses in one exact run of 2 x 2."""
ROWS = (*CASES, *PAUSES)


class GpuRow(TypedDict):
    """One row. Seconds are per step, medians; a ratio above 1: culm is faster than its peer."""

    name: str
    job: str
    pipelines: int
    stages: int
    schedule: str
    strategy: str
    micro_batches: int
    peer: str
    culm: float
    torch: float | None
    """torch.distributed.pipelining; None where the peer is the plain loop."""
    plain: float | None
    """The plain loop on the same job; None: it was not measured."""
    ratio: float
    ci: list[float]
    rounds: int
    bubble_bound: float | None
    """The seconds of a step if only the bubbles of the schedule were added to the plain loop, on equal slices."""
    slowest_stage: float
    """The estimated time of the slowest stage, divided by the mean of all."""
    device: str
    devices: int
    """GPUs, or cores, that the workers shared."""
    sharing: str
    """How workers share GPUs."""
    memory: dict[str, int]
    """Largest values of a worker: see Summary.memory."""


class OverheadRow(TypedDict):
    """What a strategy costs without a loss, compared with `none`."""

    overhead: float
    """0.01: a step takes 1 % longer."""
    ci: list[float]
    culm: float
    none: float
    rounds: int
    sharing: str
    memory: dict[str, int]
    memory_of_none: dict[str, int]


class GpuResult(TypedDict):
    """The JSON of the bench."""

    rows: list[GpuRow]
    overhead: dict[str, OverheadRow]
    """By strategy."""
    pause_s: dict[str, PauseRow]
    """By strategy."""
    device: str


def run(
    *,
    rows: Sequence[str] = (),
    device: str | None = None,
    combine: Sequence[str] = (),
    quick: bool = False,
    rounds: int | None = None,
    spec: GPTSpec | None = None,
    losses: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> GpuResult:
    """Measure rows (default: all, or none if results are combined only) and add those of earlier JSON files
    (`combine`); a row that is measured replaces an earlier one. `device`: default: cuda. `spec`: instead of the jobs of
    the device. `losses`: in a row of pauses.

    Raises UsageError before anything is started, and RunError if a process of a side died.
    """
    names = _check_rows(rows, only_combines=bool(combine))
    found = GpuResult(rows=[], overhead={}, pause_s={}, device="")
    for file in combine:
        _add_result(found, _read_result(file))
    place = device or "cuda"
    if names and place not in ("cpu", "cuda"):
        raise UsageError(f"--device is {place!r}: use cuda or cpu")
    if names and place == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no GPU that torch can use: add --device cpu to try the bench itself")
    effort = QUICK if quick else FULL
    if place == "cpu":
        effort = replace(effort, round_s=_TRIAL_ROUND_S)
    if rounds is not None:
        effort = replace(effort, rounds=rounds, starts=min(effort.starts, rounds))
    for name in names:
        if name in PAUSES:
            count = losses if losses is not None else 3 if quick else PAUSES[name].losses
            new = _measure_pause(replace(PAUSES[name], losses=count), place, spec)
        else:
            new = _measure_case(name, place, effort, spec)
        _add_result(found, new)
        progress(f"{name}: {_sentence(name, new)}")
    _add_plain_times(found["rows"])
    return found


def _sentence(name: str, result: GpuResult) -> str:
    if name in PAUSES:
        (pause,) = result["pause_s"].values()
        bits = "the same bits" if pause["bit_identical"] else "OTHER BITS"
        return f"pause {pause['median']:.2f} s (median of {len(pause['pauses'])}), {bits}"
    if result["overhead"]:
        (cost,) = result["overhead"].values()
        return "{:+.1%} ({:+.1%} to {:+.1%})".format(cost["overhead"], *cost["ci"])
    (row,) = result["rows"]
    return f"{row['peer']} / culm {row['ratio']:.3f} ({row['ci'][0]:.3f} to {row['ci'][1]:.3f})"


def _add_result(found: GpuResult, new: GpuResult) -> None:
    """Add a result; its rows replace those of the same name."""
    names = {row["name"] for row in new["rows"]}
    found["rows"] = [*(row for row in found["rows"] if row["name"] not in names), *new["rows"]]
    found["overhead"] |= new["overhead"]
    found["pause_s"] |= new["pause_s"]
    found["device"] = new["device"] or found["device"]


def _add_plain_times(rows: Sequence[GpuRow]) -> None:
    """Give each row the time of the plain loop on its job, and the bound that follows from it, if that was measured."""
    plain = {row["job"]: row["plain"] for row in rows if CASES[row["name"]].peer == "plain loop"}
    for row in rows:
        seconds = row["plain"] = plain.get(row["job"])
        row["bubble_bound"] = None if seconds is None else seconds * _plan_factor(row) / row["devices"]


def _plan_factor(row: GpuRow) -> float:
    """How much longer than its work a plan with equal stages takes, because of bubbles."""
    make = zero_bubble if row["schedule"] == "zb" else one_f_one_b
    micro_batches = row["micro_batches"]
    plan = make(pipelines=row["pipelines"], stages=row["stages"], micro_batches=micro_batches)
    return time_plan(plan).makespan * row["pipelines"] / (3 * micro_batches)


def _check_rows(rows: Sequence[str], *, only_combines: bool) -> tuple[str, ...]:
    for name in rows:
        if name not in ROWS:
            raise UsageError(f"--rows has {name!r}: use some of {', '.join(ROWS)}")
    return tuple(rows) or (() if only_combines else ROWS)


def _read_result(file: str) -> GpuResult:
    try:
        result: GpuResult = json.loads(Path(file).read_text())
        found = GpuResult(rows=[], overhead={}, pause_s={}, device="")
        _add_result(found, result)
        if any(row["name"] not in CASES for row in found["rows"]):
            raise KeyError("a row of another version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--combine {file!r} is no result of culm bench gpu --json: {error}") from None
    return found


def _spec_for(device: str, *, large: bool) -> GPTSpec:
    return GPT_CPU if device == "cpu" else GPT_1500M if large else GPT_406M


def _device_name(device: str) -> str:
    return "CPU" if device == "cpu" else torch.cuda.get_device_name()


def _measure_pause(scenario: PauseScenario, device: str, spec: GPTSpec | None) -> GpuResult:
    spec = spec or _spec_for(device, large=False)
    cut, _ = balanced_cut(spec, 2)
    if device == "cuda" and _MPS_PIPES in os.environ:
        raise UsageError("a SIGKILL during a kernel ends all clients of MPS: measure rows of pauses without MPS")
    with CulmPool() as pool:
        row = measure_pause(spec, cut, scenario, pool.fork_server)
    return GpuResult(rows=[], overhead={}, pause_s={scenario.strategy: row}, device=_device_name(device))


def _measure_case(name: str, device: str, effort: PipelineEffort, spec: GPTSpec | None = None) -> GpuResult:
    """One row: both sides are started `effort.starts` times, and alternate in every start."""
    case = CASES[name]
    spec = spec or _spec_for(device, large=case.large)
    cut, slowest = balanced_cut(spec, case.stages)
    found: list[PairedComparison] = []
    memory: list[dict[str, int]] = []
    with sharing_of_gpus(case.workers, device) as sharing:
        for _ in range(effort.starts):
            with _both_sides(case, spec, cut) as (ours, theirs):
                found.append(measure_sides(ours, theirs, effort))
            memory = [side.summary.get("memory", {}) for side in (ours, theirs) if isinstance(side, CulmPipeline)]
    comparison = compare_rounds([s for c in found for s in c.a_s], [s for c in found for s in c.b_s])
    other, rounds = median(comparison.b_s), len(comparison.ratios)
    result = GpuResult(rows=[], overhead={}, pause_s={}, device=_device_name(device))
    if case.peer == "culm without a strategy":
        result["overhead"][case.strategy] = OverheadRow(
            overhead=1 / comparison.ratio_median - 1,
            ci=[1 / comparison.ci[1] - 1, 1 / comparison.ci[0] - 1],
            culm=median(comparison.a_s),
            none=other,
            rounds=rounds,
            sharing=sharing,
            memory=memory[0],
            memory_of_none=memory[1],
        )
        return result
    is_plain = case.peer == "plain loop"
    row = GpuRow(
        name=name,
        job=spec.name,
        pipelines=case.pipelines,
        stages=case.stages,
        schedule=case.schedule,
        strategy=case.strategy,
        micro_batches=spec.micro_batches,
        peer=case.peer + (" + DDP" if case.peer == "torch 1f1b" and case.pipelines > 1 else ""),
        culm=median(comparison.a_s),
        torch=None if is_plain else other,
        plain=other if is_plain else None,
        ratio=comparison.ratio_median,
        ci=list(comparison.ci),
        rounds=rounds,
        bubble_bound=None,
        slowest_stage=slowest,
        device=result["device"],
        devices=min(case.workers, available_core_count() if device == "cpu" else torch.cuda.device_count()),
        sharing=sharing,
        memory=memory[0],
    )
    result["rows"].append(row)
    return result


def balanced_cut(spec: GPTSpec, stages: int) -> tuple[StageCut, float]:
    """The cut that both sides use, so that the output head is no bottleneck; and the slowest stage divided by the
    mean, both by culm's estimate."""
    layers = inspect_layers(job_from_spec(replace(spec, device="cpu", items=spec.micro_batch))).profile.layers
    bounds = [0, *partition_layers(layers, stages), len(layers)]
    cut = tuple(range(start, stop) for start, stop in pairwise(bounds))
    seconds = [sum(layers[n].forward_s + layers[n].input_s + layers[n].weight_s for n in part) for part in cut]
    return cut, max(seconds) * stages / sum(seconds)


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


def render_table(result: GpuResult) -> Group:
    """The result as tables."""
    rows = Table(title=f"seconds per step on {result['device']}")
    for name in ("row", "job"):
        rows.add_column(name)
    for name in ("shape", "schedule", "culm", "other", "other / culm", "95 %", "rounds", "plain", "bubbles alone"):
        rows.add_column(name, justify="right")
    rows.add_column("compared with")
    rows.add_column("sharing")
    for row in result["rows"]:
        other = row["plain"] if row["torch"] is None else row["torch"]
        rows.add_row(
            row["name"],
            row["job"],
            f"{row['pipelines']} x {row['stages']}",
            row["schedule"],
            f"{row['culm']:.4f}",
            _seconds(other),
            f"{row['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*row["ci"]),
            str(row["rounds"]),
            _seconds(row["plain"]),
            _seconds(row["bubble_bound"]),
            row["peer"],
            row["sharing"],
        )
    costs = Table(title="longer steps without a loss, compared with none, at 2 x 2")
    for name in ("strategy", "overhead", "95 %", "rounds", "on the GPU", "page-locked"):
        costs.add_column(name, justify="right")
    for strategy, cost in result["overhead"].items():
        memory = [format_bytes(cost["memory"].get(key, 0)) for key in ("peak_device_bytes", "peak_slab_bytes")]
        interval = "{:+.1%} to {:+.1%}".format(*cost["ci"])
        costs.add_row(strategy, f"{cost['overhead']:+.1%}", interval, str(cost["rounds"]), *memory)
    pauses = Table(title="pauses at a loss, at 2 x 2, exact")
    for name in (
        "strategy",
        "losses",
        "median s",
        "max s",
        "detect ms",
        "decide ms",
        "move ms",
        "redo ms",
        "same bits",
    ):
        pauses.add_column(name, justify="right")
    for strategy, pause in result["pause_s"].items():
        parts = [f"{pause[part]:.0f}" for part in PAUSE_PARTS]
        times = [f"{pause['median']:.2f}", f"{pause['max']:.2f}"]
        same = "yes" if pause["bit_identical"] else "NO"
        pauses.add_row(strategy, str(pause["preemptions"]), *times, *parts, same)
    return Group(*(table for table in (rows, costs, pauses) if table.row_count))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
