"""Nodes in virtual time: one that stands still does nothing, one that is gone never does anything again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import pytest

from culm.cluster.store import Change, MemoryStore
from culm.errors import RunError
from culm.testing import History, run_virtual
from culm.testing.loop import virtual_loop
from culm.testing.machines import Machines, Session
from culm.transport.base import Letter
from culm.transport.memory import MemoryNetwork, Parcel, Passage


def now() -> float:
    return asyncio.get_running_loop().time()


# Standing still


def test_a_node_that_stands_still_goes_on_where_it_stood() -> None:
    async def main() -> list[float]:
        ticks: list[float] = []

        async def tick() -> None:
            for _ in range(5):
                await asyncio.sleep(1)
                ticks.append(now())

        task = virtual_loop().on_node(3, tick())
        await asyncio.sleep(2.5)
        virtual_loop().pause(3)
        await asyncio.sleep(10)
        virtual_loop().resume(3)
        await task
        return ticks

    assert run_virtual(main()) == [1.0, 2.0, 12.5, 13.5, 14.5]


def test_nobody_else_stands_still() -> None:
    async def main() -> None:
        async def beside() -> float:
            await asyncio.sleep(1)
            return now()

        tasks = [virtual_loop().on_node(node, beside()) for node in (0, 1)] + [asyncio.create_task(beside())]
        virtual_loop().pause(1)
        await asyncio.sleep(5)
        assert [task.done() for task in tasks] == [True, False, True]
        virtual_loop().resume(1)
        assert [await task for task in tasks] == [1.0, 6.0, 1.0]

    run_virtual(main())


def test_all_that_a_node_starts_stands_still_with_it_from_that_very_moment() -> None:
    async def main() -> None:
        done: list[str] = []

        async def child(name: str) -> None:
            done.append(name)

        async def parent() -> None:
            asyncio.create_task(child("a"))  # noqa: RUF006
            virtual_loop().pause(0)
            asyncio.create_task(child("b"))  # noqa: RUF006
            asyncio.get_running_loop().call_soon(done.append, "c")
            done.append("the action goes to its end")
            await asyncio.sleep(0)
            done.append("d")

        task = virtual_loop().on_node(0, parent())
        await asyncio.sleep(1)
        assert done == ["the action goes to its end"]
        virtual_loop().resume(0)
        await task
        assert done == ["the action goes to its end", "a", "b", "c", "d"]

    run_virtual(main())


def test_a_time_out_that_ran_out_meanwhile_is_over_only_once() -> None:
    """It fires while the node stands still; so does what it waits for. Whichever came first counts."""

    async def main() -> None:
        event = asyncio.Event()

        async def wait() -> str:
            try:
                async with asyncio.timeout(5):
                    await event.wait()
            except TimeoutError:
                return "timed out"
            return "came"

        for first, outcome in ((1.0, "came"), (9.0, "timed out")):
            event.clear()
            task = virtual_loop().on_node(0, wait())
            await asyncio.sleep(0)
            virtual_loop().pause(0)
            asyncio.get_running_loop().call_later(first, event.set)
            await asyncio.sleep(20)
            virtual_loop().resume(0)
            assert await task == outcome

    run_virtual(main())


# Ending


@pytest.mark.parametrize("paused", [False, True])
def test_nothing_of_a_node_that_is_gone_takes_another_step(paused: bool) -> None:
    async def main() -> None:
        done: list[str] = []

        async def child(seconds: float) -> None:
            try:
                await asyncio.sleep(seconds)
                done.append("went on")
            finally:
                done.append("tidied")

        async def parent() -> None:
            for _ in range(3):
                asyncio.create_task(child(1.0))  # noqa: RUF006
            await child(1.0)

        task = virtual_loop().on_node(0, parent())
        await asyncio.sleep(0.5)
        if paused:
            virtual_loop().pause(0)
            await asyncio.sleep(5)  # by now they would have gone on
        virtual_loop().end(0)
        await asyncio.wait([task])
        assert task.cancelled()
        assert done == ["tidied"] * 4

    run_virtual(main())


def test_a_node_that_ends_itself_gets_no_further_than_its_next_wait() -> None:
    async def main() -> None:
        done: list[str] = []

        async def suicide() -> None:
            virtual_loop().end(0)
            done.append("the action goes to its end")
            await asyncio.sleep(0)
            done.append("went on")

        task = virtual_loop().on_node(0, suicide())
        await asyncio.wait([task])
        assert done == ["the action goes to its end"]

    run_virtual(main())


# Sessions


def hurt(play: Callable[[Machines, Session], Awaitable[None]]) -> str:
    """Play with node 1 of two, which has a session in a store; returns the history."""

    async def main() -> str:
        machines = Machines(MemoryNetwork(), MemoryStore(), History(), lease_s=2.0)
        machines.network.way = lambda parcel: Passage(0.0) if hears(machines, parcel) else None
        session = machines.session(1)
        await session.put("nodes/1", b"here", session=True)
        await play(machines, session)
        return str(machines.history)

    return run_virtual(main())


def hears(machines: Machines, parcel: Parcel) -> bool:
    return machines.hears(int(parcel.source[-1]), int(parcel.target[-1]))


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_a_silence_shorter_than_the_lease_is_forgiven(how: str) -> None:
    async def play(machines: Machines, session: Session) -> None:
        for _ in range(3):
            silence(machines, how, 1.9)
            await asyncio.sleep(1.95)
        await asyncio.sleep(10)
        await session.put("still", b"here")
        assert machines.store.read("nodes/1") == b"here"
        assert not machines.gone

    assert "has ended" not in hurt(play)


def silence(machines: Machines, how: str, seconds: float) -> None:
    if how == "paused":
        machines.pause(1, seconds)
    else:
        machines.cut_off(frozenset((1,)), seconds)


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_a_longer_silence_ends_the_session_and_whoever_wakes_up_finds_out(how: str) -> None:
    async def play(machines: Machines, session: Session) -> None:
        silence(machines, how, 5.0)
        await asyncio.sleep(1.99)
        assert machines.store.read("nodes/1") == b"here"
        await asyncio.sleep(0.02)
        assert machines.store.read("nodes/1") is None
        assert machines.gone == {1}
        await asyncio.sleep(5)
        for call in (
            session.get("x"),
            session.put("nodes/1", b"back", session=True),
            session.swap("leader", None, b"me"),
        ):
            with pytest.raises(RunError, match="the session of node 1 in the store has ended"):
                await call
        assert machines.store.read("leader") is None

    assert "node 1   silent for 2 s: its session in the store has ended" in hurt(play)


def test_a_call_of_a_node_that_is_cut_off_waits_until_it_is_not() -> None:
    async def play(machines: Machines, session: Session) -> None:
        machines.cut_off(frozenset((1,)), 1.5)
        await session.put("late", b"news")
        assert now() == 1.5
        assert machines.store.read("late") == b"news"

    hurt(play)


def test_a_watch_brings_news_late_and_in_order_or_ends_with_the_session() -> None:
    async def play(machines: Machines, session: Session) -> None:
        seen: list[tuple[float, Change]] = []

        async def watch() -> None:
            async with aclosing(session.watch("k")) as changes:
                async for change in changes:
                    seen.append((now(), change))

        watching = asyncio.create_task(watch())
        machines.store.write("k", b"1")
        await asyncio.sleep(1)
        machines.cut_off(frozenset((1,)), 1.0)
        machines.store.write("k", b"2")
        machines.store.write("k", b"3")
        await asyncio.sleep(5)
        assert seen == [(0.0, Change("k", b"1")), (2.0, Change("k", b"2")), (2.0, Change("k", b"3"))]
        machines.cut_off(frozenset((1,)), 4.0)
        machines.store.write("k", b"4")
        with pytest.raises(RunError, match="has ended"):
            await watching
        assert now() == 10.0
        assert len(seen) == 3

    hurt(play)


def test_the_session_of_a_killed_node_ends_at_once_and_can_not_be_used() -> None:
    async def play(machines: Machines, session: Session) -> None:
        machines.kill([1])
        assert machines.store.read("nodes/1") is None
        with pytest.raises(RunError):
            await session.put("nodes/1", b"undead", session=True)

    assert "node 1   killed" in hurt(play)


# Partitions


def test_what_is_sent_over_a_cut_vanishes_and_when_it_heals_both_sides_miss_each_other_once() -> None:
    async def play(machines: Machines, session: Session) -> None:
        zero, one, two = (machines.network.endpoint(f"worker-{node}") for node in range(3))
        for a, b in ((zero, one), (one, zero), (one, two), (two, one), (zero, two)):
            a.post(b.address, b"hello")
            await b.letter()
        machines.cut_off(frozenset((1, 2)), 5.0)
        zero.post("worker-1", b"lost")
        one.post("worker-0", b"lost")
        one.post("worker-2", b"inside")
        assert await two.letter() == Letter("worker-1", b"inside")
        assert now() == 0.0
        assert await one.letter() == Letter("worker-0", None)
        assert now() == 5.0
        assert sorted([await zero.letter(), await zero.letter()]) == [
            Letter("worker-1", None),
            Letter("worker-2", None),
        ]
        two.post("worker-1", b"we still hear each other")
        assert await one.letter() == Letter("worker-2", b"we still hear each other")

    hurt(play)


def test_a_node_that_dies_behind_a_cut_is_not_heard_to_die_before_the_cut_heals() -> None:
    async def play(machines: Machines, session: Session) -> None:
        zero, one = (machines.network.endpoint(f"worker-{node}") for node in range(2))
        one.post("worker-0", b"hello")
        await zero.letter()
        machines.cut_off(frozenset((1,)), 5.0)
        machines.kill([1])
        with suppress(TimeoutError):
            async with asyncio.timeout(4.9):
                raise AssertionError(await zero.letter())
        zero.post("worker-1", b"are you there?")
        await asyncio.sleep(1)
        zero.post("worker-1", b"are you there?")
        assert await zero.letter() == Letter("worker-1", None)

    hurt(play)
