"""Runs whose shape changes on the way, and what they have to come to."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cached_runs import cached_setup, reference_result

from culm import Job
from culm.testing import Faults, SimulatedRun
from culm.testing.chaos import make_job
from culm.testing.simulated_cluster import Cluster, run_prepared
from culm.testing.survival_check import differences, random_action_cost

STEPS = 7


@functools.cache
def job(features: tuple[str, ...] = (), steps: int = STEPS, micro_batches: int = 4) -> Job:
    """Six layers, exact."""
    return replace(make_job(features, True, micro_batches), steps=steps)


def reshaped(
    *requests: tuple[int, str],
    faults: Faults | None = None,
    described: Job | None = None,
    zones: str = "",
    **request: Any,
) -> SimulatedRun:
    """A run for which layouts are asked, each after a step; it learns what a single process does."""
    described, faults = described or job(), faults or Faults()

    async def script(cluster: Cluster) -> None:
        for step, layout in requests:
            await cluster.wait_until_committed(step)
            cluster.store.write("wish/layout", layout.encode())
        await asyncio.Event().wait()

    setup = cached_setup(described, **{"strategy": "reroute", **request})
    run = run_prepared(
        described, setup, faults=faults, cost=random_action_cost(0), latency=0.001, script=script, zones=zones
    )
    assert not list(differences(described, run, reference_result(described))), run.history
    assert not run.faults_not_reached(faults)
    return run


def members(run: SimulatedRun) -> list[str]:
    """Who filled the slots of each epoch, in order."""
    return [line.rpartition("members ")[2] for line in str(run.history).splitlines() if ": members " in line]


def events(out: Path, *kinds: str) -> Sequence[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] in kinds]
