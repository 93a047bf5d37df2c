"""Real processes on this machine, and real SIGKILLs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from culm import Job
from culm.api import pickled
from culm.cluster.setup import Request, Result
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.testing import reference

from .jobs import job

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked")]
PATIENCE_S = 60.0
SEEN, AHEAD = 3, 5
"""Steps after which a victim is killed, and how many may run in the meantime."""
ROBUST = job(steps=SEEN + AHEAD + 4, exact=True)


@pytest.fixture(scope="module")
def nursery(forked: None) -> Iterator[LocalNursery]:
    with LocalNursery() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What is learned where nobody is killed."""
    return reference(ROBUST).state_sha256


def children(pid: int) -> list[int]:
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def outcome(nursery: LocalNursery, described: Job, request: Request, victim: str | None = None) -> tuple[Result, int]:
    """How a run ends whose victim is killed after some steps, and its node; checks that no process is left."""

    async def main() -> tuple[Result, int]:
        async with local_run(nursery, pickled(described), replace(request, gate="outside")) as run:
            node = -1
            if victim is not None:
                run.permit(SEEN + AHEAD)
                for _ in range(SEEN):
                    await run.step()
                node, pid = _find(nursery, run, victim)
                os.kill(pid, signal.SIGKILL)
            run.permit(described.steps)
            return await run.result(), node

    async def bounded() -> tuple[Result, int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    found = asyncio.run(bounded())
    assert children(nursery.pid) == []
    return found


def _find(nursery: LocalNursery, run: LocalRun, victim: str) -> tuple[int, int]:
    """Agents were started in the order of their nodes; each has one child, its worker."""
    kind, _, which = victim.partition(" of ")
    leader = run.leader or 0
    node = leader if which == "the leader" else 1 - leader
    agent = children(nursery.pid)[node]
    return node, agent if kind == "agent" else children(agent)[0]


VICTIMS = [f"{kind} of {whom}" for kind in ("agent", "worker") for whom in ("the leader", "another")]


@pytest.mark.parametrize(("victim", "pipelines"), list(zip(VICTIMS, (1, 2, 2, 1), strict=True)))
def test_a_killed_process_ends_the_run_with_the_number_of_its_node(
    nursery: LocalNursery, pipelines: int, victim: str
) -> None:
    """Also where the others were adding up with it and heard of it first."""
    request = Request(pipelines=pipelines, stages=2 // pipelines, strategy="none")
    found, node = outcome(nursery, job(steps=10**6), request, victim)
    assert found.error == "NodeLost"
    assert found.message.startswith(f"node {node}")
    assert "vanished" in found.message
    assert "nobody else holds its layers" in found.message


@pytest.mark.parametrize(("victim", "pipelines"), list(zip(VICTIMS, (2, 1, 1, 2), strict=True)))
def test_unless_told_otherwise_a_run_goes_on_without_a_process_that_is_killed(
    nursery: LocalNursery, undisturbed: str, pipelines: int, victim: str
) -> None:
    """By a shadow, or by a peer; at no chosen moment, and whoever led."""
    found, node = outcome(nursery, ROBUST, Request(pipelines=pipelines, stages=2 // pipelines), victim)
    assert found.summary is not None, found.message
    recoveries: Any = found.summary["recoveries"]
    assert found.summary["preemptions"] == 1
    assert [lost for recovered in recoveries for lost in recovered["lost"]] == [node]
    assert found.summary["state_sha256"] == undisturbed


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
def test_how_a_tensor_lies_in_memory_is_the_same_on_the_other_side_of_a_socket(
    nursery: LocalNursery, layer: type[nn.Module], shape: tuple[int, ...]
) -> None:
    """Or stages would learn something else than one process does."""
    items = [(torch.randn(shape, generator=torch.Generator().manual_seed(i)), torch.zeros(shape)) for i in range(16)]
    described = job(layers=[layer] * 4, data=items)
    found, _ = outcome(nursery, described, Request(stages=2))
    assert found.summary is not None
    assert found.summary["weights_sha256"] == reference(described).weights_sha256
