"""Real SIGTERMs: the node hands over its state and ends cleanly, and the result does not change."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import Nap, job

from culm import Job
from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.providers.fork_server import AgentExited, ForkServerReply
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.testing import reference
from culm.training import pickle_job

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]
PATIENCE_S = 120.0
STEPS = 9


class Watched(ForkServerClient):
    """A fork server that records the exit statuses of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: dict[int, int] = {}

    async def next_reply(self) -> ForkServerReply:
        found = await super().next_reply()
        if isinstance(found, AgentExited):
            self.statuses[found.node] = found.status
        return found


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    made = Watched()
    with made:
        yield made


def slow(seconds: float = 0.005) -> Job:
    """Slow layers, so that a SIGTERM can arrive within a step."""
    return job(layers=[partial(Nap, seconds)] * 4, global_batch=16, steps=STEPS, exact=True)


@pytest.fixture(scope="module")
def failure_free() -> str:
    """The weights of a failure-free run."""
    return reference(slow(0.0)).weights_sha256


def agents(fork_server: ForkServerClient) -> list[int]:
    """The processes of the agents, in the order of their nodes."""
    return sorted(map(int, Path(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children").read_text().split()))


def told_to_go(
    fork_server: Watched, who: Callable[[RunHandle], Sequence[int]], *, after: int = 3, **request: Any
) -> tuple[RunResult, list[int], dict[int, int]]:
    """The result of a run in which some agents receive SIGTERM within a step, these agents, and all exit statuses."""

    async def main() -> tuple[RunResult, list[int]]:
        asked = RunConfig(strategy="reroute", **{"pipelines": 2, "stages": 2, **request})
        async with local_run(fork_server, pickle_job(slow()), asked) as run:
            await run.next_node_up()
            while len(agents(fork_server)) < run.setup.nodes:  # the others are still being forked
                await asyncio.sleep(0.001)
            for _ in range(after):
                await run.next_step()
            nodes = list(who(run))
            for pid in [agents(fork_server)[node] for node in nodes]:
                os.kill(pid, signal.SIGTERM)
            return await run.wait_for_result(), nodes

    async def bounded() -> tuple[RunResult, list[int]]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    fork_server.statuses.clear()
    result, nodes = asyncio.run(bounded())
    assert agents(fork_server) == []
    return result, nodes, dict(fork_server.statuses)


def leader(run: RunHandle) -> int:
    return run.leader or 0


WHO: dict[str, tuple[int, Callable[[RunHandle], Sequence[int]]]] = {
    "a node": (1, lambda run: [1 - leader(run)]),
    "the leader": (1, lambda run: [leader(run)]),
    "two of one pipeline": (2, lambda run: [2, 3] if leader(run) < 2 else [0, 1]),
    "two of other stages, one of them the leader": (2, lambda run: [leader(run), 3 - leader(run)]),
}
"""With the stages of its two pipelines."""


@pytest.mark.parametrize("who", WHO)
def test_a_node_with_sigterm_leaves_and_nothing_is_lost_or_redone(
    watched: Watched, failure_free: str, who: str
) -> None:
    stages, chosen = WHO[who]
    result, nodes, statuses = told_to_go(watched, chosen, stages=stages)
    assert result.summary is not None, result.message
    found = result.summary
    assert found["weights_sha256"] == failure_free
    assert (found["steps"], found["samples_lost"], found["samples_duplicated"]) == (STEPS, 0, 0)
    recoveries: Any = found["recoveries"]
    assert sorted(node for each in recoveries for node in each["lost"]) == sorted(nodes)
    assert {(each["redone_actions"], each["source"]) for each in recoveries} == {(0, "notice")}
    assert statuses == dict.fromkeys(range(2 * stages), 0)


def test_a_run_starts_without_a_node_with_sigterm_before_the_first_step(watched: Watched, failure_free: str) -> None:
    result, _, statuses = told_to_go(watched, lambda run: [1], after=0, stages=1)
    assert result.summary is not None, result.message
    assert result.summary["weights_sha256"] == failure_free
    assert statuses == dict.fromkeys(range(2), 0)


def test_sigterm_to_all_nodes_leaves_a_checkpoint_to_resume_from(
    watched: Watched, failure_free: str, tmp_path: Path
) -> None:
    result, _, statuses = told_to_go(watched, lambda run: range(4), out=str(tmp_path))
    assert result.error == "NodeLost"
    assert "every node has notice: the run ended before step" in result.message
    assert f"resume it with --resume {tmp_path}" in result.message
    assert statuses == dict.fromkeys(range(4), 0)
    resumed, _, _ = told_to_go(watched, lambda run: [], stages=1, resume=str(tmp_path))
    assert resumed.summary is not None, resumed.message
    assert resumed.summary["weights_sha256"] == failure_free
