"""The side that culm is compared with: torch.distributed.pipelining over Gloo or NCCL, as its users use it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import torch
from benchmarks.pipeline.rank_processes import RankProcesses
from torch import Tensor

from culm.errors import ScheduleError

if TYPE_CHECKING:
    from benchmarks.common.gpt_job import GPTSpec, JobSpec, StageCut
    from benchmarks.models.llama_spec import LlamaSpec

STAGES_PER_WORKER = {"gpipe": 1, "1f1b": 1, "zb": 1, "planned": 1, "interleaved": 2, "zbv": 2}


class TorchPipeline:
    """One pipeline in its own processes, or in `ranks` that the caller keeps and closes; or several pipelines, whose
    gradients DistributedDataParallel sums.

    Raises ScheduleError for an invalid schedule or cut, TorchUnavailable if torch refuses it, and RunError if a process
    failed or died; after a RunError no process is left.
    """

    def __init__(
        self,
        spec: JobSpec,
        stages: StageCut,
        schedule: str,
        *,
        ranks: RankProcesses | None = None,
        pipelines: int = 1,
    ) -> None:
        workers = pipelines * worker_count(stages, schedule)
        self._owns_ranks = ranks is None
        self._ranks = ranks if ranks is not None else RankProcesses(workers, spec.device)
        self.cpu_s = 0.0
        """CPU seconds of all ranks in the last round."""
        try:
            self._ranks.call_all("build", spec, stages, schedule, pipelines)
        except BaseException:
            self.close()
            raise

    def run_round(self, steps: int) -> float:
        """Seconds from the start until every rank has finished that many steps."""
        start = time.perf_counter()
        cpu = self._ranks.call_all("round", steps)
        seconds = time.perf_counter() - start
        self.cpu_s = sum(cpu)
        return seconds

    def losses(self) -> list[float]:
        """Mean loss of every step so far."""
        return [loss for losses in self._ranks.call_all("losses") for loss in losses]

    def weights(self) -> dict[str, Tensor]:
        """The parameters of all stages, as "layer number . parameter name"."""
        parts = self._ranks.call_all("weights")
        return {name: torch.from_numpy(array) for part in parts for name, array in part.items()}

    def close(self) -> None:
        """End the processes, unless they are the caller's. May be called twice."""
        if self._owns_ranks:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PlainLoop:
    """A model in a process of its own, without pipelines: the loop that a user would write."""

    def __init__(self, spec: LlamaSpec | GPTSpec, *, ranks: RankProcesses | None = None) -> None:
        self._owns_ranks = ranks is None
        self._ranks = ranks if ranks is not None else RankProcesses(1, spec.device)
        self._ranks.call_all("build_plain", spec)

    def run_round(self, steps: int) -> float:
        """Seconds that these steps took."""
        start = time.perf_counter()
        self._ranks.call_all("plain_round", steps)
        return time.perf_counter() - start

    def losses(self) -> list[float]:
        """Mean loss of every step so far."""
        return [loss for losses in self._ranks.call_all("losses") for loss in losses]

    def close(self) -> None:
        """End the process, unless it is the caller's. May be called twice."""
        if self._owns_ranks:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TorchPool:
    """Creates TorchPipelines from processes that are started once for each number of workers.

    Importing torch takes seconds of CPU per process: a table with many rows would otherwise mostly measure that.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, RankProcesses] = {}

    def __call__(self, spec: JobSpec, stages: StageCut, schedule: str) -> TorchPipeline:
        workers = worker_count(stages, schedule)
        if workers not in self._ranks or not self._ranks[workers].pids:
            self._ranks[workers] = RankProcesses(workers)
        return TorchPipeline(spec, stages, schedule, ranks=self._ranks[workers])

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process of the pool that still runs."""
        return tuple(pid for ranks in self._ranks.values() for pid in ranks.pids)

    def close(self) -> None:
        """End all processes. May be called twice."""
        for ranks in self._ranks.values():
            ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def stages_per_worker(schedule: str) -> int:
    """One stage per worker, or two if the schedule interleaves them. Raises ScheduleError for an unknown schedule."""
    if schedule not in STAGES_PER_WORKER:
        raise ScheduleError(f"schedule is {schedule!r}: use one of {', '.join(STAGES_PER_WORKER)}")
    return STAGES_PER_WORKER[schedule]


def worker_count(stages: StageCut, schedule: str) -> int:
    """How many workers the stages need."""
    per_worker = stages_per_worker(schedule)
    if not stages or len(stages) % per_worker:
        raise ScheduleError(
            f"stages has {len(stages)} ranges: {schedule} takes a multiple of {per_worker}, at least {per_worker}"
        )
    return len(stages) // per_worker
