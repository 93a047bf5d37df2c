"""Simulated machines: a paused node does nothing, and a killed one never continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import pytest

from culm.cluster.store.store import MemoryStore, StoreChange
from culm.errors import RunError
from culm.testing import RunHistory, run_virtual
from culm.testing.simulated_machines import SimulatedMachines, SimulatedStoreSession
from culm.testing.virtual_time import virtual_loop
from culm.transport.frames.simulated_network import Delivery, DeliveryTiming, SimulatedNetwork
from culm.transport.interface import ControlMessage


def now() -> float:
    return asyncio.get_running_loop().time()


# Pauses


def test_a_paused_node_resumes_where_it_stopped() -> None:
    async def main() -> list[float]:
        ticks: list[float] = []

        async def tick() -> None:
            for _ in range(5):
                await asyncio.sleep(1)
                ticks.append(now())

        task = virtual_loop().create_node_task(3, tick())
        await asyncio.sleep(2.5)
        virtual_loop().pause(3)
        await asyncio.sleep(10)
        virtual_loop().resume(3)
        await task
        return ticks

    assert run_virtual(main()) == [1.0, 2.0, 12.5, 13.5, 14.5]


def test_other_nodes_keep_running() -> None:
    async def main() -> None:
        async def beside() -> float:
            await asyncio.sleep(1)
            return now()

        tasks = [virtual_loop().create_node_task(node, beside()) for node in (0, 1)] + [asyncio.create_task(beside())]
        virtual_loop().pause(1)
        await asyncio.sleep(5)
        assert [task.done() for task in tasks] == [True, False, True]
        virtual_loop().resume(1)
        assert [await task for task in tasks] == [1.0, 6.0, 1.0]

    run_virtual(main())


def test_everything_a_node_starts_is_paused_with_it() -> None:
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

        task = virtual_loop().create_node_task(0, parent())
        await asyncio.sleep(1)
        assert done == ["the action goes to its end"]
        virtual_loop().resume(0)
        await task
        assert done == ["the action goes to its end", "a", "b", "c", "d"]

    run_virtual(main())


def test_a_timeout_that_expires_during_a_pause_fires_once() -> None:
    """The timeout expires while the node is paused, and so does what it waits for. The earlier one counts."""

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
            task = virtual_loop().create_node_task(0, wait())
            await asyncio.sleep(0)
            virtual_loop().pause(0)
            asyncio.get_running_loop().call_later(first, event.set)
            await asyncio.sleep(20)
            virtual_loop().resume(0)
            assert await task == outcome

    run_virtual(main())


# Kills


@pytest.mark.parametrize("paused", [False, True])
def test_no_code_of_a_killed_node_continues(paused: bool) -> None:
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

        task = virtual_loop().create_node_task(0, parent())
        await asyncio.sleep(0.5)
        if paused:
            virtual_loop().pause(0)
            await asyncio.sleep(5)  # by now they would have continued
        virtual_loop().cancel_node(0)
        await asyncio.wait([task])
        assert task.cancelled()
        assert done == ["tidied"] * 4

    run_virtual(main())


def test_a_node_that_kills_itself_stops_at_its_next_await() -> None:
    async def main() -> None:
        done: list[str] = []

        async def suicide() -> None:
            virtual_loop().cancel_node(0)
            done.append("the action goes to its end")
            await asyncio.sleep(0)
            done.append("went on")

        task = virtual_loop().create_node_task(0, suicide())
        await asyncio.wait([task])
        assert done == ["the action goes to its end"]

    run_virtual(main())


# Sessions


def play_on_machines(play: Callable[[SimulatedMachines, SimulatedStoreSession], Awaitable[None]]) -> str:
    """Run a script with node 1 of two, which has a session in a store; returns the history."""

    async def main() -> str:
        machines = SimulatedMachines(SimulatedNetwork(), MemoryStore(), RunHistory(), lease_s=2.0)
        machines.network.delivery_rule = lambda delivery: (
            DeliveryTiming(0.0) if message_arrives(machines, delivery) else None
        )
        session = machines.open_session(1)
        await session.put("nodes/1", b"here", session=True)
        await play(machines, session)
        return str(machines.history)

    return run_virtual(main())


def message_arrives(machines: SimulatedMachines, delivery: Delivery) -> bool:
    return machines.connected(int(delivery.source[-1]), int(delivery.target[-1]))


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_a_silence_shorter_than_the_lease_keeps_the_session(how: str) -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        for _ in range(3):
            silence(machines, how, 1.9)
            await asyncio.sleep(1.95)
        await asyncio.sleep(10)
        await session.put("still", b"here")
        assert machines.store.read("nodes/1") == b"here"
        assert not machines.lost_nodes

    assert "has ended" not in play_on_machines(play)


def silence(machines: SimulatedMachines, how: str, seconds: float) -> None:
    if how == "paused":
        machines.pause(1, seconds)
    else:
        machines.partition(frozenset((1,)), seconds)


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_a_longer_silence_ends_the_session_and_later_calls_fail(how: str) -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        silence(machines, how, 5.0)
        await asyncio.sleep(1.99)
        assert machines.store.read("nodes/1") == b"here"
        await asyncio.sleep(0.02)
        assert machines.store.read("nodes/1") is None
        assert machines.lost_nodes == {1}
        await asyncio.sleep(5)
        for call in (
            session.get("x"),
            session.put("nodes/1", b"back", session=True),
            session.swap("leader", None, b"me"),
        ):
            with pytest.raises(RunError, match="the session of node 1 in the store has ended"):
                await call
        assert machines.store.read("leader") is None

    assert "node 1   silent for 2 s: its session in the store has ended" in play_on_machines(play)


def test_a_call_of_a_partitioned_node_waits_until_the_partition_heals() -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        machines.partition(frozenset((1,)), 1.5)
        await session.put("late", b"news")
        assert now() == 1.5
        assert machines.store.read("late") == b"news"

    play_on_machines(play)


def test_a_watch_delivers_changes_late_and_in_order_or_ends_with_the_session() -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        seen: list[tuple[float, StoreChange]] = []

        async def watch() -> None:
            async with aclosing(session.watch("k")) as changes:
                async for change in changes:
                    seen.append((now(), change))

        watching = asyncio.create_task(watch())
        machines.store.write("k", b"1")
        await asyncio.sleep(1)
        machines.partition(frozenset((1,)), 1.0)
        machines.store.write("k", b"2")
        machines.store.write("k", b"3")
        await asyncio.sleep(5)
        assert seen == [(0.0, StoreChange("k", b"1")), (2.0, StoreChange("k", b"2")), (2.0, StoreChange("k", b"3"))]
        machines.partition(frozenset((1,)), 4.0)
        machines.store.write("k", b"4")
        with pytest.raises(RunError, match="has ended"):
            await watching
        assert now() == 10.0
        assert len(seen) == 3

    play_on_machines(play)


def test_the_session_of_a_killed_node_ends_at_once_and_cannot_be_used() -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        machines.kill([1])
        assert machines.store.read("nodes/1") is None
        with pytest.raises(RunError):
            await session.put("nodes/1", b"undead", session=True)

    assert "node 1   killed" in play_on_machines(play)


# Partitions


def test_messages_across_a_partition_are_lost_and_both_sides_see_one_broken_connection_after_it() -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        zero, one, two = (machines.network.endpoint(f"worker-{node}") for node in range(3))
        for a, b in ((zero, one), (one, zero), (one, two), (two, one), (zero, two)):
            a.send_message(b.address, b"hello")
            await b.receive_message()
        machines.partition(frozenset((1, 2)), 5.0)
        zero.send_message("worker-1", b"lost")
        one.send_message("worker-0", b"lost")
        one.send_message("worker-2", b"inside")
        assert await two.receive_message() == ControlMessage("worker-1", b"inside")
        assert now() == 0.0
        assert await one.receive_message() == ControlMessage("worker-0", None)
        assert now() == 5.0
        assert sorted([await zero.receive_message(), await zero.receive_message()]) == [
            ControlMessage("worker-1", None),
            ControlMessage("worker-2", None),
        ]
        two.send_message("worker-1", b"we still hear each other")
        assert await one.receive_message() == ControlMessage("worker-2", b"we still hear each other")

    play_on_machines(play)


def test_a_death_behind_a_partition_is_seen_when_the_partition_heals() -> None:
    async def play(machines: SimulatedMachines, session: SimulatedStoreSession) -> None:
        zero, one = (machines.network.endpoint(f"worker-{node}") for node in range(2))
        one.send_message("worker-0", b"hello")
        await zero.receive_message()
        machines.partition(frozenset((1,)), 5.0)
        machines.kill([1])
        with suppress(TimeoutError):
            async with asyncio.timeout(4.9):
                raise AssertionError(await zero.receive_message())
        zero.send_message("worker-1", b"are you there?")
        await asyncio.sleep(1)
        zero.send_message("worker-1", b"are you there?")
        assert await zero.receive_message() == ControlMessage("worker-1", None)

    play_on_machines(play)
