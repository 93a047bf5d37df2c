"""How long a loss delays real nodes, next to the least possible delay: SIGKILL at seeded actions of a step, one run
each, with emulated or real compute. The bound is that of `benchmarks.resilience.simulated_pause` for the same shape,
strategy and kill point.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.resilience.parallel_runs import ParallelRuns
from benchmarks.resilience.preemption_goodput import PreemptionScenario

from benchmarks.resilience import simulated_pause as simulated
from culm.providers.local_provider import ForkServerClient, local_run
from culm.training import pickle_job

STRATEGIES = ("reroute", "shadow", "shadow-lazy")
PIPELINES, MICRO_BATCHES_PER_PIPELINE = 2, 4
HIT_STEP, STEPS = 6, 9
"""The first step is warm-up, the next four show the usual duration; the step before the hit one may still be open."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RealPause:
    """One loss: the delay of the run, the duration of a step, and the bound in steps."""

    pause_s: float
    step_s: float
    bound_steps: float

    @property
    def pause_steps(self) -> float:
        return self.pause_s / self.step_s

    @property
    def is_within_bound(self) -> bool:
        """Whether the pause is at most the bound plus a tenth of a step plus half a second."""
        return self.pause_s <= (self.bound_steps + 0.1) * self.step_s + 0.5


def measure_real_pauses(
    parallel_runs: ParallelRuns, strategy: str, *, kills: int, action_s: float | None, seed: int = 0
) -> list[RealPause]:
    """Measure that many losses, each at a random point of the step. `action_s` is None for real compute."""
    setup, job = simulated.prepare_setup(strategy, "1f1b", PIPELINES, MICRO_BATCHES_PER_PIPELINE)
    points = random.Random(seed).choices(simulated.kill_points(setup), k=kills)
    distinct_points = sorted(set(points))
    bounds = {(pause.node, pause.at): pause.bound for pause in simulated.measure_pauses(setup, job, distinct_points)}
    kills_by_run = [(), *((f"node={node} step={HIT_STEP} at={at}",) for node, at in points)]
    (failure_free_ends, _), *disturbed = parallel_runs.run_all(
        [partial(_run_with_timeout, strategy, action_s, kills_of_run) for kills_of_run in kills_by_run]
    )
    return [
        pause_of_run(step_ends, failure_free_ends, summary["recoveries"][0]["step"], bounds[point])
        for point, (step_ends, summary) in zip(points, disturbed, strict=True)
    ]


def pause_of_run(
    step_ends: Sequence[float], failure_free_ends: Sequence[float], last_open_step: int, bound: float
) -> RealPause:
    """How much later the last open step ended than in a failure-free run, scaled to the speed before the loss.

    Only commit times are known. With shadows a step commits when the shadow replicas have run it too: in a failure-free
    run about a step later, except for the last one. The steps that a loss leaves open commit when all replicas have
    them.
    """
    last_step_before = HIT_STEP - 2
    pace = (step_ends[last_step_before] - step_ends[0]) / (failure_free_ends[last_step_before] - failure_free_ends[0])
    step_s = median(later - earlier for earlier, later in pairwise(failure_free_ends[:-1]))
    shadow_delay_s = step_s - (failure_free_ends[-1] - failure_free_ends[-2])
    expected = step_ends[last_step_before] + pace * (
        failure_free_ends[last_open_step] - shadow_delay_s - failure_free_ends[last_step_before]
    )
    return RealPause(step_ends[last_open_step] - expected, pace * step_s, bound)


def _run_with_timeout(
    strategy: str, action_s: float | None, kills: tuple[str, ...], fork_server: ForkServerClient
) -> tuple[list[float], dict[str, Any]]:
    return asyncio.run(asyncio.wait_for(_run_to_end(fork_server, strategy, action_s, kills), TIMEOUT_S))


async def _run_to_end(
    fork_server: ForkServerClient, strategy: str, action_s: float | None, kills: tuple[str, ...]
) -> tuple[list[float], dict[str, Any]]:
    """The commit time of each step, and the summary."""
    scenario = PreemptionScenario(
        pipelines=PIPELINES,
        stages=simulated.STAGES,
        micro_batches_per_pipeline=MICRO_BATCHES_PER_PIPELINE,
        action_s=action_s,
        steps=STEPS,
    )
    request = scenario.request(strategy, kills=kills)
    job = scenario.training_job.build_job()
    step_ends: list[float] = []
    async with local_run(fork_server, pickle_job(job), request) as run:
        while (metrics := await run.next_step()) is not None:
            step_ends.append(metrics["t"])
        result = await run.wait_for_result()
    if result.summary is None:
        raise result.to_error()
    return step_ends, dict(result.summary)


def summarize_pauses(pauses: Sequence[RealPause]) -> dict[str, float | None]:
    """Medians, with the keys of the bench's JSON."""
    if not pauses:
        return dict.fromkeys(("pause_s", "pause_steps", "pause_bound_steps", "pause_within", "pause_step_s"))
    return {
        "pause_s": median(pause.pause_s for pause in pauses),
        "pause_steps": median(pause.pause_steps for pause in pauses),
        "pause_bound_steps": median(pause.bound_steps for pause in pauses),
        "pause_within": sum(pause.is_within_bound for pause in pauses) / len(pauses),
        "pause_step_s": median(pause.step_s for pause in pauses),
    }
