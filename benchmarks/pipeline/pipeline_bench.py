"""`culm bench pipeline`: culm next to torch.distributed.pipelining, the same jobs in alternating rounds.

Both sides are factories, so that anything with `run_round` and `close` can be measured. Each row starts both sides,
alternates between them, and ends them; an idle side waits in a blocking read. On a machine with enough cores several
rows are measured at a time, each on its own cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

from benchmarks.common.cpu_pinning import available_cores
from benchmarks.common.gpt_job import LARGE_GPT, SMALL_GPT, GPTSpec, StageCut, even_cut
from benchmarks.common.isolated_processes import IsolatedTask, run_isolated
from benchmarks.common.paired_rounds import PairedComparison, TimedSide, compare_rounds, measure_paired, steps_for
from benchmarks.pipeline.culm_pipeline import CulmPool
from benchmarks.pipeline.rank_processes import TorchUnavailable
from benchmarks.pipeline.torch_pipeline import TorchPool, stages_per_worker
from rich.table import Table

from culm.errors import UsageError

PROBES = ("exact_cost", "us_per_action", "us_per_action_torch", "kept_bytes")
"""Additional figures next to the rows; None if there is no probe for them."""


class ClosableSide(TimedSide, Protocol):
    """A side that was started and must be closed."""

    def close(self) -> None: ...


SideFactory: TypeAlias = Callable[[GPTSpec, StageCut, str], ClosableSide]
FigureProbe: TypeAlias = Callable[[], Any]


class PipelineRow(TypedDict):
    """One job under one schedule. Seconds are per step, medians; a row that a side cannot run says why."""

    job: str
    schedule: str
    stages: int
    micro_batches: int
    culm: float | None
    torch: float | None
    ratio: float | None
    ci: list[float] | None
    rounds: int
    cores: int
    unavailable: NotRequired[str]


class PipelineResult(TypedDict):
    """The JSON of the bench."""

    rows: list[PipelineRow]
    ratio_median: float | None
    exact_cost: Any
    us_per_action: Any
    us_per_action_torch: Any
    kept_bytes: Any
    cores: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class PipelineEffort:
    """How long the bench measures."""

    jobs: tuple[GPTSpec, ...]
    rounds: int
    starts: int
    """How often both sides are started again, with the rounds distributed over the starts: the placement of a process
    shifts all of its rounds, which an interval over the rounds of one start does not show."""
    round_s: float
    """Target duration of a round of one side; a longer step is a round by itself."""


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """What one row measures."""

    spec: GPTSpec
    schedule: str
    stages: int
    cut: StageCut


FULL = PipelineEffort(jobs=(LARGE_GPT, SMALL_GPT), rounds=20, starts=5, round_s=0.5)
# Six: with fewer rounds not even the span from the smallest to the largest ratio covers the median with 95 %.
QUICK = PipelineEffort(jobs=(SMALL_GPT,), rounds=6, starts=2, round_s=0.3)


def run(
    *,
    culm: SideFactory | None = None,
    torch: SideFactory | None = None,
    quick: bool = False,
    stages: Sequence[int] = (2, 4, 8),
    schedules: Sequence[str] = ("gpipe", "1f1b", "zb"),
    rounds: int | None = None,
    probes: Mapping[str, FigureProbe] | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> PipelineResult:
    """Measure every job under every schedule and depth; `progress` gets a line for each row. If both factories are
    given, rows are measured in this process one after the other; otherwise rows have their own processes and cores.

    Raises the errors of a side: UsageError before anything is started, RunError if a process of a side died.
    """
    assert (culm is None) == (torch is None), "a single side would be ignored: pass both"
    effort = QUICK if quick else FULL
    if rounds is not None:
        effort = replace(effort, rounds=rounds, starts=min(effort.starts, rounds))
    cases = list_cases(effort.jobs, stages, schedules)
    progress(describe_machine(available_core_count(), max(stages)))
    on_row = partial(_announce_row, progress)
    if culm is not None and torch is not None:
        rows = [_report_row(measure_row(case, culm=culm, torch=torch, effort=effort), on_row) for case in cases]
    else:
        rows = _measure_side_by_side(cases, effort, on_row)
    return build_result(rows, workers=max(stages), probes=probes or {})


def _measure_side_by_side(
    cases: Sequence[PipelineCase], effort: PipelineEffort, on_row: Callable[[PipelineRow], object]
) -> list[PipelineRow]:
    """Measure rows in parallel; returns them in order. Rows with the most stages start first, then those with the
    fewest, which fit in next to them and take the longest."""
    widest = max(case.stages for case in cases)
    order = sorted(range(len(cases)), key=lambda n: (cases[n].stages != widest, cases[n].stages, n))
    tasks = [
        IsolatedTask(cores_for(cases[number].stages), partial(_measure_own_row, cases[number], effort))
        for number in order
    ]
    rows = dict(zip(order, run_isolated(tasks, available_cores(), on_row), strict=True))
    return [rows[number] for number in range(len(cases))]


def cores_for(workers: int) -> int:
    """Cores reserved for a row: one per worker, plus one per four workers for agents, Gloo's threads and the bench."""
    return workers + math.ceil(workers / 4)


def _measure_own_row(case: PipelineCase, effort: PipelineEffort) -> PipelineRow:
    with CulmPool() as culm, TorchPool() as torch:
        return measure_row(case, culm=culm, torch=torch, effort=effort)


