"""`culm bench pipeline`: culm beside torch.distributed.pipelining, the same jobs in alternating rounds.

Both sides are factories, so that anything with `round` and `close` can be measured. Each row starts both sides, lets
them take turns, and ends them; whatever is idle waits in a blocking read. On a machine with enough cores several rows
are measured at a time, each on cores of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

from rich.table import Table

from benchmarks.apart import Work, apart
from benchmarks.job import LARGE, SMALL, Cut, GPTSpec, even_cut
from benchmarks.ours import CulmPool
from benchmarks.paired import Comparison, Side, compare, paired, steps_for
from benchmarks.peer import TorchPool, stages_per_worker
from benchmarks.pinned import places
from benchmarks.ranks import Unavailable
from culm.errors import UsageError

PROBES = ("exact_cost", "us_per_action", "us_per_action_torch", "kept_bytes")
"""Figures that stand beside the rows; None where no probe for them was given."""


class Pipeline(Side, Protocol):
    """A side that was started and must be closed."""

    def close(self) -> None: ...


Factory: TypeAlias = Callable[[GPTSpec, Cut, str], Pipeline]
Probe: TypeAlias = Callable[[], Any]


class Row(TypedDict):
    """One job under one schedule. Seconds are per step, medians; a row that a side can not run says why."""

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


class Result(TypedDict):
    """The JSON of the bench."""

    rows: list[Row]
    ratio_median: float | None
    exact_cost: Any
    us_per_action: Any
    us_per_action_torch: Any
    kept_bytes: Any
    cores: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long the bench looks."""

    jobs: tuple[GPTSpec, ...]
    rounds: int
    starts: int
    """How often both sides are started anew, the rounds spread over them: where a process lands shifts all of its
    rounds alike, which an interval over the rounds of one start can not see."""
    round_s: float
    """What a round of one side should last; a step that is longer is a round by itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row measures."""

    spec: GPTSpec
    schedule: str
    stages: int
    cut: Cut


FULL = Effort(jobs=(LARGE, SMALL), rounds=20, starts=5, round_s=0.5)
# Six: with fewer rounds not even the span from the least to the greatest ratio covers the median with 95 %.
QUICK = Effort(jobs=(SMALL,), rounds=6, starts=2, round_s=0.3)


