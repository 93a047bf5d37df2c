"""`python -m benchmarks.gnn.many_core_bench`: measurements of culm.gnn on a machine with many cores, within a time
limit.

    scaling   time per training epoch over 1, 2, 4, 8 and 16 cores
    ceiling   the same kernels in independent processes: the upper bound of the machine
    rows      compared with PyG on the whole graph and with sampled mini-batches, all cores, one round
    latency   sync, pipe and async with distant workers; all modes at the same time, each on its own cores
    large     the largest graph that fits memory and time by an estimate: time per training epoch, and memory

The JSON is rewritten after each part, so that a part that exceeds the time limit loses no other results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gnn.hardware_ceiling import measure_ceiling
from benchmarks.gnn.isolated_training import train_isolated, train_side_by_side, train_with_peak_memory, usable_cores
from benchmarks.gnn.training_case import GraphCase, TrainingRequest

from benchmarks.gnn import gnn_bench
from culm.gnn.graph import memory_check

SYSTEMS_COMPARED = ("culm-async", "culm-pipe", "pyg-edges", "pyg-sparse", "sampled-ddp")
LATENCIES_MS = (0.0, 20.0, 100.0)
START_S = 15.0
SECONDS_PER_EDGE = 6e-7
"""Seconds to generate, partition, read and train, per directed edge (16 cores: 278 s for 537 million)."""
BYTES_PER_EDGE = 60
BYTES_PER_FEATURE = 4 * 3.5
"""The features are in the memory of the partitioning process, of the server, and in the file between them."""
PARTS = ("scaling", "ceiling", "rows", "latency", "large")


def part_cases(scale: int) -> dict[str, GraphCase]:
    """Return the case of each part; `scale` changes the size of all of them."""
    return {
        "scaling": GraphCase(graph=f"gen:rmat,scale={scale + 1},degree=16,features=128", hidden=64, epochs=12),
        "rows": GraphCase(graph=f"gen:rmat,scale={scale},degree=16,features=128", hidden=64, epochs=20),
        "latency": GraphCase(graph=f"gen:rmat,scale={scale - 2},degree=16,features=128", hidden=64, epochs=16),
    }


def ceiling_shape(scale: int) -> tuple[int, ...]:
    """Return a sixteenth of the graph of `scaling`: vertices, degree, features, hidden width, classes."""
    return max(1, 2 ** (scale + 1) // 16), 16, 128, 64, 8


def measure_latency_concurrently(case: GraphCase, cores: int) -> list[gnn_bench.LatencyRow]:
    """Measure all modes at the same time, each on a fourth of the cores."""
    cores_per_mode = max(1, cores // len(gnn_bench.LATENCY_MODES))
    rows: list[gnn_bench.LatencyRow] = []
    for latency in LATENCIES_MS:
        requests = [
            gnn_bench.latency_request(case, mode, cores_per_mode, 0, latency) for mode in gnn_bench.LATENCY_MODES
        ]
        rows += gnn_bench.compare_with_pipe(
            latency,
            {m: c.s_per_epoch for m, c in zip(gnn_bench.LATENCY_MODES, train_side_by_side(requests), strict=True)},
        )
    return rows


def largest_scale(features: int, seconds: float, space: float, *, degree: int = 16) -> int:
    """Return the scale of the largest graph whose estimates fit the seconds and bytes."""
    scale = 10
    while True:
        vertices = 2 ** (scale + 1)
        edges = vertices * degree
        needed = vertices * features * BYTES_PER_FEATURE + edges * BYTES_PER_EDGE
        if START_S + edges * SECONDS_PER_EDGE > seconds or needed > space:
            return scale
        scale += 1


def train_largest_graph(features: int, seconds: float, cores: int) -> dict[str, Any]:
    scale = largest_scale(features, seconds, memory_check.available_memory_bytes() * 0.8)
    graph = f"gen:rmat,scale={scale},degree=16,features={features}"
    case = GraphCase(graph=graph, hidden=64, epochs=4)
    started_at = time.monotonic()
    curve, peak = train_with_peak_memory(
        TrainingRequest(system="culm-pipe", case=case, cores=cores, evaluate_every=4, servers=1)
    )
    return {
        "graph": graph,
        "vertices": 2**scale,
        "s_per_epoch": curve.s_per_epoch,
        "peak_gib": peak,
        "wall_s": time.monotonic() - started_at,
        "bounded_by": "time"
        if largest_scale(features, 1e9, memory_check.available_memory_bytes() * 0.8) > scale
        else "memory",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gnn.many_core_bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="time limit of all parts; the largest graph takes the rest"
    )
    parser.add_argument("--scale", type=int, default=16, help="scale of the graphs of the other parts")
    parser.add_argument("--features", type=int, default=128, help="features of the largest graph")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated names")
    parser.add_argument("--json", type=Path, default=Path("gnn-machine.json"), help="output file")
    arguments = parser.parse_args(argv)
    started_at, cores, parts = time.monotonic(), usable_cores(), arguments.parts.split(",")
    cases = part_cases(arguments.scale)
    work: dict[str, Callable[[], Any]] = {
        "scaling": lambda: gnn_bench.measure_scaling(cases["scaling"], cores, train_isolated),
        "ceiling": lambda: measure_ceiling(ceiling_shape(arguments.scale), cores=cores),
        "rows": lambda: gnn_bench.compare_systems(
            cases["rows"], SYSTEMS_COMPARED, cores=cores, rounds=1, train_function=train_isolated
        ),
        "latency": lambda: measure_latency_concurrently(cases["latency"], cores),
        "large": lambda: train_largest_graph(
            arguments.features, arguments.seconds - (time.monotonic() - started_at), cores
        ),
    }
    result: dict[str, Any] = {"cores": cores, "seconds": {}}
    for part in (name for name in PARTS if name in parts):
        start = time.monotonic()
        result[part] = work[part]()
        result["seconds"][part] = time.monotonic() - start
        print(part, json.dumps(result[part]), file=sys.stderr, flush=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
