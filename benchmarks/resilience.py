"""`culm bench resilience`: what a strategy costs while nothing befalls a run, and how long a loss holds it up.

Overhead: the job under the strategy beside the job under `none`, both idle between alternating rounds. Pause: the same
job with a node struck by SIGKILL, the hit step beside the median of the others. All of it is real compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NotRequired, Protocol, TypedDict

from rich.table import Table

from benchmarks import pipeline
from benchmarks.job import LARGE, SMALL, Cut, GPTSpec, even_cut
from benchmarks.paired import Comparison, compare
from benchmarks.pipeline import Pipeline, cores, measure, setting

STRATEGIES = ("reroute", "shadow-lazy", "shadow")
SCHEDULE = "1f1b"
_HIT = 4
"""The step that a kill hits. The first sets things up, the two after it show what is usual."""


class Watched(Pipeline, Protocol):
    """A side that leaves a summary."""

    summary: dict[str, Any]
    ended_at: list[float]


class Factory(Protocol):
    """Starts a run of a job: the cut, the schedule, and keywords of `CulmPipeline`."""

    def __call__(self, spec: GPTSpec, cut: Cut, schedule: str, **more: Any) -> Watched: ...


class Cost(TypedDict):
    """What one strategy costs. Overheads are shares of a step; None: this bench does not measure it."""

    overhead: float
    overhead_ci: list[float]
    vs_undisturbed: float | None
    vs_checkpoint: None
    pause_steps: float | None
    pause_bound_steps: None
    pause_s: float | None
    bubble_share: float | None
    pipelines: int
    stages: int
    rounds: int
    step_s: float
    none_step_s: float
    memory: dict[str, int]
    """Of the fullest worker under the strategy."""
    none_memory: NotRequired[dict[str, int]]


class Result(TypedDict):
    """The JSON of the bench."""

    strategies: dict[str, Cost]
    detect_ms: dict[str, float | None]
    compute: str
    job: str
    schedule: str
    cores: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Effort(pipeline.Effort):
    """How long the bench looks, at one job."""

    kills: int
    """Runs with a kill, for each strategy."""

    @property
    def spec(self) -> GPTSpec:
        return self.jobs[0]


FULL = Effort(jobs=(LARGE,), rounds=24, starts=4, round_s=0.5, kills=4)
QUICK = Effort(jobs=(SMALL,), rounds=6, starts=2, round_s=0.3, kills=2)


def run(
    culm: Factory,
    *,
    quick: bool = False,
    effort: Effort | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Result:
    """Measure every strategy; `progress` gets a line for each. Raises what a run raises."""
    chosen = effort or (QUICK if quick else FULL)
    shapes = {name: shape(name, cores()) for name in STRATEGIES}
    workers = max(pipelines * stages for pipelines, stages in shapes.values())
    progress(setting(cores(), workers))
    found: dict[str, Cost] = {}
    detected: list[float] = []
    for name, (pipelines, stages) in shapes.items():
        found[name] = overhead(culm, chosen, name, pipelines, stages)
        losses = [pause(culm, chosen, name, pipelines, stages, number) for number in range(chosen.kills)]
        detected += [ms for _, _, ms in losses]
        found[name] |= _paused(losses)
        progress(f"{name} ({pipelines} x {stages}): {_percent(found[name])}")
    return Result(
        strategies=found,
        detect_ms=spread(detected),
        compute="real",
        job=chosen.spec.name,
        schedule=SCHEDULE,
        cores=cores(),
        workers=workers,
    )


def shape(strategy: str, cores: int) -> tuple[int, int]:
    """(pipelines, stages), a core per worker where there are two at all. Re-routing needs peers; shadows are measured
    where nobody else holds a layer, and bubbles are fewest: in one pipeline."""
    if strategy == "reroute":
        return (2, 4) if cores >= 8 else (2, 2) if cores >= 4 else (2, 1)
    return (1, 4) if cores >= 4 else (1, 2)


def overhead(culm: Factory, effort: Effort, strategy: str, pipelines: int, stages: int) -> Cost:
    """The strategy beside `none`, in alternating rounds over several starts."""
    rounds, sides = [], []
    for number in range(effort.starts):
        comparison, both = _started(culm, effort, strategy, pipelines, stages, none_first=number % 2 == 0)
        rounds.append(comparison)
        sides.append(both)
    found = compare([s for c in rounds for s in c.a_s], [s for c in rounds for s in c.b_s])
    none, ours = sides[-1]
    return Cost(
        overhead=found.ratio_median - 1,
        overhead_ci=[limit - 1 for limit in found.ci],
        vs_undisturbed=None,
        vs_checkpoint=None,
        pause_steps=None,
        pause_bound_steps=None,
        pause_s=None,
        bubble_share=ours.summary.get("bubble_share"),
        pipelines=pipelines,
        stages=stages,
        rounds=len(found.ratios),
        step_s=median(found.b_s),
        none_step_s=median(found.a_s),
        memory=dict(ours.summary.get("memory", {})),
        none_memory=dict(none.summary.get("memory", {})),
    )


def _started(
    culm: Factory, effort: Effort, strategy: str, pipelines: int, stages: int, *, none_first: bool
) -> tuple[Comparison, tuple[Watched, Watched]]:
    """One start of both sides. Which comes first decides on which cores it lands, so they take turns in that, too."""
    cut = even_cut(effort.spec.blocks + 2, stages)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(closing(culm(effort.spec, cut, SCHEDULE, strategy=name, pipelines=pipelines)))
            for name in (("none", strategy) if none_first else (strategy, "none"))
        }
        none, ours = sides["none"], sides[strategy]
        compared = measure(none, ours, effort)
    return compared, (none, ours)


def pause(
    culm: Factory, effort: Effort, strategy: str, pipelines: int, stages: int, number: int
) -> tuple[float, float, float]:
    """(seconds that a loss held the run up, seconds of an undisturbed step, milliseconds until it was known). Which
    node, and how far into the step, changes with the number of the run."""
    cut = even_cut(effort.spec.blocks + 2, stages)
    node, micro = number % (pipelines * stages), number % (effort.spec.micro_batches // pipelines)
    at = f"{node % stages}B{micro + node // stages * effort.spec.micro_batches // pipelines}"
    kill = f"node={node} step={_HIT} at={at}"
    side = culm(effort.spec, cut, SCHEDULE, strategy=strategy, pipelines=pipelines, kills=(kill,))
    with closing(side):
        side.round(_HIT + 2)
    took = [after - before for before, after in pairwise(side.ended_at)]  # of step 1, 2, ...
    usual = median(took[: _HIT - 2])
    held_up = sum(took[_HIT - 2 : _HIT]) - 2 * usual  # the step before may not have been committed yet
    return held_up, usual, side.summary["recoveries"][0]["detect_ms"]


def _paused(losses: Sequence[tuple[float, float, float]]) -> Any:
    if not losses:
        return {}
    return {
        "pause_s": median(held_up for held_up, _, _ in losses),
        "pause_steps": median(held_up / usual for held_up, usual, _ in losses),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, nine tenths, and the worst."""
    if len(values) < 2:
        return dict.fromkeys(("median", "p90", "max"), values[0] if values else None)
    p90 = quantiles(values, n=10, method="inclusive")[8]
    return {"median": median(values), "p90": p90, "max": max(values)}


def table(result: Result) -> Table:
    """The figures for people."""
    made = Table(
        title=f"what strategies cost ({result['job']} job, {result['schedule']})",
        caption=setting(result["cores"], result["workers"]),
    )
    made.add_column("strategy")
    for name in ("shape", "overhead", "95 %", "pause", "kept", "peak memory", "under none"):
        made.add_column(name, justify="right")
    for name, cost in result["strategies"].items():
        made.add_row(name, *_cells(cost))
    return made


def _cells(cost: Cost) -> list[str]:
    low, high = cost["overhead_ci"]
    memory, none = cost["memory"], cost.get("none_memory", {})
    return [
        f"{cost['pipelines']} x {cost['stages']}",
        f"{cost['overhead']:+.1%}",
        f"{low:+.1%} to {high:+.1%}",
        "-" if cost["pause_s"] is None else f"{cost['pause_s']:.2f} s",
        _megabytes(memory.get("kept_bytes")),
        _megabytes(memory.get("peak_rss_bytes")),
        _megabytes(none.get("peak_rss_bytes")),
    ]


def _percent(cost: Cost) -> str:
    return "overhead {:+.2%} ({:+.2%} to {:+.2%})".format(cost["overhead"], *cost["overhead_ci"])


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.0f} MB"
