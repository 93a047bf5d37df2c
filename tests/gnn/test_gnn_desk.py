"""The desk: as many workers as are wanted, and no more because one of them was slow to come."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from culm.errors import RunError
from culm.gnn import desk as room
from culm.gnn import messages as say
from culm.gnn.desk import Desk
from culm.gnn.launch.base import Ticket
from culm.gnn.link import Link, dial


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Slow:
    """A launcher that takes its time, and whose workers never call."""

    clock: Clock
    seconds: float
    asked: int = 0
    name: str = "slow"

    async def launch(self, ticket: Ticket, count: int) -> None:
        self.asked += count
        self.clock.now += self.seconds

    async def close(self) -> None:
        pass


async def supplied(launcher: Slow, *, seconds_a_look: float, looks: int) -> None:
    found = Desk("r1", "token", launcher, 2, seconds=60, told=lambda **_: None)
    supply = asyncio.create_task(found.supply())
    try:
        for _ in range(looks):
            await asyncio.sleep(0)
            launcher.clock.now += seconds_a_look
        if supply.done():
            supply.result()
    finally:
        supply.cancel()
        with contextlib.suppress(asyncio.CancelledError, RunError):
            await supply
        await found.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(room, "time", made)
    monkeypatch.setattr(room, "_LOOK_S", 0)
    return made


def test_a_slow_launch_is_not_held_against_the_workers_that_it_starts(clock: Clock) -> None:
    launcher = Slow(clock, seconds=60.0)
    asyncio.run(supplied(launcher, seconds_a_look=1.0, looks=15))
    assert launcher.asked == 2


def test_workers_that_do_not_call_in_time_are_asked_for_again(clock: Clock) -> None:
    launcher = Slow(clock, seconds=0.0)
    asyncio.run(supplied(launcher, seconds_a_look=3.0, looks=10))
    assert launcher.asked == 4


def test_a_run_without_any_worker_ends_with_a_sentence(clock: Clock) -> None:
    with pytest.raises(RunError, match=r"no worker has called for 120 s: check that the slow launcher"):
        asyncio.run(supplied(Slow(clock, seconds=0.0), seconds_a_look=10.0, looks=20))


def test_a_worker_that_goes_when_it_is_sent_home_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sent_home() -> int:
        found, gone = Desk("r1", "token", Slow(Clock(), 0.0), 1, seconds=60, told=lambda **_: None), asyncio.Event()

        async def goes_first(link: Link) -> None:
            """The worker has hung up, and the desk knows, before the desk does."""
            del link
            await gone.wait()
            for _ in range(5):
                await asyncio.sleep(0)

        def heard(link: Link, message: say.Message, tensors: object) -> None:
            link.close()
            gone.set()

        monkeypatch.setattr(Link, "drained", goes_first)
        worker = await dial(found.address, "token", "worker w1 r1", heard, lambda _: None)
        worker.send(say.Hello(1, "here"))
        while len(found) == 0:
            await asyncio.sleep(0)
        await found.close()
        return found.lost

    assert asyncio.run(sent_home()) == 0
