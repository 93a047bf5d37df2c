"""Overhead of a strategy in a failure-free run: the job with it next to the job with `none`. Real compute.

If there are enough cores, both run at the same time, each on its own cores, and swap cores after every round, so that
differences between cores and disturbances of the machine affect both. Otherwise they alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, TypedDict

from benchmarks.common.gpt_job import LARGE_GPT, SMALL_GPT, GPTSpec, StageCut, even_cut
from benchmarks.common.paired_rounds import PairedComparison, compare_rounds
from benchmarks.pipeline.pipeline_bench import ClosableSide, measure_sides

from benchmarks.common import cpu_pinning
from benchmarks.pipeline import pipeline_bench

STRATEGIES = ("reroute", "shadow-lazy", "shadow")
SCHEDULE = "1f1b"


class SummarizedSide(ClosableSide, Protocol):
    """A side that leaves a summary and can be moved to other cores."""

    summary: dict[str, Any]

    def move_to_cores(self, cores: Sequence[int]) -> None: ...


class StrategyRunFactory(Protocol):
    """Starts a run of a job: the cut, the schedule, and keywords of `CulmPipeline`."""

    def __call__(self, spec: GPTSpec, cut: StageCut, schedule: str, **options: Any) -> SummarizedSide: ...


class StrategyOverhead(TypedDict):
    """The cost of one strategy, as shares of a step."""

    overhead: float
    overhead_ci: list[float]
    bubble_share: float | None
    pipelines: int
    stages: int
    rounds: int
    together: bool
    """Whether both sides ran at the same time."""
    step_s: float
    none_step_s: float
    memory: dict[str, int]
    """Memory of the fullest worker under the strategy."""
    none_memory: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class OverheadEffort(pipeline_bench.PipelineEffort):
    """How long the bench measures, with one job."""

    concurrent_rounds: int
    """Rounds of one step, if both sides run at the same time."""

    @property
    def spec(self) -> GPTSpec:
        return self.jobs[0]


FULL = OverheadEffort(jobs=(LARGE_GPT,), rounds=24, starts=4, round_s=0.5, concurrent_rounds=160)
QUICK = OverheadEffort(jobs=(SMALL_GPT,), rounds=4, starts=2, round_s=0.2, concurrent_rounds=8)


def overhead_shape(strategy: str, cores: int) -> tuple[int, int]:
    """(pipelines, stages), with a core per worker if there are at least two. Re-routing needs peers; shadows are
    measured in one pipeline, where no other worker holds a layer and bubbles are smallest."""
    if strategy == "reroute":
        return (2, 4) if cores >= 8 else (2, 2) if cores >= 4 else (2, 1)
    return (1, 4) if cores >= 4 else (1, 2)


def measure_overhead(
    culm: StrategyRunFactory,
    effort: OverheadEffort,
    strategy: str,
    pipelines: int,
    stages: int,
    *,
    cores: Sequence[int] | None = None,
) -> StrategyOverhead:
    """Measure the strategy next to `none`, in rounds over several starts; `cores` are by default all that there are."""
    cores = cpu_pinning.available_cores() if cores is None else cores
    rounds, sides = [], []
    for number in range(effort.starts):
        comparison, pair = _measure_one_start(
            culm, effort, strategy, pipelines, stages, cores, none_first=number % 2 == 0
        )
        rounds.append(comparison)
        sides.append(pair)
    overall = compare_rounds([s for c in rounds for s in c.a_s], [s for c in rounds for s in c.b_s])
    none_side, strategy_side = sides[-1]
    return StrategyOverhead(
        overhead=overall.ratio_median - 1,
        overhead_ci=[limit - 1 for limit in overall.ci],
        bubble_share=strategy_side.summary.get("bubble_share"),
        pipelines=pipelines,
        stages=stages,
        rounds=len(overall.ratios),
        together=_runs_concurrently(cores, pipelines * stages),
        step_s=median(overall.b_s),
        none_step_s=median(overall.a_s),
        memory=dict(strategy_side.summary.get("memory", {})),
        none_memory=dict(none_side.summary.get("memory", {})),
    )


def _measure_one_start(
    culm: StrategyRunFactory,
    effort: OverheadEffort,
    strategy: str,
    pipelines: int,
    stages: int,
    cores: Sequence[int],
    *,
    none_first: bool,
) -> tuple[PairedComparison, tuple[SummarizedSide, SummarizedSide]]:
    """One start of both sides. The order decides on which cores a side starts, so it alternates between starts."""
    spec = replace(effort.spec, micro_batches=pipelines * effort.spec.micro_batches)
    cut = even_cut(spec.blocks + 2, stages)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(closing(culm(spec, cut, SCHEDULE, strategy=name, pipelines=pipelines)))
            for name in (("none", strategy) if none_first else (strategy, "none"))
        }
        none_side, strategy_side = sides["none"], sides[strategy]
        workers = pipelines * stages
        comparison = (
            measure_concurrently(
                none_side,
                strategy_side,
                cores[:workers],
                cores[workers : 2 * workers],
                effort.concurrent_rounds // effort.starts,
            )
            if _runs_concurrently(cores, workers)
            else measure_sides(none_side, strategy_side, effort)
        )
    return comparison, (none_side, strategy_side)


def _runs_concurrently(cores: Sequence[int], workers: int) -> bool:
    return len(cores) >= 2 * workers


def measure_concurrently(
    a: SummarizedSide, b: SummarizedSide, left: Sequence[int], right: Sequence[int], rounds: int
) -> PairedComparison:
    """Run both sides at the same time in rounds of one step, swapping cores each round; the first steps of a side are
    warm-up and do not count."""
    seconds: list[tuple[float, float]] = []
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda side: side.run_round(2), (a, b)))
        for number in range(-1, rounds):
            a_cores, b_cores = (left, right) if number % 2 else (right, left)
            a.move_to_cores(a_cores)
            b.move_to_cores(b_cores)
            a_s, b_s = threads.map(lambda side: side.run_round(1), (a, b))
            seconds.append((a_s, b_s))
    return compare_rounds([a_s for a_s, _ in seconds[1:]], [b_s for _, b_s in seconds[1:]])
