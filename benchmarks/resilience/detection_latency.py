"""From SIGKILL until the last surviving node has the new epoch: real nodes, one loss after the other in one run.

    python -m benchmarks.resilience.detection_latency [--kills 40] [--json]

Measured from before the kill is requested until the last surviving worker has started the new epoch (its agent receives
it earlier). Actions are short, because a worker leaves an epoch between two of them. Lost nodes are replaced by new
ones; the leader is killed like any other node.
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

from benchmarks.resilience.emulated_job import EmulatedJob

from culm.cluster.leader.leader_snapshot import decode_snapshot
from culm.cluster.leader.stored_snapshot import StoredSnapshot
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.runtime.clock import real_now
from culm.training import pickle_job

PIPELINES, STAGES = 4, 2
ACTION_S = 0.002
TIMEOUT_S = 600.0
_UNLIMITED_STEPS = 1_000_000


def measure_detection_ms(fork_server: ForkServerClient, kills: int, *, seed: int = 0) -> list[float]:
    """Milliseconds, for each loss."""
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        out = Path(folder) / "run"
        losses = asyncio.run(asyncio.wait_for(_kill_nodes(fork_server, kills, str(out), seed), TIMEOUT_S))
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [1e3 * seconds_to_new_epoch(events, node, killed_at) for node, killed_at in losses]


async def _kill_nodes(fork_server: ForkServerClient, kills: int, out: str, seed: int) -> list[tuple[int, float]]:
    """The killed nodes, and when they were killed, in seconds of the run."""
    rng, losses = random.Random(seed), []
    job = EmulatedJob(stages=STAGES, micro_batches=2 * PIPELINES, action_s=ACTION_S, steps=_UNLIMITED_STEPS).build_job()
    request = RunConfig(pipelines=PIPELINES, stages=STAGES, strategy="reroute", out=out)
    async with local_run(fork_server, pickle_job(job), request) as run:
        present = set(range(node_count := PIPELINES * STAGES))
        for _ in range(kills):
            await _wait_until_all_slots_filled(run)
            started_at = decode_snapshot(await StoredSnapshot(run.store).read() or b"").started_at
            node = rng.choice(sorted(present))
            losses.append((node, real_now() - started_at))
            run.nodes.stop(node)
            present.remove(node)
            while node not in run.lost_nodes:
                await _next_step(run)
            await _next_step(run)
            present |= set(await run.nodes.start())
            assert len(present) == node_count
        await _wait_until_all_slots_filled(run)
    return losses


async def _wait_until_all_slots_filled(run: RunHandle) -> None:
    """Wait for two more steps with every slot filled."""
    before = len(run.full_steps_s)
    while len(run.full_steps_s) < before + 2:
        await _next_step(run)


async def _next_step(run: RunHandle) -> None:
    if await run.next_step() is None:
        raise (await run.wait_for_result()).to_error()


def seconds_to_new_epoch(events: Iterable[Mapping[str, Any]], node: int, killed_at: float) -> float:
    """Seconds from a kill until the last member of the first complete epoch without the node has started it."""
    members: set[int] = set()
    started: dict[int, float] = {}
    for event in events:
        if event["t"] < killed_at:
            continue
        if event["kind"] == "epoch" and node not in event["members"]:
            members, started = set(event["members"]), {}
        elif event["kind"] == "ready" and members:
            started[event["node"]] = event["t"] - event["seconds"]
            if started.keys() >= members:
                return max(started.values()) - killed_at
    raise ValueError(f"no epoch without node {node} was started")


def summarize_latencies(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 90th percentile, and maximum."""
    if len(values) < 2:
        return dict.fromkeys(("median", "p90", "max"), values[0] if values else None)
    p90 = quantiles(values, n=10, method="inclusive")[8]
    return {"median": median(values), "p90": p90, "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.resilience.detection_latency")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ForkServerClient() as fork_server:
        latency = summarize_latencies(measure_detection_ms(fork_server, options.kills))
    if options.json:
        print(json.dumps({"detect_ms": latency, "kills": options.kills, "cores": os.cpu_count()}))
    else:
        text = ", ".join(f"{name} {value:.0f} ms" for name, value in latency.items() if value is not None)
        print(f"{options.kills} kills: {text} ({os.cpu_count()} cores)", file=sys.stdout)


if __name__ == "__main__":
    main()
