"""culm's side of the comparison: the same jobs on local nodes; the bench permits steps round by round."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from benchmarks.pipeline.torch_pipeline import stages_per_worker, worker_count

from benchmarks.common import cpu_pinning
from culm.config import RunConfig
from culm.errors import RunError
from culm.job import Job
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.replan.two_range_schedule import RANGES
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.training import pickle_job

if TYPE_CHECKING:
    from benchmarks.common.gpt_job import JobSpec, StageCut

UNLIMITED_STEPS = 1_000_000_000
T = TypeVar("T")


class CulmPipeline:
    """One culm pipeline, set up, and idle between rounds: nodes wait for permission in a blocking read."""

    def __init__(
        self,
        spec: JobSpec,
        cut: StageCut,
        schedule: str,
        *,
        fork_server: ForkServerClient,
        exact: bool = False,
        strategy: str = "none",
        pipelines: int = 1,
        kills: tuple[str, ...] = (),
        out: str | None = None,
        max_activations: int | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        # In a thread, because the launcher has to renew its lease during the rounds of the other side.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._permitted_steps = 0
        self.steps = 0
        """Steps in the ledger, once closed."""
        self.summary: dict[str, Any] = {}
        """Summary of the run, once closed."""
        self.ended_at: list[float] = []
        """Seconds into the run at which each step ended."""
        self.fork_server = fork_server
        self._pinned = spec.device != "cpu"
        self.cpu_s = 0.0
        """CPU seconds of all nodes in the last round, agents included."""
        planned = schedule == PLANNED  # it cuts the layers itself, into one or two segments per worker
        request = RunConfig(
            pipelines=pipelines,
            stages=worker_count(cut, schedule),
            schedule=schedule,
            ranges=RANGES if planned else stages_per_worker(schedule),
            strategy=strategy,
            cuts=None if planned else tuple(part.start for part in cut[1:]),
            kills=kills,
            out=out,
            max_activations=max_activations,
        )
        local = local_run(fork_server, pickle_job(job_from_spec(spec, exact=exact)), request, gate="outside")
        self._run: RunHandle = self._run_in_loop(self._stack.enter_async_context(local))

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def enter_alongside(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context that runs in the launcher process next to the run and ends with it."""
        return self._run_in_loop(self._stack.enter_async_context(context))

    def run_round(self, steps: int) -> float:
        """Seconds from the start until every node has finished that many steps."""
        before, start = group_cpu_seconds(self.fork_server.pid), time.perf_counter()
        self._run_in_loop(self._advance(steps))
        seconds = time.perf_counter() - start
        self.cpu_s = group_cpu_seconds(self.fork_server.pid) - before
        if not self._pinned:  # after the first round every worker exists
            cpu_pinning.pin_processes(cpu_pinning.worker_pids(self.fork_server.pid))
            self._pinned = True
        return seconds

    def move_to_cores(self, cores: Sequence[int]) -> None:
        """Pin the workers to these cores from now on."""
        cpu_pinning.pin_processes(cpu_pinning.worker_pids(self.fork_server.pid), cores)

    async def _advance(self, steps: int) -> None:
        self._permitted_steps += steps
        self._run.permit_steps_below(self._permitted_steps)
        for _ in range(steps):
            metrics = await self._run.next_step()
            if metrics is None:
                result = await self._run.wait_for_result()
                raise RunError(f"culm's side of the bench ended early: {result.message}")
            self.ended_at.append(metrics["t"])

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """End the nodes; the fork server stays."""
        if not self.closed:
            self.summary = self._run_in_loop(self._end())
            self.steps = int(self.summary.get("steps", 0))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> dict[str, Any]:
        self._run.finish_before(self._permitted_steps)
        result = await self._run.wait_for_result()
        await self._stack.aclose()
        return dict(result.summary or {})


class CulmPool:
    """Creates CulmPipelines, each from a fork server that no open pipeline uses."""

    def __init__(self) -> None:
        self.fork_server = ForkServerClient()
        """For runs that the caller starts while no pipeline is open."""
        self._fork_servers = [self.fork_server]
        self._open: list[CulmPipeline] = []

    def __call__(self, spec: JobSpec, cut: StageCut, schedule: str, **options: Any) -> CulmPipeline:
        """`options` are keywords of CulmPipeline."""
        self._open = [pipeline for pipeline in self._open if not pipeline.closed]
        new_pipeline = CulmPipeline(spec, cut, schedule, fork_server=self._unused_fork_server(), **options)
        self._open.append(new_pipeline)
        return new_pipeline

    def _unused_fork_server(self) -> ForkServerClient:
        in_use = [pipeline.fork_server for pipeline in self._open]
        for fork_server in self._fork_servers:
            if fork_server not in in_use:
                return fork_server
        self._fork_servers.append(ForkServerClient())
        return self._fork_servers[-1]

    def close(self) -> None:
        for fork_server in self._fork_servers:
            fork_server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def job_from_spec(spec: JobSpec, *, exact: bool = False) -> Job:
    """The spec as a user of culm would write it."""
    return Job(
        layers=list(spec.layers()),
        loss=spec.loss,
        optimizer=spec.optimizer,
        data=spec.data(),
        global_batch=spec.micro_batch * spec.micro_batches,
        micro_batch=spec.micro_batch,
        steps=UNLIMITED_STEPS,
        seed=spec.seed,
        exact=exact,
        clip_norm=spec.clip_norm,
        device=spec.device,
        precision=spec.precision,
    )


def group_cpu_seconds(group: int) -> float:
    """CPU time that the live processes of a group have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
