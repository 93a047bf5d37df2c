"""What a machine gives culm.gnn at most: the same kernels as 1, 2, 4, ... independent processes of one thread, at once.

They share nothing but caches, memory's bandwidth and, under hyperthreads, cores. Where such processes stop getting
faster together, no system can make a graph train faster either; scaling is judged beside this.

gather   the sparse product of a part of the graph with rows as wide as the classes, as GA does it
dense    rows times weights, as AV does it
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

from benchmarks.gnn_sides import available
from culm.errors import RunError
from culm.gnn.sparse import Adjacency

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTS = (1, 2, 4, 8, 16)
KERNELS = ("gather", "dense")
SECONDS = 1.0
"""Of each kernel, with each number of processes."""
SEEN = 4
"""Vertices of a server's table over those of one share: an interval gathers from all of them."""
_PR_SET_PDEATHSIG = 1


class Ceiling(TypedDict):
    """Runs of a kernel in a second by all processes together; `speedup` is over one process."""

    kernel: str
    processes: int
    per_s: float
    speedup: float


class Kernel:
    """One process's share of the work, on memory of its own: nobody's cache helps another."""

    def __init__(self, vertices: int, degree: int, width: int, hidden: int, classes: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        edges, seen = vertices * degree, vertices * SEEN
        pointers = torch.arange(0, edges + 1, degree, dtype=torch.int32)
        columns = torch.randint(0, seen, (edges,), generator=draw, dtype=torch.int32)
        self._edges = Adjacency(pointers, columns, torch.ones(edges), 0, vertices, seen)
        self._table, self._out = torch.rand(seen, classes), torch.empty(vertices, classes)
        self._rows, self._weights = torch.rand(vertices, width), torch.rand(hidden, width)
        self._product = torch.empty(vertices, hidden)

    def gather(self) -> None:
        self._edges.gather(self._table, self._out)

    def dense(self) -> None:
        torch.mm(self._rows, self._weights.t(), out=self._product)


def ceiling(shape: Sequence[int], *, cores: int | None = None, seconds: float = SECONDS) -> list[Ceiling]:
    """Measure it. `shape`: vertices of a process's share, degree, features, hidden width, classes.

    Raises RunError if one of the processes fails.
    """
    cores = available() if cores is None else cores
    counts = [count for count in COUNTS if count <= cores]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gnn_ceiling"]
    started = [
        subprocess.Popen(
            [*command, json.dumps([*shape, place, seconds])],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for place in range(counts[-1])
    ]  # fmt: skip
    try:
        return compared({kernel: [(n, together(started[:n], kernel)) for n in counts] for kernel in KERNELS})
    finally:
        for process in started:
            process.kill()
            process.communicate()


def compared(rates: Mapping[str, Sequence[tuple[int, float]]]) -> list[Ceiling]:
    """Beside the rate of the first, which is of one process."""
    return [
        Ceiling(kernel=kernel, processes=count, per_s=rate, speedup=rate / of[0][1])
        for kernel, of in rates.items()
        for count, rate in of
    ]


def together(processes: Sequence[subprocess.Popen[str]], kernel: str) -> float:
    """Runs of a kernel in a second by all of them: all have warmed up before the first begins to count."""
    for word in (kernel, "go"):
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        answers = [_line(process) for process in processes]
    return sum(map(float, answers))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RunError("a process that measures the machine has ended: is there enough memory?")
    return line


def main(text: str) -> None:
    """One of the processes: hears of a kernel, says that it is ready, waits for a word, computes, says how often."""
    vertices, degree, width, hidden, classes, place, seconds = json.loads(text)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[place]])
    torch.set_num_threads(1)
    kernel = Kernel(vertices, degree, width, hidden, classes, seed=place)
    for word in sys.stdin:
        run = getattr(kernel, word.strip())
        run()
        print("ready", flush=True)
        sys.stdin.readline()
        print(rate(run, seconds), flush=True)


def rate(run: Callable[[], object], seconds: float) -> float:
    """Runs in a second, over at least so many seconds."""
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        run()
        count += 1
    return count / passed


if __name__ == "__main__":
    importlib.import_module("benchmarks.gnn_ceiling").main(sys.argv[1])
