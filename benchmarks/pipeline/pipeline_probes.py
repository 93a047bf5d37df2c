"""Additional figures of the pipeline bench: the costs of the interpreter, of `exact` and of kept tensors."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from benchmarks.common.gpt_job import LARGE_GPT, SMALL_GPT, GPTSpec, even_cut
from benchmarks.common.paired_rounds import measure_paired
from benchmarks.pipeline.culm_pipeline import CulmPool, job_from_spec
from benchmarks.pipeline.torch_overhead import NoOpSpec, torch_us_per_action
from torch import Tensor

from culm.runtime.clock import RealClock
from culm.runtime.compute.segment import MicroBatchResult, Segment
from culm.runtime.epoch import Epoch, Member
from culm.runtime.epoch_context import EpochContext
from culm.runtime.executor import Executor
from culm.runtime.grad_reduce import SegmentGradientReducer
from culm.runtime.optimizer_step import OptimizerStep
from culm.runtime.replica_builder import build_replica
from culm.runtime.worker_state import WorkerState
from culm.schedule import generate_plan
from culm.transport.frames.simulated_network import SimulatedNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.common.gpt_job import JobSpec

_EMPTY_ACTIVATION = torch.zeros(1, 1)


def us_per_action(*, stages: int = 4, micro_batches: int = 32, steps: int = 20, rounds: int = 5) -> float:
    """Microseconds per action of culm's interpreter with F, I and W replaced by no-ops.

    All stages in one process over a simulated network: the loop, the data, the statistics and the optimizer step.
    """

    def forward(
        self: Segment, step: int, micro: int, *_: Any, **__: Any
    ) -> tuple[tuple[Tensor, ...], MicroBatchResult]:
        del step, micro
        return (() if self.is_last else (_EMPTY_ACTIVATION,)), MicroBatchResult(
            loss=_EMPTY_ACTIVATION.sum() if self.is_last else None
        )

    def backward_half(self: Segment, *_: Any) -> tuple[Tensor, ...]:
        del self
        return (_EMPTY_ACTIVATION,)

    spec = NoOpSpec(depth=stages, micro_batches=micro_batches)
    with (
        patch.object(Segment, "forward", forward),
        patch.object(Segment, "backward_input", backward_half),
        patch.object(Segment, "backward_weight", backward_half),
    ):
        times = [asyncio.run(_time_steps(spec, stages, "zb", steps)) for _ in range(rounds)]
    return 1e6 * median(times) / (steps * stages * micro_batches * 3)


def torch_cpu_us_per_action() -> float:
    """The same for torch's schedule runtime: one rank, a module that adds one number. CPU microseconds per action."""
    return torch_us_per_action().cpu_us


async def _time_steps(spec: JobSpec, stages: int, schedule: str, steps: int) -> float:
    workers = await _build_executors(spec, stages, schedule)

    async def run_steps(state: WorkerState, executor: Executor, optimizer_step: OptimizerStep) -> None:
        for step in range(steps):
            await executor.run_step(step)
            await optimizer_step.run(step, list(state.replicas.values()))
            state.drop_committed(step)

    start = time.perf_counter()
    await asyncio.gather(*(run_steps(*worker) for worker in workers))
    return time.perf_counter() - start


async def _build_executors(
    spec: JobSpec, stages: int, schedule: str, *, keeps_outputs: bool = False
) -> list[tuple[WorkerState, Executor, OptimizerStep]]:
    """Executors of one pipeline over a simulated network, without agents and leader."""
    network, job = SimulatedNetwork(), job_from_spec(spec)
    plan = generate_plan(schedule, pipelines=1, stages=stages, micro_batches=job.micro_batches)
    depth = len(job.layers)
    cuts = [depth * stage // stages for stage in range(stages + 1)]
    epoch = Epoch(
        number=1,
        leader="nobody",
        members=tuple(Member(w, f"worker-{w}") for w in range(stages)),
        segments=tuple(pairwise(cuts)),
        plan=plan.to_text(),
        evaluation_plan=None,
        start=0,
        end_step=job.steps,
        weighted_loss=False,
        keeps_outputs=keeps_outputs,
    )
    workers = []
    for slot in range(stages):
        state = WorkerState(job, torch.device("cpu"))
        state.replicas[slot] = await build_replica(RealClock(), job, epoch.segments, stages, slot, state.device, 0)
        context = EpochContext.create(epoch, slot, state, network.endpoint(f"worker-{slot}"), RealClock())
        reducer = SegmentGradientReducer(context)
        await reducer.join_groups()
        workers.append((state, Executor(context, reducer), OptimizerStep(context)))
    return workers


def kept_bytes(spec: GPTSpec = LARGE_GPT, *, stages: int = 4) -> dict[str, int]:
    """Bytes that the fullest worker keeps until a step commits (its sent tensors), with the settings."""

    async def measure() -> dict[str, int]:
        workers = await _build_executors(replace(spec, blocks=stages), stages, "1f1b", keeps_outputs=True)
        await asyncio.gather(*(executor.run_step(0) for _, executor, _ in workers))
        return {
            "kept": max(state.peak_kept_bytes for state, _, _ in workers),
            "micro_batches": spec.micro_batches,
            "stages": stages,
        }

    return asyncio.run(measure())


def exact_cost(pool: CulmPool, *, rounds: int, stages: int = 2, spec: GPTSpec = SMALL_GPT, steps: int = 5) -> float:
    """Seconds of a step with `exact` divided by seconds without, median of alternating rounds."""
    cut = even_cut(spec.blocks + 2, stages)
    exact, fast = pool(spec, cut, "1f1b", exact=True), pool(spec, cut, "1f1b")
    try:
        for side in (exact, fast):
            side.run_round(2)
        comparison = measure_paired(fast, exact, rounds=rounds, steps=steps, warmup=1)
    finally:
        exact.close()
        fast.close()
    return comparison.ratio_median


def list_probes(pool: CulmPool, *, quick: bool) -> dict[str, Callable[[], Any]]:
    """All probes, by their names in the bench's JSON."""
    return {
        "exact_cost": lambda: exact_cost(pool, rounds=6 if quick else 12),
        "us_per_action": us_per_action,
        "us_per_action_torch": torch_cpu_us_per_action,
        "kept_bytes": kept_bytes,
    }
