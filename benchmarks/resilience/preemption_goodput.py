"""Goodput under preemptions: every strategy with the same preemptions, with emulated or real compute.

Preemptions are scheduled by time, one per this many failure-free steps, at seeded nodes and times; each node is
replaced by a new one after a while. All strategies get the same preemptions, for as long as their run takes. Nodes are
real processes and are killed by SIGKILL; with emulated compute only the layers sleep.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from benchmarks.resilience.compute_job import ComputeJob
from benchmarks.resilience.emulated_job import EmulatedJob
from benchmarks.resilience.parallel_runs import ParallelRuns

from culm.config import RunConfig
from culm.errors import NodeLost
from culm.market import NodeEvent
from culm.providers.local_provider import ForkServerClient, local_run
from culm.providers.trace_market import RentalSchedule
from culm.providers.trace_replay import replay_rental
from culm.runtime.clock import RealClock
from culm.training import pickle_job

TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class PreemptionScenario:
    """A job, its shape, and how often a node is lost. Times in failure-free steps."""

    pipelines: int
    stages: int
    micro_batches_per_pipeline: int
    """Micro-batches per pipeline."""
    action_s: float | None
    """Emulated compute: seconds of F, of I and of W in one stage for one micro-batch. None: a GPT with real compute."""
    steps: int
    steps_between_losses: float = 10.0
    replaced_after: float = 5.0
    schedule: str = "1f1b"
    seed: int = 0

    @property
    def nodes(self) -> int:
        return self.pipelines * self.stages

    @property
    def training_job(self) -> EmulatedJob | ComputeJob:
        batch = self.pipelines * self.micro_batches_per_pipeline
        if self.action_s is None:
            return ComputeJob(stages=self.stages, micro_batches=batch, steps=self.steps)
        return EmulatedJob(stages=self.stages, micro_batches=batch, action_s=self.action_s, steps=self.steps)

    def request(self, strategy: str, **options: Any) -> RunConfig:
        """`options` are fields of the RunConfig."""
        return RunConfig(
            pipelines=self.pipelines,
            stages=self.stages,
            schedule=self.schedule,
            strategy=strategy,
            cuts=self.training_job.cuts,
            **options,
        )

    def preemption_trace(self, step_s: float, *, notice_s: float = 0.0) -> RentalSchedule:
        """The preemptions. The first is in the middle of an interval. There are more than any run here can see."""
        rng = random.Random(self.seed)
        names = [f"node {number}" for number in range(self.nodes)]
        initial = tuple(NodeEvent(0.0, "add", node) for node in names)
        events = []
        for number in range(100 * max(1, round(self.steps / self.steps_between_losses))):
            at = (self.steps_between_losses * (number + 0.5) + rng.random() - 0.5) * step_s
            slot = rng.randrange(self.nodes)
            events.append(NodeEvent(at, "remove", names[slot]))
            names[slot] = f"in place of loss {number}"
            events.append(NodeEvent(at + self.replaced_after * step_s, "add", names[slot]))
        return RentalSchedule(initial, tuple(sorted(events, key=lambda event: event.t)), 0.0, notice_s)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    goodput: float
    """Counted samples per second, from the first step on; 0 if the run was lost."""
    steps_s: tuple[float, ...] = ()
    """Durations of the steps that directly followed the previous step."""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return median(self.steps_s)


def run_failure_free(scenario: PreemptionScenario, fork_server: ForkServerClient) -> FinishedRun:
    """A failure-free run with `none`: the reference of all others."""
    return _run_with_timeout(fork_server, scenario, scenario.request("none"), None)


def run_with_preemptions(
    scenario: PreemptionScenario, fork_server: ForkServerClient, strategy: str, step_s: float, **options: Any
) -> FinishedRun:
    """A run under the scenario's preemptions; `options` are fields of the RunConfig, and `notice_s`. A lost run counts
    as zero goodput: `none` promises no more."""
    notice_s = options.pop("notice_s", 0.0)
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        options.setdefault("out", str(Path(folder) / "run"))
        request = scenario.request(strategy, **options)
        return _run_with_timeout(fork_server, scenario, request, scenario.preemption_trace(step_s, notice_s=notice_s))


def _run_with_timeout(
    fork_server: ForkServerClient, scenario: PreemptionScenario, request: RunConfig, preemptions: RentalSchedule | None
) -> FinishedRun:
    return asyncio.run(asyncio.wait_for(_run_to_end(fork_server, scenario, request, preemptions), TIMEOUT_S))


async def _run_to_end(
    fork_server: ForkServerClient, scenario: PreemptionScenario, request: RunConfig, preemptions: RentalSchedule | None
) -> FinishedRun:
    step_times: list[tuple[int, float]] = []
    async with local_run(fork_server, pickle_job(scenario.training_job.build_job()), request) as run:
        replay = asyncio.create_task(replay_rental(preemptions, run, RealClock())) if preemptions is not None else None
        try:
            while (metrics := await run.next_step()) is not None:
                step_times.append((metrics["step"], metrics["t"]))
            result = await run.wait_for_result()
        finally:
            if replay is not None:
                replay.cancel()
    if result.summary is None:
        if isinstance(result.to_error(), NodeLost):
            return FinishedRun(0.0)
        raise result.to_error()
    steps = tuple(after - before for (a, before), (b, after) in pairwise(step_times) if b == a + 1)
    summary: dict[str, Any] = dict(result.summary)
    return FinishedRun(summary["goodput"], steps, summary)


@dataclass(frozen=True)
class TunedCheckpoint:
    """The checkpoint baseline at its best: warm restarts, with the best interval and waiting option."""

    run: FinishedRun
    every: int
    waits_for_node: bool
    """Whether a restart waits for a replacement of the lost node, instead of continuing with fewer pipelines."""


def checkpoint_variants(
    scenario: PreemptionScenario, step_s: float, *, every: tuple[int, ...], waits: tuple[bool, ...]
) -> list[Callable[[ForkServerClient], TunedCheckpoint]]:
    """The baseline with each combination."""
    return [partial(_run_checkpoint, scenario, step_s, n, wait) for n, wait in product(every, waits)]


def best_checkpoint(variants: Sequence[TunedCheckpoint]) -> TunedCheckpoint:
    """The best variant. Each is run only once, so luck favours the baseline."""
    return max(variants, key=lambda variant: variant.run.goodput)


def _run_checkpoint(
    scenario: PreemptionScenario, step_s: float, every: int, waits: bool, fork_server: ForkServerClient
) -> TunedCheckpoint:
    replace_within = 2 * scenario.replaced_after * step_s if waits else 0.0
    options = {"checkpoint_every": every, "replace_within": replace_within}
    return TunedCheckpoint(run_with_preemptions(scenario, fork_server, "checkpoint", step_s, **options), every, waits)


def measure_grid(
    scenario: PreemptionScenario,
    parallel_runs: ParallelRuns,
    cells: Sequence[tuple[float, float]],
    *,
    every: tuple[int, ...],
) -> list[GridCell]:
    """Re-routing next to the tuned baseline, by step length and frequency of losses."""
    scenarios = [
        replace(scenario, action_s=action_s, steps_between_losses=n, steps=round(2 * n)) for action_s, n in cells
    ]
    failure_free = parallel_runs.run_all([partial(run_failure_free, replace(each, steps=12)) for each in scenarios])
    rerouted = parallel_runs.run_all(
        [partial(_run_reroute, each, calm_run.step_s) for each, calm_run in zip(scenarios, failure_free, strict=True)]
    )
    baseline = [
        checkpoint_variants(each, calm_run.step_s, every=every, waits=(True,))
        for each, calm_run in zip(scenarios, failure_free, strict=True)
    ]
    variant_runs = parallel_runs.run_all([variant for variants in baseline for variant in variants])
    checkpoints = [best_checkpoint(variant_runs[i * len(every) : (i + 1) * len(every)]) for i in range(len(scenarios))]
    return [_make_cell(*cell) for cell in zip(scenarios, failure_free, rerouted, checkpoints, strict=True)]


def _run_reroute(scenario: PreemptionScenario, step_s: float, fork_server: ForkServerClient) -> FinishedRun:
    return run_with_preemptions(scenario, fork_server, "reroute", step_s)


def _make_cell(
    scenario: PreemptionScenario, failure_free: FinishedRun, rerouted: FinishedRun, checkpoint: TunedCheckpoint
) -> GridCell:
    return GridCell(
        step_s=failure_free.step_s,
        loss_every_steps=scenario.steps_between_losses,
        reroute=rerouted.goodput / failure_free.goodput,
        checkpoint=checkpoint.run.goodput / failure_free.goodput,
        ratio=rerouted.goodput / checkpoint.run.goodput,
        checkpoint_every=checkpoint.every,
    )


class GridCell(TypedDict):
    """One cell of the grid; goodput as shares of the failure-free run."""

    step_s: float
    loss_every_steps: float
    reroute: float
    checkpoint: float
    ratio: float
    checkpoint_every: int
