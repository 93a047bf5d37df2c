"""A worker by itself: it asks for weights, computes what it was given, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from tests.gnn.house import small_graph, small_model
from torch import Tensor

from culm.gnn import messages as say
from culm.gnn import worker
from culm.gnn.model import initial_weights
from culm.gnn.worker import _Generation

GRAPH = small_graph()
MODEL = small_model(GRAPH)
WEIGHTS = initial_weights(MODEL, 0, None)
ROWS = 5


class Ear:
    """The other end of a link."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self._more = asyncio.Event()

    def send(self, message: say.Message, tensors: list[Tensor] | None = None) -> None:
        self.said.append(message)
        self._more.set()

    def close(self) -> None:
        """Nothing is heard afterwards anyway."""

    async def until(self, count: int) -> list[Any]:
        async with asyncio.timeout(60):
            while len(self.said) < count:
                self._more.clear()
                await self._more.wait()
        return self.said


class Desk:
    """One worker with one parameter server and one graph server, neither of which is there."""

    def __init__(self) -> None:
        self.parameter, self.server = Ear(), Ear()
        roster = say.Roster(1, (), (), MODEL, seed=0, total=GRAPH.train_vertices)
        self.worker = _Generation(roster, "token", "w")
        self.worker._parameter = [self.parameter]  # type: ignore[list-item]
        self.worker._working = asyncio.get_running_loop().create_task(self.worker._work())

    def give(self, number: int, version: int, interval: int = 0) -> None:
        """AV1 of an interval, with weights of that version."""
        work = say.Work(
            task=(number, 0, interval), now=(number, number, True), step=("AV", 1, False),
            versions={0: version, 1: version}, pieces=(("vertices", 0, ROWS), ("X", 0, ROWS)), kept=False,
        )  # fmt: skip
        self.worker._take(self.server, work, [torch.arange(ROWS), torch.rand(ROWS, GRAPH.width)])  # type: ignore[arg-type]

    def weights(self, *versions: int) -> None:
        for version in versions:
            for layer, own in WEIGHTS.items():
                message = say.Weights(layer, version, tuple(own))
                self.worker._heard_weights(self.parameter, message, list(own.values()))  # type: ignore[arg-type]

    def pulled(self) -> list[tuple[int, int]]:
        return [(said.layer, said.version) for said in self.parameter.said]


def with_a_worker(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        desk = Desk()
        try:
            await scenario(desk)
        finally:
            desk.worker.close()

    asyncio.run(run())


def test_a_version_that_was_forgotten_is_asked_for_again() -> None:
    async def scenario(desk: Desk) -> None:
        desk.give(0, version=0)
        desk.weights(0)
        await desk.server.until(1)
        desk.weights(1, 2, 3, 4, 5)
        desk.give(5, version=0)
        assert desk.pulled() == [(0, 0), (1, 0)] * 2
        desk.weights(0)
        assert [done.task[0] for done in await desk.server.until(2)] == [0, 5]

    with_a_worker(scenario)


def test_a_version_that_is_there_or_on_its_way_is_not_asked_for_twice() -> None:
    async def scenario(desk: Desk) -> None:
        desk.give(0, version=0)
        desk.give(0, version=0, interval=1)
        desk.weights(0)
        desk.give(0, version=0, interval=2)
        await desk.server.until(3)
        assert desk.pulled() == [(0, 0), (1, 0)]

    with_a_worker(scenario)


def test_a_version_that_a_task_waits_with_is_not_forgotten_before_it_was_read() -> None:
    async def scenario(desk: Desk) -> None:
        desk.weights(0)
        desk.give(0, version=0)
        desk.weights(1, 2, 3, 4, 5, 6)
        assert [done.task[0] for done in await desk.server.until(1)] == [0]
        assert desk.pulled() == []

    with_a_worker(scenario)


def test_the_oldest_pass_goes_first_of_those_whose_weights_are_there() -> None:
    async def scenario(desk: Desk) -> None:
        desk.weights(2)
        desk.give(1, version=1)
        desk.give(3, version=2)
        desk.give(2, version=2)
        assert [done.task[0] for done in await desk.server.until(2)] == [2, 3]
        desk.weights(1)
        assert [done.task[0] for done in await desk.server.until(3)] == [2, 3, 1]

    with_a_worker(scenario)


@pytest.mark.parametrize("brief", [float("inf"), 0.0])
def test_brief_tasks_go_without_a_thread_and_others_with_one(brief: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BRIEF_S", brief)
    submitted: list[int] = []

    async def scenario(desk: Desk) -> None:
        submit = desk.worker._thread.submit

        def noted(*work: Any) -> Any:
            submitted.append(1)
            return submit(*work)

        desk.worker._took["AV", 1, False] = 1.0
        monkeypatch.setattr(desk.worker._thread, "submit", noted)
        desk.weights(0)
        for interval in range(3):
            desk.give(0, version=0, interval=interval)
        assert len(await desk.server.until(3)) == 3

    with_a_worker(scenario)
    assert len(submitted) == (0 if brief else 3)
