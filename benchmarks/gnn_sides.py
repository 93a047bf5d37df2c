"""One training of one system, in a process of its own that may use so many cores and no more."""

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

from benchmarks.gnn_case import Curve, Request
from culm.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYSTEMS = ("culm-async", "culm-pipe", "culm-sync", "pyg-edges", "pyg-sparse", "sampled-ddp")
PATIENCE_S = 3600.0
_LOOK_S = 0.25
_PR_SET_PDEATHSIG = 1


def available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def train(request: Request) -> Curve:
    """Train, and return the curve. Raises RunError with the last line that was said when it fails."""
    return _run(request, None)


def train_watched(request: Request) -> tuple[Curve, float]:
    """Train; beside the curve the most memory that all its processes had at a time, in GiB."""
    peak = _Peak()
    return _run(request, peak), peak.gib


def _run(request: Request, peak: _Peak | None) -> Curve:
    text = msgspec.json.encode(request).decode()
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(1 if request.system == "sampled-ddp" else request.cores),
    }
    command = [sys.executable, "-m", "benchmarks.gnn_sides", text]
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with peak.watching(process.pid) if peak else nullcontext():
                printed, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()  # where waiting was interrupted; what it has started ends with it
    if process.returncode:
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(f"{request.system} failed on {request.case.name}: {last}")
    return msgspec.json.decode(printed.splitlines()[-1], type=Curve)


def side_by_side(requests: Sequence[Request]) -> list[Curve]:
    """Several trainings, as many at once as there are cores for, no core shared. They do share memory's bandwidth."""
    size = max(request.cores for request in requests)
    lanes: queue.SimpleQueue[int] = queue.SimpleQueue()
    for lane in range(max(1, available() // size)):
        lanes.put(lane * size)

    def one(request: Request) -> Curve:
        first = lanes.get()
        try:
            return train(msgspec.structs.replace(request, first=first))
        finally:
            lanes.put(first)

    with ThreadPoolExecutor(lanes.qsize()) as pool:
        return list(pool.map(one, requests))


class _Peak:
    """The most memory of a tree of processes; pages that several of them share count once."""

    def __init__(self) -> None:
        self.gib = 0.0

    @contextmanager
    def watching(self, root: int) -> Iterator[None]:
        over = threading.Event()

        def look() -> None:
            while True:
                self.gib = max(self.gib, sum(map(_pss, tree(root))) / 2**20)
                if over.wait(_LOOK_S):
                    return

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def tree(root: int) -> list[int]:
    """A process and all that came out of it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _pss(pid: int) -> int:
    """Its share of memory in KiB: own pages, and shared ones divided by who shares them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def main(text: str) -> None:
    """The process: takes its cores, trains, prints the curve."""
    request = msgspec.json.decode(text, type=Request)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a bench that is killed leaves nothing behind
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[request.first : request.first + request.cores])
    if request.system.startswith("culm-"):
        from benchmarks.gnn_ours import train as run
    elif request.system == "sampled-ddp":
        from benchmarks.gnn_peers import sampled as run
    else:
        from benchmarks.gnn_peers import whole_graph as run
    print(msgspec.json.encode(run(request)).decode())


if __name__ == "__main__":
    importlib.import_module("benchmarks.gnn_sides").main(sys.argv[1])
