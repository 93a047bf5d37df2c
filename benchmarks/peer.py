"""The side that culm is compared with: torch.distributed.pipelining over Gloo, used as its users use it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from benchmarks.ranks import Ranks
from culm.errors import ScheduleError

if TYPE_CHECKING:
    from benchmarks.job import Cut, Spec

STAGES_PER_WORKER = {"gpipe": 1, "1f1b": 1, "zb": 1, "interleaved": 2}


class TorchPipeline:
    """One pipeline in processes of its own, or in `ranks` that the caller keeps and closes.

    Raises ScheduleError for a schedule or cut that makes no sense, Unavailable where torch refuses one, and RunError
    when a process failed or died; after a RunError no process is left.
    """

    def __init__(self, spec: Spec, stages: Cut, schedule: str, *, ranks: Ranks | None = None) -> None:
        workers = workers_of(stages, schedule)
        self._own = ranks is None
        self._ranks = ranks if ranks is not None else Ranks(workers)
        self.cpu_s = 0.0
        """CPU seconds of all ranks in the last round."""
        try:
            self._ranks.ask("build", spec, stages, schedule)
        except BaseException:
            self.close()
            raise

    def round(self, steps: int) -> float:
        """Seconds from the word go to the moment when every rank has finished that many steps."""
        start = time.perf_counter()
        cpu = self._ranks.ask("round", steps)
        seconds = time.perf_counter() - start
        self.cpu_s = sum(cpu)
        return seconds

    def losses(self) -> list[float]:
        """Mean loss of every step so far."""
        return [loss for losses in self._ranks.ask("losses") for loss in losses]

    def weights(self) -> dict[str, Tensor]:
        """The parameters of all stages, as "layer number . parameter name"."""
        parts = self._ranks.ask("weights")
        return {name: torch.from_numpy(array) for part in parts for name, array in part.items()}

    def close(self) -> None:
        """End the processes, unless they are the caller's. Closing twice is fine."""
        if self._own:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TorchPool:
    """Makes TorchPipelines out of processes that are started once for each number of workers.

    Importing torch takes seconds of CPU a process: a table with many rows would otherwise mostly measure that.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}

    def __call__(self, spec: Spec, stages: Cut, schedule: str) -> TorchPipeline:
        workers = workers_of(stages, schedule)
        if workers not in self._ranks or not self._ranks[workers].pids:
            self._ranks[workers] = Ranks(workers)
        return TorchPipeline(spec, stages, schedule, ranks=self._ranks[workers])

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process of the pool that still runs."""
        return tuple(pid for ranks in self._ranks.values() for pid in ranks.pids)

    def close(self) -> None:
        """End all processes. Closing twice is fine."""
        for ranks in self._ranks.values():
            ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def stages_per_worker(schedule: str) -> int:
    """One stage on a worker, or two where the schedule interleaves them."""
    if schedule not in STAGES_PER_WORKER:
        raise ScheduleError(f"schedule is {schedule!r}: use one of {', '.join(STAGES_PER_WORKER)}")
    return STAGES_PER_WORKER[schedule]


def workers_of(stages: Cut, schedule: str) -> int:
    """How many workers the stages need."""
    each = stages_per_worker(schedule)
    if not stages or len(stages) % each:
        raise ScheduleError(f"stages has {len(stages)} ranges: {schedule} takes a multiple of {each}, at least {each}")
    return len(stages) // each
