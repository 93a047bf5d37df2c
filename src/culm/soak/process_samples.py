"""Memory, open files and number of the processes of a run, sampled from /proc, and their growth."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_END_SAMPLES = 5
"""Samples at the end of a process whose median is what it had then: one alone may be in the middle of a recovery."""
_MAX_POINTS = 150
"""Samples of a process from which its growth is computed; more are thinned out."""


class ProcessSample(NamedTuple):
    """One process at one time."""

    t: float
    """Seconds since the start of the soak."""
    pid: int
    role: str
    """supervisor, fork server, etcd, leader (the agent that leads), agent or worker."""
    memory: int
    """Resident bytes of its own: without pages of files, such as the code of libraries, which all processes share and
    the kernel drops on demand."""
    files: int
    """Open files."""


class MemoryGrowth(NamedTuple):
    """How the memory of a process has grown in one role, after the warm-up."""

    role: str
    pid: int
    mb_per_h: float
    observed_s: float


class TotalGrowth(NamedTuple):
    """By how much the memory of a process has grown since its warm-up, whatever its roles were."""

    roles: tuple[str, ...]
    pid: int
    mb: float
    observed_s: float


def child_pids(pid: int) -> list[int]:
    """The children of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def processes_by_role(
    supervisor: int, fork_server: int, etcd: int | None = None, leader: int | None = None
) -> dict[int, str]:
    """The processes of a run on this machine. `leader`: the process id of the agent that leads."""
    found = {supervisor: "supervisor", fork_server: "fork server"} | ({etcd: "etcd"} if etcd is not None else {})
    for agent in child_pids(fork_server):
        found[agent] = "leader" if agent == leader else "agent"
        found |= dict.fromkeys(child_pids(agent), "worker")
    return found


def sample_processes(t: float, processes: Mapping[int, str]) -> Iterator[ProcessSample]:
    """A sample of each process that has not ended."""
    for pid, role in processes.items():
        with contextlib.suppress(OSError, IndexError):
            memory = own_memory(Path(f"/proc/{pid}/smaps_rollup").read_text())
            if memory:  # a process that has ended and was not reaped has none
                yield ProcessSample(t, pid, role, memory, len([*Path(f"/proc/{pid}/fd").iterdir()]))


def own_memory(rollup: str) -> int:
    """The resident bytes of a process that are no pages of files, from its smaps_rollup: statm counts per processor and
    may be wrong by megabytes."""
    fields = dict(line.split()[:2] for line in rollup.splitlines()[1:])
    return 1024 * (int(fields["Anonymous:"]) + int(fields.get("Pss_Shmem:", 0)))


class SampleFile:
    """Samples on disk: kept in memory, they would make the process grow that is watched with the others."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, samples: Iterable[ProcessSample]) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{s.t:.2f},{s.pid},{s.role},{s.memory},{s.files}\n" for s in samples)

    def read(self) -> list[ProcessSample]:
        """All samples, in order."""
        rows = [line.split(",") for line in self._path.read_text().splitlines()] if self._path.exists() else []
        return [ProcessSample(float(t), int(pid), role, int(m), int(files)) for t, pid, role, m, files in rows]


def memory_growth(samples: Sequence[ProcessSample], warm_up_s: float, min_observed_s: float) -> list[MemoryGrowth]:
    """The growth of each process that was observed for so long after its warm-up: `warm_up_s` after its first sample in
    its role. The fastest growing comes first. What a change of its role adds is in `total_growth` alone."""
    by_process: dict[tuple[int, str], list[ProcessSample]] = {}
    for sample in samples:
        by_process.setdefault((sample.pid, sample.role), []).append(sample)
    found = []
    for (pid, _), own in by_process.items():
        warm = [sample for sample in own if sample.t >= own[0].t + warm_up_s]
        if len(warm) > 2 and warm[-1].t - warm[0].t >= min_observed_s:
            slope = _median_slope([(sample.t, sample.memory / 1e6) for sample in warm])
            found.append(MemoryGrowth(own[0].role, pid, 3600 * slope, warm[-1].t - warm[0].t))
    return sorted(found, key=lambda growth: -growth.mb_per_h)


def total_growth(samples: Sequence[ProcessSample], warm_up_s: float) -> list[TotalGrowth]:
    """By how much each process has grown between its warm-up, `warm_up_s` after its first sample, and its end. Largest
    growth first."""
    by_process: dict[int, list[ProcessSample]] = {}
    for sample in samples:
        by_process.setdefault(sample.pid, []).append(sample)
    found = []
    for pid, own in by_process.items():
        warm = [sample for sample in own if sample.t >= own[0].t + warm_up_s]
        if warm:
            end = statistics.median(sample.memory for sample in warm[-_END_SAMPLES:])
            roles = tuple(dict.fromkeys(sample.role for sample in warm))
            found.append(TotalGrowth(roles, pid, (end - warm[0].memory) / 1e6, warm[-1].t - warm[0].t))
    return sorted(found, key=lambda growth: -growth.mb)


def _median_slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil-Sen): a single jump does not decide it."""
    thinned = points[:: len(points) // _MAX_POINTS + 1]
    return statistics.median(
        (later[1] - sooner[1]) / (later[0] - sooner[0])
        for number, sooner in enumerate(thinned)
        for later in thinned[number + 1 :]
    )
