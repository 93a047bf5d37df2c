"""Runs whose shape changes on the way, and what they have to come to."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.known import ready, truth

from culm import Job
from culm.testing import Faults, Simulated
from culm.testing.chaos import job_of
from culm.testing.cluster import Cluster, enact
from culm.testing.survive import differences, varied

STEPS = 7


@functools.cache
def job(features: tuple[str, ...] = (), steps: int = STEPS, micro_batches: int = 4) -> Job:
    """Six layers, exact."""
    return replace(job_of(features, True, micro_batches), steps=steps)


def reshaped(
    *wishes: tuple[int, str],
    faults: Faults | None = None,
    described: Job | None = None,
    zones: str = "",
    **request: Any,
) -> Simulated:
    """A run for which layouts are asked, each after a step; it learns what a single process does."""
    described, faults = described or job(), faults or Faults()

    async def script(cluster: Cluster) -> None:
        for step, layout in wishes:
            await cluster.committed(step)
            cluster.store.write("wish/layout", layout.encode())
        await asyncio.Event().wait()

    setup = ready(described, **{"strategy": "reroute", **request})
    run = enact(described, setup, faults=faults, cost=varied(0), latency=0.001, script=script, zones=zones)
    assert not list(differences(described, run, truth(described))), run.history
    assert not run.missed(faults)
    return run


def members(run: Simulated) -> list[str]:
    """Who filled the slots of each epoch, in order."""
    return [line.rpartition("members ")[2] for line in str(run.history).splitlines() if ": members " in line]


def events(out: Path, *kinds: str) -> Sequence[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] in kinds]
