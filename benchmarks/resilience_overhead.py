"""What a strategy costs while nothing befalls a run: the job under it beside the job under `none`, both idle between
alternating rounds. This is real compute.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, TypedDict

from benchmarks import pipeline
from benchmarks.job import LARGE, SMALL, Cut, GPTSpec, even_cut
from benchmarks.paired import Comparison, compare
from benchmarks.pipeline import Pipeline, measure

STRATEGIES = ("reroute", "shadow-lazy", "shadow")
SCHEDULE = "1f1b"


class Watched(Pipeline, Protocol):
    """A side that leaves a summary."""

    summary: dict[str, Any]


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
    step_s: float
    none_step_s: float
    memory: dict[str, int]
    """Of the fullest worker under the strategy."""
    none_memory: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Effort(pipeline.Effort):
    """How long the bench looks, at one job."""

    @property
    def spec(self) -> GPTSpec:
        return self.jobs[0]


FULL = Effort(jobs=(LARGE,), rounds=24, starts=4, round_s=0.5)
QUICK = Effort(jobs=(SMALL,), rounds=4, starts=2, round_s=0.2)


def shape(strategy: str, cores: int) -> tuple[int, int]:
    """(pipelines, stages), a core per worker where there are two at all. Re-routing needs peers; shadows are measured
    where nobody else holds a layer, and bubbles are fewest: in one pipeline."""
    if strategy == "reroute":
        return (2, 4) if cores >= 8 else (2, 2) if cores >= 4 else (2, 1)
    return (1, 4) if cores >= 4 else (1, 2)


def overhead(culm: Factory, effort: Effort, strategy: str, pipelines: int, stages: int) -> Overhead:
    """The strategy beside `none`, in alternating rounds over several starts."""
    rounds, sides = [], []
    for number in range(effort.starts):
        comparison, both = _started(culm, effort, strategy, pipelines, stages, none_first=number % 2 == 0)
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
        step_s=median(found.b_s),
        none_step_s=median(found.a_s),
        memory=dict(ours.summary.get("memory", {})),
        none_memory=dict(none.summary.get("memory", {})),
    )


def _started(
    culm: Factory, effort: Effort, strategy: str, pipelines: int, stages: int, *, none_first: bool
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
        compared = measure(none, ours, effort)
    return compared, (none, ours)
