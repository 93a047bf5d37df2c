"""A single worker: it requests weights, computes its tasks, and reports the results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from tests.gnn.simulated_run import small_graph, small_model
from torch import Tensor

from culm.gnn.model.gnn_model import initial_weights
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.worker import elastic_worker
from culm.gnn.worker.elastic_worker import _WorkerSession

GRAPH = small_graph()
MODEL = small_model(GRAPH)
WEIGHTS = initial_weights(MODEL, 0, None)
ROWS = 5


class RecordingLink:
    """A link that records what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._more = asyncio.Event()

    def send(self, message: messages.GnnMessage, tensors: list[Tensor] | None = None) -> None:
        self.sent.append(message)
        self._more.set()

    def close(self) -> None:
        """Nothing to close."""

    async def wait_for_messages(self, count: int) -> list[Any]:
        async with asyncio.timeout(60):
            while len(self.sent) < count:
                self._more.clear()
                await self._more.wait()
        return self.sent


class WorkerHarness:
    """One worker session with recording links in place of a parameter server and a graph server."""

    def __init__(self) -> None:
        self.parameter, self.server = RecordingLink(), RecordingLink()
        addresses = messages.ServerAddresses(1, (), (), MODEL, seed=0, train_vertices=GRAPH.train_vertices)
        self.worker = _WorkerSession(addresses, "token", "w")
        self.worker._parameter_links = [self.parameter]  # type: ignore[list-item]
        self.worker._work_task = asyncio.get_running_loop().create_task(self.worker._work_loop())

    def assign_task(self, number: int, version: int, interval: int = 0) -> None:
        """Assign AV1 of an interval, with weights of that version."""
        assignment = messages.TaskAssignment(
            task=(number, 0, interval), graph_pass=(number, number, True), step=("AV", 1, False),
            versions={0: version, 1: version}, slices=(("vertices", 0, ROWS), ("X", 0, ROWS)), forward_kept=False,
        )  # fmt: skip
        self.worker._accept_assignment(self.server, assignment, [torch.arange(ROWS), torch.rand(ROWS, GRAPH.width)])  # type: ignore[arg-type]

    def deliver_weights(self, *versions: int) -> None:
        for version in versions:
            for layer, weights in WEIGHTS.items():
                message = messages.WeightVersion(layer, version, tuple(weights))
                self.worker._handle_weights(self.parameter, message, list(weights.values()))  # type: ignore[arg-type]

    def requested_versions(self) -> list[tuple[int, int]]:
        return [(message.layer, message.version) for message in self.parameter.sent]


def run_with_worker(scenario: Callable[[WorkerHarness], Awaitable[None]]) -> None:
    async def run() -> None:
        harness = WorkerHarness()
        try:
            await scenario(harness)
        finally:
            harness.worker.close()

    asyncio.run(run())


def test_a_dropped_version_is_requested_again() -> None:
    async def scenario(harness: WorkerHarness) -> None:
        harness.assign_task(0, version=0)
        harness.deliver_weights(0)
        await harness.server.wait_for_messages(1)
        harness.deliver_weights(1, 2, 3, 4, 5)
        harness.assign_task(5, version=0)
        assert harness.requested_versions() == [(0, 0), (1, 0)] * 2
        harness.deliver_weights(0)
        assert [done.task[0] for done in await harness.server.wait_for_messages(2)] == [0, 5]

    run_with_worker(scenario)


def test_a_present_or_requested_version_is_not_requested_twice() -> None:
    async def scenario(harness: WorkerHarness) -> None:
        harness.assign_task(0, version=0)
        harness.assign_task(0, version=0, interval=1)
        harness.deliver_weights(0)
        harness.assign_task(0, version=0, interval=2)
        await harness.server.wait_for_messages(3)
        assert harness.requested_versions() == [(0, 0), (1, 0)]

    run_with_worker(scenario)


def test_a_version_that_a_queued_task_needs_is_not_dropped() -> None:
    async def scenario(harness: WorkerHarness) -> None:
        harness.deliver_weights(0)
        harness.assign_task(0, version=0)
        harness.deliver_weights(1, 2, 3, 4, 5, 6)
        assert [done.task[0] for done in await harness.server.wait_for_messages(1)] == [0]
        assert harness.requested_versions() == []

    run_with_worker(scenario)


def test_the_oldest_pass_with_present_weights_goes_first() -> None:
    async def scenario(harness: WorkerHarness) -> None:
        harness.deliver_weights(2)
        harness.assign_task(1, version=1)
        harness.assign_task(3, version=2)
        harness.assign_task(2, version=2)
        assert [done.task[0] for done in await harness.server.wait_for_messages(2)] == [2, 3]
        harness.deliver_weights(1)
        assert [done.task[0] for done in await harness.server.wait_for_messages(3)] == [2, 3, 1]

    run_with_worker(scenario)


@pytest.mark.parametrize("inline_s", [float("inf"), 0.0])
def test_short_tasks_run_in_the_event_loop_and_others_in_a_thread(
    inline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_worker, "_INLINE_TASK_S", inline_s)
    submitted: list[int] = []

    async def scenario(harness: WorkerHarness) -> None:
        submit = harness.worker._compute_thread.submit

        def submit_and_count(*arguments: Any) -> Any:
            submitted.append(1)
            return submit(*arguments)

        harness.worker._last_duration["AV", 1, False] = 1.0
        monkeypatch.setattr(harness.worker._compute_thread, "submit", submit_and_count)
        harness.deliver_weights(0)
        for interval in range(3):
            harness.assign_task(0, version=0, interval=interval)
        assert len(await harness.server.wait_for_messages(3)) == 3

    run_with_worker(scenario)
    assert len(submitted) == (0 if inline_s else 3)
