"""Figures that stand beside the table of the pipeline bench: what the interpreter, `exact` and kept tensors cost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.job import LARGE, SMALL, GPTSpec, even_cut
from benchmarks.ours import CulmPool, job_of
from benchmarks.overhead import NothingSpec, torch_us_per_action
from benchmarks.paired import paired
from culm.runtime.building import built
from culm.runtime.clock import RealClock
from culm.runtime.closing import Closing
from culm.runtime.desk import Desk
from culm.runtime.epoch import Epoch, Member
from culm.runtime.executor import Executor
from culm.runtime.segment import Outcome, Segment
from culm.schedule import generate
from culm.transport.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.job import Spec

_NOTHING = torch.zeros(1, 1)


def us_per_action(*, stages: int = 4, micro_batches: int = 32, steps: int = 20, rounds: int = 5) -> float:
    """Microseconds per action of culm's interpreter with F, I and W replaced by nothing.

    All stages in one process over memory: the loop, the data, the book and the closing of the step, no network.
    """

    def forward(self: Segment, step: int, micro: int, *_: Any, **__: Any) -> tuple[tuple[Tensor, ...], Outcome]:
        del step, micro
        return (() if self.last else (_NOTHING,)), Outcome(loss=_NOTHING.sum() if self.last else None)

    def halved(self: Segment, *_: Any) -> tuple[Tensor, ...]:
        del self
        return (_NOTHING,)

    spec = NothingSpec(depth=stages, micro_batches=micro_batches)
    with (
        patch.object(Segment, "forward", forward),
        patch.object(Segment, "backward_input", halved),
        patch.object(Segment, "backward_weight", halved),
    ):
        times = [asyncio.run(_timed(spec, stages, "zb", steps)) for _ in range(rounds)]
    return 1e6 * median(times) / (steps * stages * micro_batches * 3)


def torch_share() -> float:
    """The same of torch's schedule runtime: one rank, a module that adds one number. CPU microseconds per action."""
    return torch_us_per_action().cpu_us


async def _timed(spec: Spec, stages: int, schedule: str, steps: int) -> float:
    workers = await _cluster(spec, stages, schedule)

    async def work(executor: Executor, closing: Closing) -> None:
        for step in range(steps):
            await executor.step(step)
            await closing.close(step, list(executor.desk.holdings.values()))
            executor.desk.committed(step)

    start = time.perf_counter()
    await asyncio.gather(*(work(*worker) for worker in workers))
    return time.perf_counter() - start


async def _cluster(spec: Spec, stages: int, schedule: str, *, kept: bool = False) -> list[tuple[Executor, Closing]]:
    """Executors of one pipeline over memory, without agents and leader."""
    network, job = MemoryNetwork(), job_of(spec)
    plan = generate(schedule, pipelines=1, stages=stages, micro_batches=job.micro_batches)
    depth = len(job.layers)
    cuts = [depth * stage // stages for stage in range(stages + 1)]
    epoch = Epoch(
        number=1,
        leader="nobody",
        members=tuple(Member(w, f"worker-{w}") for w in range(stages)),
        segments=tuple(pairwise(cuts)),
        plan=plan.to_text(),
        evaluation=None,
        start=0,
        steps=job.steps,
        weighted=False,
        kept=kept,
    )
    made = []
    for slot in range(stages):
        desk = Desk(job, torch.device("cpu"))
        desk.holdings[slot] = await built(RealClock(), job, epoch.segments, stages, slot, desk.device, 0)
        executor = Executor(job, epoch, slot, desk, network.endpoint(f"worker-{slot}"), RealClock())
        await executor.join()
        made.append((executor, Closing(executor)))
    return made


def kept_bytes(spec: GPTSpec = LARGE, *, stages: int = 4) -> dict[str, int]:
    """Bytes that the fullest worker keeps until a step commits (what it sent), beside those of its parameters."""

    async def measured() -> dict[str, int]:
        workers = await _cluster(replace(spec, blocks=stages), stages, "1f1b", kept=True)
        await asyncio.gather(*(executor.step(0) for executor, _ in workers))
        fullest = max((executor for executor, _ in workers), key=lambda e: e.desk.kept_peak)
        return {"kept": fullest.desk.kept_peak, "micro_batches": spec.micro_batches, "stages": stages}

    return asyncio.run(measured())


def exact_cost(pool: CulmPool, *, rounds: int, stages: int = 2, spec: GPTSpec = SMALL, steps: int = 5) -> float:
    """Seconds of a step with `exact` over seconds without, median of alternating rounds."""
    cut = even_cut(spec.blocks + 2, stages)
    exact, fast = pool(spec, cut, "1f1b", exact=True), pool(spec, cut, "1f1b")
    try:
        for side in (exact, fast):
            side.round(2)
        found = paired(fast, exact, rounds=rounds, steps=steps, warmup=1)
    finally:
        exact.close()
        fast.close()
    return found.ratio_median


def probes(pool: CulmPool, *, quick: bool) -> dict[str, Callable[[], Any]]:
    """All of them, by the names of the bench's JSON."""
    return {
        "exact_cost": lambda: exact_cost(pool, rounds=6 if quick else 12),
        "us_per_action": us_per_action,
        "us_per_action_torch": torch_share,
        "kept_bytes": kept_bytes,
    }
