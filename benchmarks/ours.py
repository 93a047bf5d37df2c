"""culm's side of the comparison: the same jobs on local nodes, with the gate in the bench's hand."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.peer import stages_per_worker, workers_of
from culm.api import pickled
from culm.cluster.prepare import Request
from culm.errors import RunError
from culm.job import Job
from culm.providers.local import LocalNursery, LocalRun, local_run

if TYPE_CHECKING:
    from benchmarks.job import Cut, Spec

ENDLESS = 1_000_000_000


class CulmPipeline:
    """One pipeline of culm's, set up and idle between rounds: nodes wait for permission in a blocking read."""

    def __init__(
        self,
        spec: Spec,
        cut: Cut,
        schedule: str,
        *,
        nursery: LocalNursery,
        exact: bool = False,
        strategy: str = "none",
        pipelines: int = 1,
        kills: tuple[str, ...] = (),
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._done = 0
        self.steps = 0
        """Steps that the ledger has, once closed."""
        self.summary: dict[str, Any] = {}
        """Of the run, once closed."""
        self.ended_at: list[float] = []
        """Seconds into the run, for each step that has ended."""
        self._group = nursery.pid
        self.cpu_s = 0.0
        """CPU seconds of all nodes in the last round, agents included."""
        request = Request(
            pipelines=pipelines,
            stages=workers_of(cut, schedule),
            schedule=schedule,
            ranges=stages_per_worker(schedule),
            strategy=strategy,
            cuts=tuple(part.start for part in cut[1:]),
            gate="outside",
            kills=kills,
        )
        opened = local_run(nursery, pickled(job_of(spec, exact=exact)), request)
        self._run: LocalRun = self._loop.run_until_complete(self._stack.enter_async_context(opened))

    def round(self, steps: int) -> float:
        """Seconds from the word go to the moment when every node has finished that many steps."""
        before, start = cpu_seconds(self._group), time.perf_counter()
        self._loop.run_until_complete(self._advance(steps))
        seconds = time.perf_counter() - start
        self.cpu_s = cpu_seconds(self._group) - before
        return seconds

    async def _advance(self, steps: int) -> None:
        self._done += steps
        self._run.permit(self._done)
        for _ in range(steps):
            metrics = await self._run.step()
            if metrics is None:
                result = await self._run.result()
                raise RunError(f"culm's side of the bench ended early: {result.message}")
            self.ended_at.append(metrics["t"])

    def close(self) -> None:
        """End the nodes; the nursery stays."""
        if not self._loop.is_closed():
            self._run.finish(self._done)
            result = self._loop.run_until_complete(self._run.result())
            self.summary = dict(result.summary or {})
            self.steps = int(self.summary.get("steps", 0))
            self._loop.run_until_complete(self._stack.aclose())
            self._loop.close()


class CulmPool:
    """Makes CulmPipelines out of one nursery."""

    def __init__(self) -> None:
        self.nursery = LocalNursery()

    def __call__(self, spec: Spec, cut: Cut, schedule: str, **more: Any) -> CulmPipeline:
        """`more` are the keywords of CulmPipeline."""
        return CulmPipeline(spec, cut, schedule, nursery=self.nursery, **more)

    def close(self) -> None:
        self.nursery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def job_of(spec: Spec, *, exact: bool = False) -> Job:
    """The spec as a user of culm would write it."""
    return Job(
        layers=list(spec.layers()),
        loss=spec.loss,
        optimizer=spec.optimizer,
        data=spec.data(),
        global_batch=spec.micro_batch * spec.micro_batches,
        micro_batch=spec.micro_batch,
        steps=ENDLESS,
        seed=spec.seed,
        exact=exact,
        device="cpu",
    )


def cpu_seconds(group: int) -> float:
    """CPU time that the living processes of a group have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
