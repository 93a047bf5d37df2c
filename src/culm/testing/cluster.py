"""A whole cluster in one process: the same agents, leader and workers as in production over simulated seams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from culm import errors
from culm.cluster.agent import Agent
from culm.cluster.prepare import Request, prepare
from culm.cluster.setup import Result, Setup, decode_result, encode
from culm.cluster.store import MemoryStore
from culm.errors import CulmError, RunError
from culm.job import Job
from culm.runtime.state import Snapshot
from culm.runtime.worker import Worker
from culm.testing.loop import VirtualClock, run_virtual
from culm.transport.memory import MemoryNetwork


@dataclass
class Simulated:
    """What a simulated run comes to: its summary, the losses by step, and the state at the end."""

    summary: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    snapshot: Snapshot = field(default_factory=Snapshot)
    virtual_s: float = 0.0

    @property
    def weights_sha256(self) -> str:
        return str(self.summary["weights_sha256"])

    @property
    def state_sha256(self) -> str:
        return str(self.summary["state_sha256"])


def simulate(
    job: Job, *, cost: Callable[[int, str], float] | None = None, latency: float = 0.0, **request: Any
) -> Simulated:
    """Train a job on a simulated cluster; the arguments are those of `culm.train`. Raises what a real run would."""
    setup = prepare(job, Request(**request))
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return run_virtual(_Cluster(job, setup, VirtualClock(cost), MemoryNetwork(latency)).run())
    finally:
        torch.set_num_threads(before)


class _Cluster:
    def __init__(self, job: Job, setup: Setup, clock: VirtualClock, network: MemoryNetwork) -> None:
        self.job, self.setup, self.clock, self.network = job, setup, clock, network
        self.store = MemoryStore()
        self.workers: dict[int, Worker] = {}

    async def run(self) -> Simulated:
        self.store.write("setup", encode(self.setup))
        steps = self.store.subscribe("step")
        nodes = [asyncio.create_task(self._node(number)) for number in range(self.setup.nodes)]
        await asyncio.gather(*nodes)
        result = decode_result(self.store.read("result") or b"")
        if result.summary is None:
            raise raised(result)
        import msgspec

        losses = [msgspec.json.decode(steps.get_nowait().value or b"{}")["loss"] for _ in range(steps.qsize())]
        return Simulated(result.summary, losses, self._snapshot(), self.clock.now())

    async def _node(self, number: int) -> None:
        """A node: an agent, which starts a worker."""

        async def start_worker(agent: str) -> None:
            endpoint = self.network.endpoint(f"worker-{number}")
            worker = self.workers[number] = Worker(self.job, number, agent, endpoint, self.clock)
            try:
                await worker.run()
            finally:
                await endpoint.close()

        endpoint = self.network.endpoint(f"agent-{number}")
        client = self.store.client(f"agent-{number}")
        agent = Agent(self.job, number, "simulated", endpoint, self.clock, client, start_worker)
        await agent.run()
        self.store.end(f"agent-{number}")
        await endpoint.close()

    def _snapshot(self) -> Snapshot:
        """The model, each layer from its first holder."""
        found = Snapshot()
        for worker in reversed(list(self.workers.values())):
            if worker.state is not None:
                found.update(worker.state.snapshot())
        return found.copy()


def raised(result: Result) -> CulmError:
    """The error that ended a run."""
    kind: type[CulmError] = getattr(errors, result.error or "", RunError)
    error = kind(result.message)
    error.trace = result.trace
    return error
