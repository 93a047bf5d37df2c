"""What a strategy costs while nothing befalls a run: the job under it beside the job under `none`. Real compute.

Where there are cores enough both run at the same time, each on its own, and change places after every round: what a
core is worth, and what befalls the machine, meets both. Elsewhere they take turns, each idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, TypedDict

from benchmarks import pinned, pipeline
from benchmarks.job import LARGE, SMALL, Cut, GPTSpec, even_cut
from benchmarks.paired import Comparison, compare
from benchmarks.pipeline import Pipeline, measure

STRATEGIES = ("reroute", "shadow-lazy", "shadow")
SCHEDULE = "1f1b"


class Watched(Pipeline, Protocol):
    """A side that leaves a summary, and can be moved to other cores."""

    summary: dict[str, Any]

    def move(self, cores: Sequence[int]) -> None: ...


class Factory(Protocol):
    """Starts a run of a job: the cut, the schedule, and keywords of `CulmPipeline`."""

    def __call__(self, spec: GPTSpec, cut: Cut, schedule: str, **more: Any) -> Watched: ...


class Overhead(TypedDict):
    """What one strategy costs, as shares of a step."""

    overhead: float
    overhead_ci: list[float]
    bubble_share: float | None
    pipelines: int
    stages: int
    rounds: int
    together: bool
    """Whether both ran at the same time."""
    step_s: float
    none_step_s: float
    memory: dict[str, int]
    """Of the fullest worker under the strategy."""
    none_memory: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Effort(pipeline.Effort):
    """How long the bench looks, at one job."""

    rounds_together: int
    """Of one step, where both run at the same time."""

    @property
    def spec(self) -> GPTSpec:
        return self.jobs[0]


FULL = Effort(jobs=(LARGE,), rounds=24, starts=4, round_s=0.5, rounds_together=160)
QUICK = Effort(jobs=(SMALL,), rounds=4, starts=2, round_s=0.2, rounds_together=8)


def shape(strategy: str, cores: int) -> tuple[int, int]:
    """(pipelines, stages), a core per worker where there are two at all. Re-routing needs peers; shadows are measured
    where nobody else holds a layer, and bubbles are fewest: in one pipeline."""
    if strategy == "reroute":
        return (2, 4) if cores >= 8 else (2, 2) if cores >= 4 else (2, 1)
    return (1, 4) if cores >= 4 else (1, 2)


def overhead(
    culm: Factory, effort: Effort, strategy: str, pipelines: int, stages: int, *, cores: Sequence[int] | None = None
) -> Overhead:
    """The strategy beside `none`, in rounds over several starts; `cores` are by default all that there are."""
    cores = pinned.places() if cores is None else cores
    rounds, sides = [], []
    for number in range(effort.starts):
        comparison, both = _started(culm, effort, strategy, pipelines, stages, cores, none_first=number % 2 == 0)
        rounds.append(comparison)
        sides.append(both)
    found = compare([s for c in rounds for s in c.a_s], [s for c in rounds for s in c.b_s])
    none, ours = sides[-1]
    return Overhead(
        overhead=found.ratio_median - 1,
        overhead_ci=[limit - 1 for limit in found.ci],
        bubble_share=ours.summary.get("bubble_share"),
        pipelines=pipelines,
        stages=stages,
        rounds=len(found.ratios),
        together=_together(cores, pipelines * stages),
        step_s=median(found.b_s),
        none_step_s=median(found.a_s),
        memory=dict(ours.summary.get("memory", {})),
        none_memory=dict(none.summary.get("memory", {})),
    )


def _started(
    culm: Factory,
    effort: Effort,
    strategy: str,
    pipelines: int,
    stages: int,
    cores: Sequence[int],
    *,
    none_first: bool,
) -> tuple[Comparison, tuple[Watched, Watched]]:
    """One start of both sides. Which comes first decides on which cores it lands, so they take turns in that, too."""
    spec = replace(effort.spec, micro_batches=pipelines * effort.spec.micro_batches)
    cut = even_cut(spec.blocks + 2, stages)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(closing(culm(spec, cut, SCHEDULE, strategy=name, pipelines=pipelines)))
            for name in (("none", strategy) if none_first else (strategy, "none"))
        }
        none, ours = sides["none"], sides[strategy]
        workers = pipelines * stages
        compared = (
            beside(none, ours, cores[:workers], cores[workers : 2 * workers], effort.rounds_together // effort.starts)
            if _together(cores, workers)
            else measure(none, ours, effort)
        )
    return compared, (none, ours)


def _together(cores: Sequence[int], workers: int) -> bool:
    return len(cores) >= 2 * workers


def beside(a: Watched, b: Watched, left: Sequence[int], right: Sequence[int], rounds: int) -> Comparison:
    """Both at the same time in rounds of one step, in exchange on these cores and on those; the first steps of a side
    set it up and do not count."""
    seconds: list[tuple[float, float]] = []
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda side: side.round(2), (a, b)))
        for number in range(-1, rounds):
            here, there = (left, right) if number % 2 else (right, left)
            a.move(here)
            b.move(there)
            ours, theirs = both.map(lambda side: side.round(1), (a, b))
            seconds.append((ours, theirs))
    return compare([ours for ours, _ in seconds[1:]], [theirs for _, theirs in seconds[1:]])
