"""A worker that gets half of its time (SIGSTOP and SIGCONT in turn) is found and relieved."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from benchmarks.resilience.slow_node import halve_speed
from tests.tiny_jobs import Nap, job

from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, local_run
from culm.testing import reference
from culm.training import pickle_job

pytestmark = [pytest.mark.real, pytest.mark.waits(6), pytest.mark.usefixtures("forked_programs")]
MICRO_BATCHES = 16


def test_a_worker_at_half_speed_gets_less_work_and_no_bit_differs(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    fields = {"global_batch": 2 * MICRO_BATCHES, "exact": True}

    async def main() -> tuple[RunResult, int]:
        request = RunConfig(pipelines=2, stages=1, strategy="reroute", out=str(out), reconfigure="never")
        endless = pickle_job(job(layers=[Nap] * 4, steps=10**6, **fields))
        async with local_run(fork_server, endless, request, gate="outside") as run:
            run.permit_steps_below(1)
            await run.next_step()  # all nodes are up
            agent = fork_server.process_table.agent_pid(1)
            (worker,) = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
            slowing, done = asyncio.create_task(halve_speed(worker)), 1
            try:
                while '"slow_node"' not in (out / "events.jsonl").read_text() or done < 8:
                    run.permit_steps_below(done + 1)
                    metrics = await run.next_step()
                    assert metrics is not None, (await run.wait_for_result()).message
                    done = metrics["step"] + 1
            finally:
                slowing.cancel()
            run.finish_before(done + 2)
            run.permit_steps_below(done + 2)
            return await run.wait_for_result(), done + 2

    result, steps = asyncio.run(asyncio.wait_for(main(), 120))
    assert result.summary is not None, result.message
    expected = reference(job(layers=[partial(Nap, 0.0)] * 4, steps=steps, **fields))
    assert result.summary["state_sha256"] == expected.state_sha256
    assert result.summary["preemptions"] == 0
