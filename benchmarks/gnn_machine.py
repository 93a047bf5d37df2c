"""`python -m benchmarks.gnn_machine`: what a machine of many cores shows of culm.gnn, within so many seconds.

scaling   time per epoch over 1, 2, 4, 8 and 16 cores
ceiling   the same kernels as so many independent processes: what the machine itself allows
rows      beside PyG on the whole graph and beside sampled mini-batches, all cores, one round
latency   no pipelining, pipe and async with far workers; the modes at the same time, each on cores of its own
large     the largest graph that an estimate says there is memory and time for: time per epoch, and memory

After each part the JSON is written anew, so that one that runs out of time takes nothing along.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gnn
from benchmarks.gnn_case import Case, Request
from benchmarks.gnn_ceiling import ceiling
from benchmarks.gnn_sides import available, side_by_side, train, train_watched
from culm.gnn import memory

ROWS = ("culm-async", "culm-pipe", "pyg-edges", "pyg-sparse", "sampled-ddp")
LATENCIES_MS = (0.0, 20.0, 100.0)
START_S = 15.0
SECONDS_PER_EDGE = 6e-7
"""To generate, cut, read and train a graph on, for each direction of an edge (16 cores: 278 s for 537 million)."""
BYTES_PER_EDGE = 60
BYTES_PER_FEATURE = 4 * 3.5
"""Features lie in the process that cuts, in that of the server, and in the file between them."""
PARTS = ("scaling", "ceiling", "rows", "latency", "large")


def cases(scale: int) -> dict[str, Case]:
    """By part; `scale` makes all of them smaller or larger."""
    return {
        "scaling": Case(graph=f"gen:rmat,scale={scale + 1},degree=16,features=128", hidden=64, epochs=12),
        "rows": Case(graph=f"gen:rmat,scale={scale},degree=16,features=128", hidden=64, epochs=20),
        "latency": Case(graph=f"gen:rmat,scale={scale - 2},degree=16,features=128", hidden=64, epochs=16),
    }


def share(scale: int) -> tuple[int, ...]:
    """A sixteenth of the graph of `scaling`: vertices, degree, features, hidden width, classes."""
    return max(1, 2 ** (scale + 1) // 16), 16, 128, 64, 8


def far(case: Case, cores: int) -> list[gnn.Far]:
    """Each mode on a fourth of the cores."""
    each = max(1, cores // len(gnn.FAR_MODES))
    found: list[gnn.Far] = []
    for latency in LATENCIES_MS:
        asked = [gnn.far_request(case, mode, each, 0, latency) for mode in gnn.FAR_MODES]
        found += gnn.beside_pipe(
            latency, {m: c.s_per_epoch for m, c in zip(gnn.FAR_MODES, side_by_side(asked), strict=True)}
        )
    return found


def largest(features: int, seconds: float, space: float, *, degree: int = 16) -> int:
    """The scale of the largest graph whose estimate fits into that many seconds and bytes."""
    scale = 10
    while True:
        vertices = 2 ** (scale + 1)
        edges = vertices * degree
        needed = vertices * features * BYTES_PER_FEATURE + edges * BYTES_PER_EDGE
        if START_S + edges * SECONDS_PER_EDGE > seconds or needed > space:
            return scale
        scale += 1


def large(features: int, seconds: float, cores: int) -> dict[str, Any]:
    scale = largest(features, seconds, memory.available() * 0.8)
    graph = f"gen:rmat,scale={scale},degree=16,features={features}"
    case = Case(graph=graph, hidden=64, epochs=4)
    began = time.monotonic()
    curve, peak = train_watched(Request(system="culm-pipe", case=case, cores=cores, every=4, servers=1))
    return {
        "graph": graph,
        "vertices": 2**scale,
        "s_per_epoch": curve.s_per_epoch,
        "peak_gib": peak,
        "wall_s": time.monotonic() - began,
        "bounded_by": "time" if largest(features, 1e9, memory.available() * 0.8) > scale else "memory",
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gnn_machine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything; the largest graph takes the rest")
    parser.add_argument("--scale", type=int, default=16, help="of the graphs of the other parts")
    parser.add_argument("--features", type=int, default=128, help="of the largest graph")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--json", type=Path, default=Path("gnn-machine.json"), help="where the figures go")
    asked = parser.parse_args(given)
    began, cores, parts = time.monotonic(), available(), asked.parts.split(",")
    run = cases(asked.scale)
    work: dict[str, Callable[[], Any]] = {
        "scaling": lambda: gnn.scaling(run["scaling"], cores, train),
        "ceiling": lambda: ceiling(share(asked.scale), cores=cores),
        "rows": lambda: gnn.compared(run["rows"], ROWS, cores=cores, rounds=1, side=train),
        "latency": lambda: far(run["latency"], cores),
        "large": lambda: large(asked.features, asked.seconds - (time.monotonic() - began), cores),
    }
    result: dict[str, Any] = {"cores": cores, "seconds": {}}
    for part in (name for name in PARTS if name in parts):
        start = time.monotonic()
        result[part] = work[part]()
        result["seconds"][part] = time.monotonic() - start
        print(part, json.dumps(result[part]), file=sys.stderr, flush=True)
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
