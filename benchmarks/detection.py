"""From SIGKILL until the last node that is left has the new epoch: real nodes, one loss after the other in one run.

    python -m benchmarks.detection [--kills 40] [--json]

Counted from before the order to strike is given, until the last of the workers that are left has begun the new epoch:
its agent had it before. Actions are short here, because a worker leaves an epoch between two of them. Nodes that are
lost come back as new ones; the leader is struck like any other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.emulated import Emulated
from culm.api import pickled
from culm.cluster.record import decode_record
from culm.cluster.setup import Request
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.runtime.clock import real_now

PIPELINES, STAGES = 4, 2
UNIT_S = 0.002
PATIENCE_S = 600.0
_ENDLESS = 1_000_000


def detected(nursery: LocalNursery, kills: int, *, seed: int = 0) -> list[float]:
    """Milliseconds, for each loss."""
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        out = Path(folder) / "run"
        blows = asyncio.run(asyncio.wait_for(_struck(nursery, kills, str(out), seed), PATIENCE_S))
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [1e3 * took(events, node, at) for node, at in blows]


async def _struck(nursery: LocalNursery, kills: int, out: str, seed: int) -> list[tuple[int, float]]:
    """Who was struck, and when, in seconds of the run."""
    draw, blows = random.Random(seed), []
    job = Emulated(stages=STAGES, micro_batches=2 * PIPELINES, unit_s=UNIT_S, steps=_ENDLESS).job()
    request = Request(pipelines=PIPELINES, stages=STAGES, strategy="reroute", out=out)
    async with local_run(nursery, pickled(job), request) as run:
        there = set(range(request_nodes := PIPELINES * STAGES))
        for _ in range(kills):
            await _full(run)
            began = decode_record(await run.store.get("record") or b"").began
            node = draw.choice(sorted(there))
            blows.append((node, real_now() - began))
            run.nodes.stop(node)
            there.remove(node)
            while node not in run.lost:
                await _step(run)
            await _step(run)
            there |= set(await run.nodes.start())
            assert len(there) == request_nodes
        await _full(run)
    return blows


async def _full(run: LocalRun) -> None:
    """Until two more steps have been made with every slot filled."""
    seen = len(run.full_steps_s)
    while len(run.full_steps_s) < seen + 2:
        await _step(run)


async def _step(run: LocalRun) -> None:
    if await run.step() is None:
        raise (await run.result()).failure()


def took(events: Iterable[Mapping[str, Any]], node: int, at: float) -> float:
    """Seconds from a blow until the last member of the first complete epoch without the node had begun it."""
    members: set[int] = set()
    begun: dict[int, float] = {}
    for event in events:
        if event["t"] < at:
            continue
        if event["kind"] == "epoch" and node not in event["members"]:
            members, begun = set(event["members"]), {}
        elif event["kind"] == "ready" and members:
            begun[event["node"]] = event["t"] - event["seconds"]
            if begun.keys() >= members:
                return max(begun.values()) - at
    raise ValueError(f"nobody went on without node {node}")


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, nine tenths, and the worst."""
    if len(values) < 2:
        return dict.fromkeys(("median", "p90", "max"), values[0] if values else None)
    p90 = quantiles(values, n=10, method="inclusive")[8]
    return {"median": median(values), "p90": p90, "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.detection")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with LocalNursery() as nursery:
        found = spread(detected(nursery, given.kills))
    if given.json:
        print(json.dumps({"detect_ms": found, "kills": given.kills, "cores": os.cpu_count()}))
    else:
        told = ", ".join(f"{name} {value:.0f} ms" for name, value in found.items() if value is not None)
        print(f"{given.kills} kills: {told} ({os.cpu_count()} cores)", file=sys.stdout)


if __name__ == "__main__":
    main()
