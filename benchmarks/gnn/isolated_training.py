"""One training of one system, in a process of its own that is limited to some cores."""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from benchmarks.gnn.training_case import TrainingCurve, TrainingRequest

from culm.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYSTEMS = ("culm-async", "culm-pipe", "culm-sync", "pyg-edges", "pyg-sparse", "sampled-ddp")
TIMEOUT_S = 3600.0
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def train_isolated(request: TrainingRequest) -> TrainingCurve:
    """Train and return the curve. Raises RunError with the last line of stderr if the process fails."""
    return _run_subprocess(request, None)


def train_with_peak_memory(request: TrainingRequest) -> tuple[TrainingCurve, float]:
    """Train and return the curve and the peak memory of all its processes together, in GiB."""
    peak = _PeakMemory()
    return _run_subprocess(request, peak), peak.gib


def _run_subprocess(request: TrainingRequest, peak: _PeakMemory | None) -> TrainingCurve:
    text = msgspec.json.encode(request).decode()
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(1 if request.system == "sampled-ddp" else request.cores),
    }
    command = [sys.executable, "-m", "benchmarks.gnn.isolated_training", text]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with peak.measure_tree(process.pid) if peak else nullcontext():
                printed, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()  # if the wait was interrupted; its child processes end with it
    if process.returncode:
        last = (errors.strip().splitlines() or ["no output on stderr"])[-1]
        raise RunError(f"{request.system} failed on {request.case.name}: {last}")
    return msgspec.json.decode(printed.splitlines()[-1], type=TrainingCurve)


def train_side_by_side(requests: Sequence[TrainingRequest]) -> list[TrainingCurve]:
    """Run several trainings at the same time, as many as there are cores for. They share no cores, but memory
    bandwidth."""
    size = max(request.cores for request in requests)
    lanes: queue.SimpleQueue[int] = queue.SimpleQueue()
    for lane in range(max(1, usable_cores() // size)):
        lanes.put(lane * size)

    def train_one(request: TrainingRequest) -> TrainingCurve:
        first = lanes.get()
        try:
            return train_isolated(msgspec.structs.replace(request, first_core=first))
        finally:
            lanes.put(first)

    with ThreadPoolExecutor(lanes.qsize()) as pool:
        return list(pool.map(train_one, requests))


class _PeakMemory:
    """Peak memory of a process tree; shared pages count once."""

    def __init__(self) -> None:
        self.gib = 0.0

    @contextmanager
    def measure_tree(self, root: int) -> Iterator[None]:
        finished = threading.Event()

        def poll() -> None:
            while True:
                self.gib = max(self.gib, sum(map(_proportional_memory_kib, process_tree(root))) / 2**20)
                if finished.wait(_POLL_S):
                    return

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()


def process_tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    pids = [root]
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


def _proportional_memory_kib(pid: int) -> int:
    """Return the proportional set size in KiB: own pages, and shared pages divided by the number of their users."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def main(text: str) -> None:
    """Run the process: set the CPU affinity, train, print the curve."""
    request = msgspec.json.decode(text, type=TrainingRequest)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no process is left behind if the benchmark is killed
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[request.first_core : request.first_core + request.cores])
    if request.system.startswith("culm-"):
        from benchmarks.gnn.culm_graph_system import train_culm as run
    elif request.system == "sampled-ddp":
        from benchmarks.gnn.pyg_systems import train_sampled as run
    else:
        from benchmarks.gnn.pyg_systems import train_whole_graph as run
    print(msgspec.json.encode(run(request)).decode())


if __name__ == "__main__":
    importlib.import_module("benchmarks.gnn.isolated_training").main(sys.argv[1])
