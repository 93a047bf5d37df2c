"""culm's side of the comparison: the same jobs on local nodes, with the gate in the bench's hand."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from benchmarks import pinned
from benchmarks.peer import stages_per_worker, workers_of
from culm.api import pickled
from culm.cluster.prepare import Request
from culm.errors import RunError
from culm.job import Job
from culm.providers.local import LocalNursery, LocalRun, local_run

if TYPE_CHECKING:
    from benchmarks.job import Cut, Spec

ENDLESS = 1_000_000_000
T = TypeVar("T")


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
        out: str | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        # In a thread, since the launcher has to renew its lease while the other side has its turn.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._done = 0
        self.steps = 0
        """Steps that the ledger has, once closed."""
        self.summary: dict[str, Any] = {}
        """Of the run, once closed."""
        self.ended_at: list[float] = []
        """Seconds into the run, for each step that has ended."""
        self.nursery = nursery
        self._pinned = False
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
            out=out,
        )
        opened = local_run(nursery, pickled(job_of(spec, exact=exact)), request)
        self._run: LocalRun = self._wait(self._stack.enter_async_context(opened))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def beside(self, context: AbstractAsyncContextManager[T]) -> T:
        """Something that goes on beside the run, in the process that launched it, and ends with it."""
        return self._wait(self._stack.enter_async_context(context))

    def round(self, steps: int) -> float:
        """Seconds from the word go to the moment when every node has finished that many steps."""
        before, start = cpu_seconds(self.nursery.pid), time.perf_counter()
        self._wait(self._advance(steps))
        seconds = time.perf_counter() - start
        self.cpu_s = cpu_seconds(self.nursery.pid) - before
        if not self._pinned:  # the first round sets things up: by its end every worker is there
            pinned.pin(pinned.workers(self.nursery.pid))
            self._pinned = True
        return seconds

    def move(self, cores: Sequence[int]) -> None:
        """From here on workers compute on these cores."""
        pinned.pin(pinned.workers(self.nursery.pid), cores)

    async def _advance(self, steps: int) -> None:
        self._done += steps
        self._run.permit(self._done)
        for _ in range(steps):
            metrics = await self._run.step()
            if metrics is None:
                result = await self._run.result()
                raise RunError(f"culm's side of the bench ended early: {result.message}")
            self.ended_at.append(metrics["t"])

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """End the nodes; the nursery stays."""
        if not self.closed:
            self.summary = self._wait(self._end())
            self.steps = int(self.summary.get("steps", 0))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> dict[str, Any]:
        self._run.finish(self._done)
        result = await self._run.result()
        await self._stack.aclose()
        return dict(result.summary or {})


class CulmPool:
    """Makes CulmPipelines, each out of a nursery that no open one uses."""

    def __init__(self) -> None:
        self.nursery = LocalNursery()
        """For runs that the caller starts, while no pipeline is open."""
        self._nurseries = [self.nursery]
        self._open: list[CulmPipeline] = []

    def __call__(self, spec: Spec, cut: Cut, schedule: str, **more: Any) -> CulmPipeline:
        """`more` are the keywords of CulmPipeline."""
        self._open = [one for one in self._open if not one.closed]
        made = CulmPipeline(spec, cut, schedule, nursery=self._free(), **more)
        self._open.append(made)
        return made

    def _free(self) -> LocalNursery:
        taken = [one.nursery for one in self._open]
        for nursery in self._nurseries:
            if nursery not in taken:
                return nursery
        self._nurseries.append(LocalNursery())
        return self._nurseries[-1]

    def close(self) -> None:
        for nursery in self._nurseries:
            nursery.close()

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
