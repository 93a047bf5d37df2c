"""What a node at half speed costs: two pipelines of one stage with real compute, a core for each of the two workers.

    python -m benchmarks.resilience.slow_node [--rounds 5] [--steps 12] [--json]

A round is a run: steps at full speed, then one worker is stopped and continued in turn (SIGSTOP, SIGCONT), so that it
gets half of its core. Measured are the steps before culm has noticed, and those after it gave the worker less to do.
With half of one of two workers, 0.75 of the throughput is left at best; 0.5 if all wait for the slow one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypedDict

from benchmarks.resilience.compute_job import ComputeJob

from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.training import pickle_job

MICRO_BATCHES = 32
TURN_S = 0.02
TIMEOUT_S = 300.0


class SlowNodeRound(TypedDict):
    """Seconds per step, medians."""

    full_speed: float
    unnoticed: float
    relieved: float
    steps_until_noticed: int


async def halve_speed(process: int) -> None:
    """Stop and continue a process in turn, until cancelled."""
    try:
        while True:
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(TURN_S)
            os.kill(process, signal.SIGCONT)
            await asyncio.sleep(TURN_S)
    finally:
        os.kill(process, signal.SIGCONT)


async def measure_round(fork_server: ForkServerClient, folder: Path, steps: int) -> SlowNodeRound:
    """One run. Raises AssertionError if it ends early."""
    request = RunConfig(pipelines=2, stages=1, strategy="reroute", out=str(folder), reconfigure="never")
    payload = pickle_job(ComputeJob(stages=1, micro_batches=MICRO_BATCHES, steps=10**6).build_job())
    async with local_run(fork_server, payload, request) as run:
        await _step_times(run, 3)
        full_speed = await _step_times(run, steps)
        agent = fork_server.process_table.agent_pid(1)
        (worker,) = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
        slowing = asyncio.create_task(halve_speed(worker))
        try:
            unnoticed: list[float] = []
            while '"slow_node"' not in (folder / "events.jsonl").read_text():
                unnoticed += await _step_times(run, 1)
            await _step_times(run, 4)  # the last steps with the old shares
            relieved = await _step_times(run, steps)
        finally:
            slowing.cancel()
    return SlowNodeRound(
        full_speed=median(full_speed),
        unnoticed=median(unnoticed),
        relieved=median(relieved),
        steps_until_noticed=len(unnoticed),
    )


async def _step_times(run: RunHandle, steps: int) -> list[float]:
    """The seconds of the next steps, from the end of the step before."""
    ends: list[float] = []
    while len(ends) <= steps:
        metrics = await run.next_step()
        assert metrics is not None, (await run.wait_for_result()).message
        ends.append(metrics["t"])
    return [later - earlier for earlier, later in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds: list[SlowNodeRound] = []
    with ForkServerClient() as fork_server, tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        for number in range(options.rounds):
            measured = measure_round(fork_server, Path(folder) / str(number), options.steps)
            rounds.append(asyncio.run(asyncio.wait_for(measured, TIMEOUT_S)))
            last = rounds[-1]
            print(
                f"full speed {last['full_speed']:.3f} s a step, not noticed {last['unnoticed']:.3f} s "
                f"({last['steps_until_noticed']} steps), relieved {last['relieved']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    share = {name: [each["full_speed"] / each[name] for each in rounds] for name in ("unnoticed", "relieved")}
    result = {"rounds": rounds, "throughput": share, "best": 0.75, "cores": len(os.sched_getaffinity(0))}
    if options.json:
        print(json.dumps(result))
    else:
        for name, values in share.items():
            print(f"{name}: {median(values):.2f} of the throughput ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
