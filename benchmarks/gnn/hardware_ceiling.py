"""Upper bound of scaling on a machine: the kernels of culm.gnn in 1, 2, 4, ... independent single-threaded
processes.

The processes share only caches, memory bandwidth and, with hyperthreading, cores. Where their total throughput stops
growing, no training system can scale further; the scaling of culm.gnn is compared with this bound.

    gather   the sparse product of a part of the graph with rows as wide as the classes, as in GA
    dense    rows times weights, as in AV
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from benchmarks.gnn.isolated_training import usable_cores

from culm.errors import RunError
from culm.gnn.graph.adjacency import Adjacency

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESS_COUNTS = (1, 2, 4, 8, 16)
KERNELS = ("gather", "dense")
SECONDS = 1.0
"""Seconds per kernel and number of processes."""
TABLE_FACTOR = 4
"""Vertices of a server's table divided by those of one process: an interval gathers from all of them."""
_PR_SET_PDEATHSIG = 1


class CeilingRow(TypedDict):
    """Runs of a kernel per second by all processes together; `speedup` is relative to one process."""

    kernel: str
    processes: int
    per_s: float
    speedup: float


class CeilingKernel:
    """The work of one process, on memory of its own, so that processes share no cached data."""

    def __init__(self, vertices: int, degree: int, width: int, hidden: int, classes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        edges, table_rows = vertices * degree, vertices * TABLE_FACTOR
        pointers = torch.arange(0, edges + 1, degree, dtype=torch.int32)
        columns = torch.randint(0, table_rows, (edges,), generator=generator, dtype=torch.int32)
        self._edges = Adjacency(pointers, columns, torch.ones(edges), 0, vertices, table_rows)
        self._table, self._out = torch.rand(table_rows, classes), torch.empty(vertices, classes)
        self._rows, self._weights = torch.rand(vertices, width), torch.rand(hidden, width)
        self._product = torch.empty(vertices, hidden)

    def gather(self) -> None:
        self._edges.gather(self._table, self._out)

    def dense(self) -> None:
        torch.mm(self._rows, self._weights.t(), out=self._product)


def measure_ceiling(shape: Sequence[int], *, cores: int | None = None, seconds: float = SECONDS) -> list[CeilingRow]:
    """Measure the bound. `shape`: vertices per process, degree, features, hidden width, classes.

    Raises RunError if one of the processes fails.
    """
    cores = usable_cores() if cores is None else cores
    counts = [count for count in PROCESS_COUNTS if count <= cores]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gnn.hardware_ceiling"]
    processes = [
        subprocess.Popen(
            [*command, json.dumps([*shape, index, seconds])],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for index in range(counts[-1])
    ]  # fmt: skip
    try:
        return add_speedups({kernel: [(n, total_rate(processes[:n], kernel)) for n in counts] for kernel in KERNELS})
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def add_speedups(rates: Mapping[str, Sequence[tuple[int, float]]]) -> list[CeilingRow]:
    """Add speedups relative to the first rate, which is that of one process."""
    return [
        CeilingRow(kernel=kernel, processes=count, per_s=rate, speedup=rate / measured[0][1])
        for kernel, measured in rates.items()
        for count, rate in measured
    ]


def total_rate(processes: Sequence[subprocess.Popen[str]], kernel: str) -> float:
    """Return the runs of a kernel per second by all processes. All have warmed up before the first starts to count."""
    for word in (kernel, "go"):
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        answers = [_read_line(process) for process in processes]
    return sum(map(float, answers))


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RunError("a measuring process has ended: is there enough memory?")
    return line


def main(text: str) -> None:
    """Run one process: read a kernel's name, warm up, print "ready", wait for a line, measure, print the rate."""
    vertices, degree, width, hidden, classes, index, seconds = json.loads(text)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[index]])
    torch.set_num_threads(1)
    kernel = CeilingKernel(vertices, degree, width, hidden, classes, seed=index)
    for word in sys.stdin:
        run = getattr(kernel, word.strip())
        run()
        print("ready", flush=True)
        sys.stdin.readline()
        print(runs_per_second(run, seconds), flush=True)


def runs_per_second(run: Callable[[], object], seconds: float) -> float:
    """Return the runs per second, measured over at least `seconds`."""
    started_at, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started_at) < seconds:
        run()
        count += 1
    return count / passed


if __name__ == "__main__":
    importlib.import_module("benchmarks.gnn.hardware_ceiling").main(sys.argv[1])