def list_cases(jobs: Sequence[GPTSpec], stages: Sequence[int], schedules: Sequence[str]) -> list[PipelineCase]:
    """All requested rows. Raises an error before anything is started if one of them is not valid."""
    if not stages or not schedules:
        raise UsageError("stages or schedules is empty: name at least one of each, as in stages=(2, 4)")
    return [_make_case(spec, schedule, depth) for spec in jobs for depth in stages for schedule in schedules]


def measure_row(case: PipelineCase, *, culm: SideFactory, torch: SideFactory, effort: PipelineEffort) -> PipelineRow:
    """One row: both sides on the same cut, or the reason why one of them cannot run it."""
    try:
        comparisons = [_measure_one_start(case, culm, torch, effort) for _ in range(effort.starts)]
        return _make_row(
            case, compare_rounds([s for c in comparisons for s in c.a_s], [s for c in comparisons for s in c.b_s])
        )
    except TorchUnavailable as error:
        return {**_make_row(case, None), "unavailable": str(error)}


def _measure_one_start(
    case: PipelineCase, culm: SideFactory, torch: SideFactory, effort: PipelineEffort
) -> PairedComparison:
    with ExitStack() as stack:
        theirs = stack.enter_context(closing(torch(case.spec, case.cut, case.schedule)))
        ours = stack.enter_context(closing(culm(case.spec, case.cut, case.schedule)))
        return measure_sides(ours, theirs, effort)


def measure_sides(a: TimedSide, b: TimedSide, effort: PipelineEffort) -> PairedComparison:
    """Alternating rounds of about `effort.round_s` each; the first two steps of a side are warm-up and do not count."""
    for side in (a, b):
        side.run_round(1)
    step_s = (a.run_round(1) + b.run_round(1)) / 2
    steps = steps_for(step_s, round_s=effort.round_s)
    return measure_paired(a, b, rounds=effort.rounds // effort.starts, steps=steps, warmup=0)


def build_result(rows: Sequence[PipelineRow], *, workers: int, probes: Mapping[str, FigureProbe]) -> PipelineResult:
    """The whole JSON: the rows, the median of their ratios, the probes, and the machine."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    probed = {name: probes[name]() if name in probes else None for name in PROBES}
    return PipelineResult(
        rows=list(rows),
        ratio_median=median(ratios) if ratios else None,
        exact_cost=probed["exact_cost"],
        us_per_action=probed["us_per_action"],
        us_per_action_torch=probed["us_per_action_torch"],
        kept_bytes=probed["kept_bytes"],
        cores=available_core_count(),
        workers=workers,
    )


def available_core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(cores: int, workers: int) -> str:
    """One sentence about the machine, with a warning if workers have to share cores."""
    if cores >= workers:
        return f"{cores} cores for up to {workers} workers, one thread each"
    return (
        f"{cores} cores for up to {workers} workers: fewer cores than workers, so they share them, "
        "and the figures show the work of both sides more than their bubbles"
    )


def render_table(result: PipelineResult) -> Table:
    """The rows as a table."""
    table = Table(title="seconds per step", caption=describe_machine(result["cores"], result["workers"]))
    table.add_column("job")
    table.add_column("schedule")
    for name in ("stages", "micro-batches", "culm", "torch", "torch / culm", "95 %", "rounds", "cores"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(*_row_cells(row))
    if result["ratio_median"] is not None:
        table.add_section()
        table.add_row("median", "", "", "", "", "", f"{result['ratio_median']:.3f}", "", "", "")
    return table


def _row_cells(row: PipelineRow) -> list[str]:
    head = [row["job"], row["schedule"], str(row["stages"]), str(row["micro_batches"])]
    figures = [_format_number(row["culm"], 4), _format_number(row["torch"], 4), _format_number(row["ratio"], 3)]
    return [*head, *figures, _format_interval(row), str(row["rounds"]), str(row["cores"])]


def _format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _format_interval(row: PipelineRow) -> str:
    if row["ci"] is None:
        return row.get("unavailable", "-")
    return "{:.3f} to {:.3f}".format(*row["ci"])


def _report_row(row: PipelineRow, on_row: Callable[[PipelineRow], object]) -> PipelineRow:
    on_row(row)
    return row


def _announce_row(progress: Callable[[str], object], row: PipelineRow) -> None:
    label = f"{row['job']} {row['schedule']}, {row['stages']} stages"
    ratio = row["ratio"]
    progress(
        f"{label}: {_format_interval(row)}"
        if ratio is None
        else f"{label}: torch / culm {ratio:.3f} ({_format_interval(row)})"
    )


def _make_case(spec: GPTSpec, schedule: str, depth: int) -> PipelineCase:
    cut = even_cut(spec.blocks + 2, depth * stages_per_worker(schedule))
    return PipelineCase(spec=spec, schedule=schedule, stages=depth, cut=cut)


def _make_row(case: PipelineCase, comparison: PairedComparison | None) -> PipelineRow:
    return PipelineRow(
        job=case.spec.name,
        schedule=case.schedule,
        stages=case.stages,
        micro_batches=case.spec.micro_batches,
        culm=median(comparison.a_s) if comparison else None,
        torch=median(comparison.b_s) if comparison else None,
        ratio=comparison.ratio_median if comparison else None,
        ci=list(comparison.ci) if comparison else None,
        rounds=len(comparison.ratios) if comparison else 0,
        cores=available_core_count(),
    )
