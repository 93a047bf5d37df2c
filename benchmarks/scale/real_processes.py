"""64 real nodes on this machine that lose one of them: the comparison for the simulated clusters.

Agents, workers, sockets and etcd are real. Workers outnumber the cores, so the times include waiting for a core.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.scale.simulated_fleet import STAGES, fleet_job

import culm
from culm.errors import CulmError

PIPELINES = 4
STEPS, LOST_IN_STEP, LOST_NODE = 8, 4, 26
_BYTES_PER_NODE = 150 * 2**20
"""Memory of an agent and its worker beside what they share with the fork server."""


def measure_real_processes() -> dict[str, Any]:
    """Seconds of a step, of detecting a lost node, and of the next epoch; or why this machine cannot tell."""
    nodes = PIPELINES * STAGES
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < nodes * _BYTES_PER_NODE:
        return {"unavailable": f"{nodes} nodes need {nodes * _BYTES_PER_NODE / 2**30:.0f} GiB of free memory"}
    with tempfile.TemporaryDirectory() as out:
        try:
            summary = culm.train(
                fleet_job(PIPELINES, steps=STEPS),
                pipelines=PIPELINES,
                stages=STAGES,
                schedule="zb",
                strategy="reroute",
                reconfigure="never",
                suspect_after=60.0,  # two cores run all nodes
                kills=(f"node={LOST_NODE} step={LOST_IN_STEP}",),
                out=out,
                progress=False,
            )
        except CulmError as error:
            return {"unavailable": str(error)}
        lines = (Path(out) / "steps.jsonl").read_bytes().splitlines()
    times = [float(msgspec.json.decode(line)["t"]) for line in lines]
    steps = [later - before for before, later in itertools.pairwise(times)]
    (recovery,) = summary.recoveries
    return {
        "nodes": nodes,
        "cores": os.cpu_count(),
        "step_s": statistics.median(steps),
        "detect_s": recovery["detect_ms"] / 1e3,
        "replan_s": recovery["decide_ms"] / 1e3,
    }
