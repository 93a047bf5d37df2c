"""An exception on one real node: another holder repeats the action, and no bit differs."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
from tests.tiny_jobs import Nap, job
from torch import Tensor, nn

from culm import Job
from culm.cluster.leader.output import input_log
from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, local_run
from culm.providers.run_events import IncidentEvent, event_line
from culm.testing import reference
from culm.training import pickle_job

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]
PATIENCE_S = 120.0
STEPS = 24
ECC = "CUDA error: uncorrectable ECC error encountered"


class FaultyMemory(nn.Module):
    """A layer that raises once, on the first worker that renames a file, in training."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.token = Path(token)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.training and self.token.exists():
            self.token.rename(f"{self.token}.used")
            raise RuntimeError(ECC)
        return out


def described(token: Path) -> Job:
    layers = [Nap, Nap, Nap, partial(FaultyMemory, str(token))]
    return job(layers=layers, steps=STEPS, exact=True)


def run_faulty(fork_server: ForkServerClient, folder: Path, token: Path) -> tuple[RunResult, list[str]]:
    """Run 2 x 2. The token, with which one node raises, is there after the third step."""
    request = RunConfig(pipelines=2, stages=2, strategy="reroute", out=str(folder))

    async def main() -> tuple[RunResult, list[str]]:
        async with local_run(fork_server, pickle_job(described(token)), request) as run:
            for _ in range(3):
                await run.next_step()
            token.write_text("")
            result = await run.wait_for_result()
            return result, [event_line(each) for each in run.pending_events() if isinstance(each, IncidentEvent)]

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_one_node_that_raises_is_replaced_and_no_bit_differs(fork_server: ForkServerClient, tmp_path: Path) -> None:
    result, shown = run_faulty(fork_server, tmp_path / "run", tmp_path / "token")
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == reference(described(tmp_path / "token")).state_sha256
    assert result.summary["preemptions"] == 1
    assert (result.summary["samples_lost"], result.summary["samples_duplicated"]) == (0, 0)
    assert "another holder repeats the action" in shown[0]
    assert "is declared lost" in shown[1]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["kind"] == "worker_failed"]
    assert ECC in failed["why"]
    assert "test_worker_failures_real.py:" in failed["error"]
    for path in (tmp_path / "run").glob(input_log.FILE_PATTERN):
        assert input_log.replay(path)[1] is None