def run(
    *,
    culm: Factory | None = None,
    torch: Factory | None = None,
    quick: bool = False,
    stages: Sequence[int] = (2, 4, 8),
    schedules: Sequence[str] = ("gpipe", "1f1b", "zb"),
    probes: Mapping[str, Probe] | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Result:
    """Measure every job under every schedule and depth; `progress` gets a line for each row. Two factories that are
    given are used in this process, a row after the other; without them rows have processes and cores of their own.

    Raises what a side raises: UsageError before anything was started, RunError when a process of a side died.
    """
    assert (culm is None) == (torch is None), "a side that is given would be passed over: give both"
    effort = QUICK if quick else FULL
    planned = cases(effort.jobs, stages, schedules)
    progress(setting(cores(), max(stages)))
    told = partial(_announce, progress)
    if culm is not None and torch is not None:
        rows = [_told(row(case, culm=culm, torch=torch, effort=effort), told) for case in planned]
    else:
        rows = _side_by_side(planned, effort, told)
    return result(rows, workers=max(stages), probes=probes or {})


def _side_by_side(planned: Sequence[Case], effort: Effort, told: Callable[[Row], object]) -> list[Row]:
    """Rows in their order. Those with the most stages begin; then come those with the fewest, which fit in beside them
    and take the longest."""
    widest = max(case.stages for case in planned)
    order = sorted(range(len(planned)), key=lambda n: (planned[n].stages != widest, planned[n].stages, n))
    works = [Work(cores_for(planned[number].stages), partial(_own_row, planned[number], effort)) for number in order]
    found = dict(zip(order, apart(works, places(), told), strict=True))
    return [found[number] for number in range(len(planned))]


def cores_for(workers: int) -> int:
    """Cores that a row has to itself: one a worker, and for four workers one more, where agents, Gloo's threads and the
    bench find room."""
    return workers + math.ceil(workers / 4)


def _own_row(case: Case, effort: Effort) -> Row:
    with CulmPool() as culm, TorchPool() as torch:
        return row(case, culm=culm, torch=torch, effort=effort)


def cases(jobs: Sequence[GPTSpec], stages: Sequence[int], schedules: Sequence[str]) -> list[Case]:
    """Every row that was asked for, refused before anything is started if one makes no sense."""
    if not stages or not schedules:
        raise UsageError("stages or schedules is empty: name at least one of each, as in stages=(2, 4)")
    return [_case(spec, schedule, depth) for spec in jobs for depth in stages for schedule in schedules]


def row(case: Case, *, culm: Factory, torch: Factory, effort: Effort) -> Row:
    """One row: both sides on the same cut, or the sentence why one of them can not run it."""
    try:
        found = [_started(case, culm, torch, effort) for _ in range(effort.starts)]
        return _row(case, compare([s for f in found for s in f.a_s], [s for f in found for s in f.b_s]))
    except Unavailable as error:
        return {**_row(case, None), "unavailable": str(error)}


def _started(case: Case, culm: Factory, torch: Factory, effort: Effort) -> Comparison:
    with ExitStack() as stack:
        theirs = stack.enter_context(closing(torch(case.spec, case.cut, case.schedule)))
        ours = stack.enter_context(closing(culm(case.spec, case.cut, case.schedule)))
        return measure(ours, theirs, effort)


def measure(a: Side, b: Side, effort: Effort) -> Comparison:
    """Alternating rounds of about `effort.round_s` each; the first two steps of a side set it up and do not count."""
    for side in (a, b):
        side.round(1)
    step_s = (a.round(1) + b.round(1)) / 2
    steps = steps_for(step_s, round_s=effort.round_s)
    return paired(a, b, rounds=effort.rounds // effort.starts, steps=steps, warmup=0)


def result(rows: Sequence[Row], *, workers: int, probes: Mapping[str, Probe]) -> Result:
    """The whole JSON: the rows, the median of their ratios, the probes, and what it was measured on."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    probed = {name: probes[name]() if name in probes else None for name in PROBES}
    return Result(
        rows=list(rows),
        ratio_median=median(ratios) if ratios else None,
        exact_cost=probed["exact_cost"],
        us_per_action=probed["us_per_action"],
        us_per_action_torch=probed["us_per_action_torch"],
        kept_bytes=probed["kept_bytes"],
        cores=cores(),
        workers=workers,
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def setting(cores: int, workers: int) -> str:
    """One sentence about the machine, with a warning beside it when workers have to share cores."""
    if cores >= workers:
        return f"{cores} cores for up to {workers} workers, one thread each"
    return (
        f"{cores} cores for up to {workers} workers: fewer cores than workers, so they share them, "
        "and the figures show the work of both sides more than their bubbles"
    )


def table(result: Result) -> Table:
    """The rows for people."""
    made = Table(title="seconds per step", caption=setting(result["cores"], result["workers"]))
    made.add_column("job")
    made.add_column("schedule")
    for name in ("stages", "micro-batches", "culm", "torch", "torch / culm", "95 %", "rounds", "cores"):
        made.add_column(name, justify="right")
    for row in result["rows"]:
        made.add_row(*_cells(row))
    if result["ratio_median"] is not None:
        made.add_section()
        made.add_row("median", "", "", "", "", "", f"{result['ratio_median']:.3f}", "", "", "")
    return made


def _cells(row: Row) -> list[str]:
    head = [row["job"], row["schedule"], str(row["stages"]), str(row["micro_batches"])]
    figures = [_number(row["culm"], 4), _number(row["torch"], 4), _number(row["ratio"], 3)]
    return [*head, *figures, _span(row), str(row["rounds"]), str(row["cores"])]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _span(row: Row) -> str:
    if row["ci"] is None:
        return row.get("unavailable", "-")
    return "{:.3f} to {:.3f}".format(*row["ci"])


def _told(row: Row, told: Callable[[Row], object]) -> Row:
    told(row)
    return row


def _announce(progress: Callable[[str], object], row: Row) -> None:
    what = f"{row['job']} {row['schedule']}, {row['stages']} stages"
    ratio = row["ratio"]
    progress(f"{what}: {_span(row)}" if ratio is None else f"{what}: torch / culm {ratio:.3f} ({_span(row)})")


def _case(spec: GPTSpec, schedule: str, depth: int) -> Case:
    cut = even_cut(spec.blocks + 2, depth * stages_per_worker(schedule))
    return Case(spec=spec, schedule=schedule, stages=depth, cut=cut)


def _row(case: Case, found: Comparison | None) -> Row:
    return Row(
        job=case.spec.name,
        schedule=case.schedule,
        stages=case.stages,
        micro_batches=case.spec.micro_batches,
        culm=median(found.a_s) if found else None,
        torch=median(found.b_s) if found else None,
        ratio=found.ratio_median if found else None,
        ci=list(found.ci) if found else None,
        rounds=len(found.ratios) if found else 0,
        cores=cores(),
    )
