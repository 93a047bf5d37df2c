"""`culm bench pipeline --schedules planned`: the planned schedule next to culm's and torch's other schedules.

A cell is a depth, a number of micro-batches, and whether gradients are clipped by their norm. In each cell every other
schedule is measured against `planned` in alternating rounds, both on the same layers and with the same memory:
`planned` keeps no more activations than the torch schedule that keeps the most (Interleaved1F1B, about 1.5 times 1F1B).
The bound is a step without bubbles: the slowest stage's M x (F + I + W), from a profile of the layers on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TypedDict

from benchmarks.common.cpu_pinning import available_cores
from benchmarks.common.gpt_job import LARGE_GPT, SMALL_GPT, GPTSpec, even_cut
from benchmarks.common.isolated_processes import IsolatedTask, run_isolated
from benchmarks.common.paired_rounds import PairedComparison, compare_rounds
from benchmarks.pipeline.culm_pipeline import CulmPool, job_from_spec
from benchmarks.pipeline.pipeline_bench import (
    FULL,
    QUICK,
    ClosableSide,
    PipelineEffort,
    available_core_count,
    cores_for,
    describe_machine,
    measure_sides,
)
from benchmarks.pipeline.rank_processes import TorchUnavailable
from benchmarks.pipeline.torch_pipeline import TorchPool, stages_per_worker
from rich.table import Table

from culm.errors import UsageError
from culm.plan.replan.planned_schedule import bubble_free_step_s
from culm.plan.reshape.run_schedule import ScheduledStep
from culm.runtime.compute.layer_profiler import profile_layers
from culm.schedule import check_plan, generate_plan

CULM_SCHEDULES = ("1f1b", "zb")
TORCH_SCHEDULES = ("1f1b", "interleaved", "zbv")
DEFAULT_STAGES = (4, 8)
DEFAULT_MICRO_BATCHES = (8, 16, 32)
CLIP_NORM = 1.0


class PlannedRow(TypedDict):
    """A cell: seconds per step, medians. Ratios above 1: planned is faster."""

    job: str
    stages: int
    micro_batches: int
    clip_norm: bool
    max_activations: int
    """The most micro-batches whose activations planned keeps on a worker."""
    planned: float | None
    bound: float
    """Seconds of a step without bubbles."""
    of_bound: float | None
    """bound / planned: 1 is a step without bubbles."""
    others: dict[str, float | None]
    """Seconds of the other schedules, as "culm zb" and "torch zbv"; None: it could not run."""
    ratios: dict[str, float]
    """By schedule: its seconds divided by those of planned in the same round, the median."""
    intervals: dict[str, list[float]]
    """95 % intervals of the ratios."""
    unavailable: dict[str, str]
    of_torch_best: float | None
    """The smallest ratio over torch's schedules: at least 1 means that none of them is faster."""
    cores: int


