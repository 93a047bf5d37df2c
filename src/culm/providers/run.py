"""A run as its launcher sees it: through the store, like everybody else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from culm.cluster.recovered import Recovered, decode_recoveries
from culm.cluster.setup import Result, Setup, decode_node, decode_result, encode
from culm.errors import NodeLost, RunError
from culm.providers.nodes import Nodes
from culm.runtime import epoch as letters
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.store import Store
    from culm.providers.base import Provider


class Lost(NamedTuple):
    """A node vanished while the run went on."""

    node: int
    how: str = ""
    """What became of its worker, where that is known and was nobody's kill."""


class Came(NamedTuple):
    """A node came while the run went on: it fills a slot as soon as it has a copy of a stage."""

    node: int


News = Lost | Came | Recovered


class LocalRun:
    """What the store says of a run, from `follow` being started on; and the few things that a launcher says there."""

    def __init__(self, setup: Setup, store: Store, provider: Provider, *, alone: bool = True) -> None:
        """`alone`: all nodes come from this launcher's provider."""
        self.setup, self.store, self.alone = setup, store, alone
        self.nodes = Nodes(self, provider)
        self.lost: list[int] = []
        """Nodes that vanished while the run went on, in order."""
        self.leader: int | None = None
        """The node that leads, or led last; None: nobody yet."""
        self.full_steps_s: list[float] = []
        """Seconds of each step that began and ended while every slot was filled."""
        self.samples_per_step = 0
        self._full = asyncio.Event()
        self.epoch: letters.Epoch | None = None
        self._last_t: float | None = None
        """When the last step ended, if the epoch is still the same."""
        self._begun = asyncio.Event()
        self._led = asyncio.Event()
        self._there: set[int] = set()
        self._left = asyncio.Event()
        self._ends: dict[int, str] = {}
        """How workers ended that nobody killed, by node."""
        self._joined: set[int] = set()
        self._up: set[int] = set()
        self._recoveries = 0
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._ups: asyncio.Queue[int] = asyncio.Queue()
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._said: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def follow(self) -> None:
        """Hear and say until cancelled. That the store is out of reach for good ends the run."""
        saying = asyncio.create_task(self._say())
        try:
            async for key, value in self.store.watch(""):
                self._hear(key, value)
        except RunError as error:
            self._end(Result(error=RunError.__name__, message=str(error)))
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)

    def _hear(self, key: str, value: bytes | None) -> None:
        kind, _, name = key.partition("/")
        if kind == "nodes":
            self._hear_of_node(int(name), value)
        elif value is None:
            return
        elif kind == "ended":
            self._ends[int(name)] = value.decode()
        elif kind == "leader":
            self.leader = int(value)
            self._led.set()
        elif kind == "step":
            self._hear_of_step(msgspec.msgpack.decode(value))
        elif kind == "epoch":
            self._hear_of_epoch(letters.decode(value))
        elif kind == "record":
            self._hear_of_recoveries(decode_recoveries(value).recoveries)
        elif kind == "result":
            self._end(decode_result(value))

    def _hear_of_node(self, node: int, value: bytes | None) -> None:
        self._joined.add(node)
        (self._there.discard if value is None else self._there.add)(node)
        self._left.set()
        if value is None and not self._result.done():
            self.lost.append(node)
            self._news.put_nowait(Lost(node, self._ends.get(node, "")))
        elif value is not None and decode_node(value).worker and node not in self._up:
            self._up.add(node)
            self._ups.put_nowait(node)
            if node >= self.setup.nodes:
                self._news.put_nowait(Came(node))

    def _hear_of_epoch(self, epoch: letters.Message) -> None:
        assert isinstance(epoch, letters.Epoch)
        self.epoch, self._last_t = epoch, None
        (self._full.set if _filled(epoch) else self._full.clear)()

    def _hear_of_step(self, metrics: dict[str, Any]) -> None:
        self._begun.set()
        if self._full.is_set() and self._last_t is not None:
            self.full_steps_s.append(metrics["t"] - self._last_t)
        self.samples_per_step, self._last_t = metrics["samples"], metrics["t"]
        self._steps.put_nowait(metrics)

    def _hear_of_recoveries(self, recoveries: tuple[Recovered, ...]) -> None:
        for recovered in recoveries[self._recoveries :]:
            self._news.put_nowait(recovered)
        self._recoveries = max(self._recoveries, len(recoveries))

    def _end(self, result: Result) -> None:
        if not self._result.done():
            self._result.set_result(result)
            self._steps.put_nowait(None)

    async def _say(self) -> None:
        """In the order in which it was said. The first result of a run stays."""
        while True:
            key, value = await self._said.get()
            if key == "result":
                await self.store.swap(key, None, value)
            else:
                await self.store.put(key, value)

    async def led(self) -> int:
        """Wait until somebody leads: who."""
        await self._led.wait()
        assert self.leader is not None
        return self.leader

    async def begun(self) -> None:
        """Wait for the first step to be committed."""
        await self._begun.wait()

    async def filled(self) -> None:
        """Wait until every slot has a worker that runs its stage."""
        await self._full.wait()

    async def news(self) -> News:
        """The next node that came or is lost, or the next loss that the run has recovered from."""
        return await self._news.get()

    def rest(self) -> list[News]:
        """The news that nobody has asked for yet."""
        return [self._news.get_nowait() for _ in range(self._news.qsize())]

    async def step(self) -> dict[str, Any] | None:
        """The metrics of the next committed step; None when the run has ended."""
        found = await self._steps.get()
        if found is None:
            self._steps.put_nowait(None)
        return found

    def joined(self, node: int) -> bool:
        """Whether its agent has ever been in the store: from then on, its end is noticed there."""
        return node in self._joined

    async def deserted(self) -> None:
        """Wait until the run has ended and no node is left in the store."""
        await self.result()
        while self._there:
            self._left.clear()
            await self._left.wait()

    async def node_up(self) -> int:
        """The number of the next node whose worker is up."""
        return await self._ups.get()

    def permit(self, until: int) -> None:
        """With the gate `outside`: steps below this number may run."""
        self._said.put_nowait(("gate/permit", str(until).encode()))

    def finish(self, step: int) -> None:
        """With the gate `outside`: end the run before a step."""
        self._said.put_nowait(("gate/finish", str(step).encode()))

    def fail(self, message: str) -> None:
        """End the run from outside, unless it has ended."""
        self._said.put_nowait(("result", encode(Result(error=RunError.__name__, message=message))))

    @property
    def ended(self) -> bool:
        return self._result.done()

    async def result(self) -> Result:
        """How it ended. What its workers died of, if not of a kill, is why nodes were lost."""
        result = await asyncio.shield(self._result)
        if result.summary is not None or result.error not in (RunError.__name__, NodeLost.__name__) or not self._ends:
            return result
        node, how = next(iter(self._ends.items()))
        return msgspec.structs.replace(result, message=f"{result.message}; the worker of node {node} had {how}")


def _filled(epoch: letters.Epoch) -> bool:
    """Whether every slot has a worker that runs its stage."""
    plan = Plan.from_text(epoch.plan)
    return None not in epoch.members and all(plan.stages_of(slot) for slot in range(len(epoch.members)))
