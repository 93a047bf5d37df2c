"""Real processes on this machine, and real SIGKILLs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_jobs import job
from torch import Tensor, nn

from culm import Job
from culm.cluster.run_setup import RunResult
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.testing import reference
from culm.training import pickle_job

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]
PATIENCE_S = 60.0
SEEN, AHEAD = 3, 5
"""Steps after which a victim is killed, and how many may run in the meantime."""
ROBUST = job(steps=SEEN + AHEAD + 4, exact=True)


@pytest.fixture(scope="module")
def fork_server(forked_programs: None) -> Iterator[ForkServerClient]:
    with ForkServerClient() as made:
        yield made


@pytest.fixture(scope="module")
def failure_free() -> str:
    """What is learned where nobody is killed."""
    return reference(ROBUST).state_sha256


def children(pid: int) -> list[int]:
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def outcome(
    fork_server: ForkServerClient, described: Job, request: RunConfig, victim: str | None = None
) -> tuple[RunResult, int]:
    """How a run ends whose victim is killed after some steps, and its node; checks that no process is left."""

    async def main() -> tuple[RunResult, int]:
        async with local_run(fork_server, pickle_job(described), request, gate="outside") as run:
            node = -1
            if victim is not None:
                run.permit_steps_below(SEEN + AHEAD)
                for _ in range(SEEN):
                    await run.next_step()
                node, pid = _find(fork_server, run, victim)
                os.kill(pid, signal.SIGKILL)
            run.permit_steps_below(described.steps)
            return await run.wait_for_result(), node

    async def bounded() -> tuple[RunResult, int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    found = asyncio.run(bounded())
    assert children(fork_server.pid) == []
    return found


def _find(fork_server: ForkServerClient, run: RunHandle, victim: str) -> tuple[int, int]:
    """Agents were started in the order of their nodes; each has one child, its worker."""
    kind, _, which = victim.partition(" of ")
    leader = run.leader or 0
    node = leader if which == "the leader" else 1 - leader
    agent = children(fork_server.pid)[node]
    return node, agent if kind == "agent" else children(agent)[0]


VICTIMS = [f"{kind} of {whom}" for kind in ("agent", "worker") for whom in ("the leader", "another")]


@pytest.mark.parametrize(("victim", "pipelines"), list(zip(VICTIMS, (1, 2, 2, 1), strict=True)))
def test_a_killed_process_ends_the_run_with_the_number_of_its_node(
    fork_server: ForkServerClient, pipelines: int, victim: str
) -> None:
    """Also where the others were adding up with it and heard of it first."""
    request = RunConfig(pipelines=pipelines, stages=2 // pipelines, strategy="none")
    found, node = outcome(fork_server, job(steps=10**6), request, victim)
    assert found.error == "NodeLost"
    assert found.message.startswith(f"node {node}")
    assert "was lost" in found.message
    assert "strategy none survives no loss" in found.message


@pytest.mark.parametrize(("victim", "pipelines"), list(zip(VICTIMS, (2, 1, 1, 2), strict=True)))
def test_by_default_a_run_continues_without_a_process_that_is_killed(
    fork_server: ForkServerClient, failure_free: str, pipelines: int, victim: str
) -> None:
    """By a shadow, or by a peer; at no chosen moment, and whoever led."""
    found, node = outcome(fork_server, ROBUST, RunConfig(pipelines=pipelines, stages=2 // pipelines), victim)
    assert found.summary is not None, found.message
    recoveries: Any = found.summary["recoveries"]
    assert found.summary["preemptions"] == 1
    assert [lost for recovered in recoveries for lost in recovered["lost"]] == [node]
    assert found.summary["state_sha256"] == failure_free


def test_an_encrypted_run_goes_on_without_a_process_that_is_killed_and_no_bit_differs(
    fork_server: ForkServerClient, failure_free: str
) -> None:
    """Its sums travel over encrypted frames instead of Gloo."""
    request = RunConfig(pipelines=2, encrypt="on")
    found, _ = outcome(fork_server, ROBUST, request, "worker of another")
    assert found.summary is not None, found.message
    assert found.summary["preemptions"] == 1
    assert found.summary["state_sha256"] == failure_free


class Turned(nn.Module):
    """Its output lies transposed in memory, and its input's layout shows in the last bits of its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x) + x.mean((0, 2), keepdim=True) + x.sum(-1, keepdim=True)
        return torch.tanh(made).transpose(1, 2)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolution(x)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("layer", "shape"), [(Turned, (33, 33)), (ChannelsLast, (3, 9, 9))])
def test_the_memory_layout_of_a_tensor_is_the_same_on_the_other_side_of_a_socket(
    fork_server: ForkServerClient, layer: type[nn.Module], shape: tuple[int, ...]
) -> None:
    """Or stages would learn something else than one process does."""
    items = [(torch.randn(shape, generator=torch.Generator().manual_seed(i)), torch.zeros(shape)) for i in range(16)]
    described = job(layers=[layer] * 4, data=items)
    found, _ = outcome(fork_server, described, RunConfig(stages=2))
    assert found.summary is not None
    assert found.summary["weights_sha256"] == reference(described).weights_sha256