class PlannedResult(TypedDict):
    """The JSON of the bench."""

    planned: list[PlannedRow]
    cores: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """What one row measures."""

    spec: GPTSpec
    stages: int

    @property
    def max_activations(self) -> int:
        """The activations that Interleaved1F1B keeps, in micro-batches of a whole stage: its segments are half as
        large."""
        plan = generate_plan("interleaved", pipelines=1, stages=self.stages, micro_batches=self.spec.micro_batches)
        return max(self.stages, max(check_plan(plan).peak_activations) // 2)


def run(
    *,
    quick: bool = False,
    stages: Sequence[int] = DEFAULT_STAGES,
    micro_batches: Sequence[int] = DEFAULT_MICRO_BATCHES,
    clip: Sequence[bool] = (False, True),
    rounds: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> PlannedResult:
    """Measure every cell; `progress` gets a line for each. Cells run in processes and on cores of their own."""
    effort = QUICK if quick else FULL
    if rounds is not None:
        effort = replace(effort, rounds=rounds, starts=min(effort.starts, rounds))
    cells = list_cells(SMALL_GPT if quick else LARGE_GPT, stages, micro_batches, clip)
    progress(describe_machine(available_core_count(), max(stages)))
    tasks = [IsolatedTask(cores_for(cell.stages), partial(_measure_own_cell, cell, effort)) for cell in cells]
    rows = run_isolated(tasks, available_cores(), lambda row: progress(describe_row(row)))
    return PlannedResult(planned=list(rows), cores=available_core_count(), workers=max(stages))


def list_cells(
    spec: GPTSpec, stages: Sequence[int], micro_batches: Sequence[int], clip: Sequence[bool]
) -> list[PlannedCell]:
    """All requested cells. Raises UsageError if there is none."""
    if not (stages and micro_batches and clip):
        raise UsageError("stages or micro-batches is empty: name at least one of each, as in --stages 4")
    return [
        PlannedCell(spec=replace(spec, micro_batches=many, clip_norm=CLIP_NORM if clipped else None), stages=depth)
        for depth in stages
        for many in micro_batches
        for clipped in clip
    ]


def _measure_own_cell(cell: PlannedCell, effort: PipelineEffort) -> PlannedRow:
    with CulmPool() as culm, TorchPool() as torch:
        return measure_cell(cell, effort, culm, torch, bubble_free_s(cell))


def bubble_free_s(cell: PlannedCell) -> float:
    """Seconds of a step without bubbles, from a profile of the layers on this machine."""
    cut = even_cut(cell.spec.blocks + 2, cell.stages)
    profile = profile_layers(job_from_spec(cell.spec))
    step = ScheduledStep(
        layers=profile.layers,
        cuts=tuple(part.start for part in cut[1:]),
        pipelines=1,
        stages=cell.stages,
        micro_batches=cell.spec.micro_batches,
    )
    return bubble_free_step_s(step.planner_shape)


def measure_cell(
    cell: PlannedCell,
    effort: PipelineEffort,
    culm: Callable[..., ClosableSide],
    torch: Callable[..., ClosableSide],
    bound_s: float,
) -> PlannedRow:
    """One row: every other schedule against planned."""
    comparisons: dict[str, PairedComparison] = {}
    unavailable: dict[str, str] = {}
    contenders = [("culm", culm, name) for name in CULM_SCHEDULES] + [
        ("torch", torch, name) for name in TORCH_SCHEDULES
    ]
    for side, factory, name in contenders:
        try:
            comparisons[f"{side} {name}"] = _compare(cell, effort, culm, partial(_open_side, factory, cell, name))
        except TorchUnavailable as error:
            unavailable[f"{side} {name}"] = str(error)
    return make_row(cell, comparisons, unavailable, bound_s)


def _compare(
    cell: PlannedCell,
    effort: PipelineEffort,
    culm: Callable[..., ClosableSide],
    open_other: Callable[[], ClosableSide],
) -> PairedComparison:
    found = []
    for _ in range(effort.starts):
        with ExitStack() as stack:
            other = stack.enter_context(closing(open_other()))
            planned = stack.enter_context(closing(_open_side(culm, cell, "planned")))
            found.append(measure_sides(planned, other, effort))
    return compare_rounds([s for each in found for s in each.a_s], [s for each in found for s in each.b_s])


def _open_side(factory: Callable[..., ClosableSide], cell: PlannedCell, schedule: str) -> ClosableSide:
    cut = even_cut(cell.spec.blocks + 2, cell.stages * stages_per_worker(schedule))
    options = {"max_activations": cell.max_activations} if schedule == "planned" else {}
    return factory(cell.spec, cut, schedule, **options)


def make_row(
    cell: PlannedCell, comparisons: dict[str, PairedComparison], unavailable: dict[str, str], bound_s: float
) -> PlannedRow:
    """The figures of a cell."""
    seconds = [s for each in comparisons.values() for s in each.a_s]
    planned = median(seconds) if seconds else None
    torchs = [each.ratio_median for name, each in comparisons.items() if name.startswith("torch")]
    return PlannedRow(
        job=cell.spec.name,
        stages=cell.stages,
        micro_batches=cell.spec.micro_batches,
        clip_norm=cell.spec.clip_norm is not None,
        max_activations=cell.max_activations,
        planned=planned,
        bound=bound_s,
        of_bound=bound_s / planned if planned else None,
        others={name: median(each.b_s) for name, each in comparisons.items()} | dict.fromkeys(unavailable),
        ratios={name: each.ratio_median for name, each in comparisons.items()},
        intervals={name: list(each.ci) for name, each in comparisons.items()},
        unavailable=unavailable,
        of_torch_best=min(torchs, default=None),
        cores=available_core_count(),
    )


def describe_row(row: PlannedRow) -> str:
    """One line for the progress of the bench."""
    best = "-" if row["of_torch_best"] is None else f"{row['of_torch_best']:.3f}"
    bound = "-" if row["of_bound"] is None else f"{row['of_bound']:.3f}"
    clip = ", clip_norm" if row["clip_norm"] else ""
    return (
        f"{row['job']} planned, {row['stages']} stages, {row['micro_batches']} micro-batches{clip}: "
        f"torch's best / planned {best}, {bound} of a step without bubbles"
    )


def render_table(result: PlannedResult) -> Table:
    """A line for each schedule of a cell. The line of planned has the shares of the bound and of torch's best."""
    table = Table(title="seconds per step", caption=describe_machine(result["cores"], result["workers"]))
    table.add_column("job")
    for name in ("stages", "micro-batches", "clip", "schedule", "seconds", "/ planned", "95 %", "of bound"):
        table.add_column(name, justify="right")
    for row in result["planned"]:
        cell = [row["job"], str(row["stages"]), str(row["micro_batches"]), "yes" if row["clip_norm"] else "no"]
        kept = f"planned, {row['max_activations']} kept"
        table.add_row(*cell, "without bubbles", _number(row["bound"], 4), "", "", "1.000")
        table.add_row(
            *cell,
            kept,
            _number(row["planned"], 4),
            "1.000",
            "",
            _number(row["of_bound"]),
        )
        for name, seconds in row["others"].items():
            table.add_row(*cell, name, _number(seconds, 4), *_ratio_cells(row, name), "")
        table.add_row(*cell, "torch's best", "", _number(row["of_torch_best"]), "", "", end_section=True)
    return table


def _ratio_cells(row: PlannedRow, name: str) -> tuple[str, str]:
    if name not in row["ratios"]:
        return "-", row["unavailable"].get(name, "-")
    return _number(row["ratios"][name]), "{:.3f} to {:.3f}".format(*row["intervals"][name])


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
