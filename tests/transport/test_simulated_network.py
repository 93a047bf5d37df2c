"""The simulated network: delivery times, and which endpoints see that a connection was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
import torch

from culm.errors import NodeLost
from culm.testing import run_virtual
from culm.transport.collectives.simulated_group import SimulatedGroup
from culm.transport.frames.simulated_network import (
    Delivery,
    DeliveryTiming,
    SimulatedNetwork,
    SimulatedTransport,
)
from culm.transport.interface import ControlMessage, FrameKey


def key(name: str = "0F0") -> FrameKey:
    return FrameKey(1, 0, name)


def slow(seconds: dict[tuple[str, str], float], *, in_order: bool = True) -> Any:
    """A delivery rule by which some connections are slower than the others, which take a millisecond."""

    def way(parcel: Delivery) -> DeliveryTiming:
        return DeliveryTiming(seconds.get((parcel.source, parcel.target), 0.001), in_order or parcel.kind != "frame")

    return way


def now() -> float:
    return asyncio.get_running_loop().time()


async def arrival(work: Coroutine[Any, Any, Any]) -> float:
    await work
    return now()


def test_a_delivery_takes_as_long_as_the_rule_says() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        network.delivery_rule = lambda parcel: DeliveryTiming(0.5 + parcel.size * 0.25)
        a, b = network.endpoint("a"), network.endpoint("b")
        a.send_message("b", b"four")
        a.send("b", key(), [torch.zeros(2), None])
        await b.receive_message()
        assert now() == 0.5 + 4 * 0.25
        await b.receive(key())
        assert now() == 0.5 + 8 * 0.25

    run_virtual(main())


def test_a_slow_delivery_delays_later_ones_on_its_connection_only() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        a, b, c = (network.endpoint(name) for name in "abc")
        network.delivery_rule = lambda parcel: DeliveryTiming(1.0 if parcel.size == 5 else 0.1)
        a.send_message("b", b"first")
        a.send_message("b", b"second")
        c.send_message("b", b"other")
        c.send_message("b", b"others")
        assert [await b.receive_message() for _ in range(4)] == [
            ControlMessage("a", b"first"),
            ControlMessage("a", b"second"),
            ControlMessage("c", b"other"),
            ControlMessage("c", b"others"),
        ]
        assert now() == 1.0
        c.send_message("b", b"at once")
        await b.receive_message()
        assert now() == pytest.approx(1.1)

    run_virtual(main())


def test_frames_overtake_where_the_rule_allows_it_and_are_found_by_key() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        a, b = network.endpoint("a"), network.endpoint("b")
        network.delivery_rule = lambda parcel: DeliveryTiming(float(100 - parcel.size), in_order=False)
        for count in (1, 2, 3):
            a.send("b", key(str(count)), [torch.full((count,), float(count))])
        times = [await arrival(b.receive(key(str(count)))) for count in (3, 2, 1)]
        assert times == [88.0, 92.0, 96.0]

    run_virtual(main())


def test_a_dropped_delivery_is_not_reported() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        a, b = network.endpoint("a"), network.endpoint("b")
        network.delivery_rule = lambda parcel: None
        a.send_message("b", b"lost")
        a.send("b", key(), [torch.ones(1)])
        await a.close()
        network.delivery_rule = lambda parcel: DeliveryTiming(0.0)
        b.send_message("b", b"a mark")
        assert await b.receive_message() == ControlMessage("b", b"a mark")
        assert b.try_receive(key()) is None

    run_virtual(main())


@pytest.mark.parametrize("silence", [False, True])
def test_deliveries_of_a_dead_endpoint_arrive_unless_its_machine_is_lost(silence: bool) -> None:
    async def main() -> None:
        network = SimulatedNetwork(latency=1.0)
        a, b = network.endpoint("a"), network.endpoint("b")
        a.send_message("b", b"last words")
        network.remove_endpoint("a", machine_lost=silence)
        if not silence:
            assert await b.receive_message() == ControlMessage("a", b"last words")
        assert await b.receive_message() == ControlMessage("a", None)

    run_virtual(main())


def test_a_broken_connection_is_reported_to_both_ends_once_and_reopened_by_the_next_send() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        a, b, c = (network.endpoint(name) for name in "abc")
        a.send_message("b", b"hello")
        await b.receive_message()
        network.break_connection("a", "b")
        network.break_connection("b", "a")
        assert await a.receive_message() == ControlMessage("b", None)
        assert await b.receive_message() == ControlMessage("a", None)
        a.send_message("b", b"hello?")
        c.send_message("b", b"a mark")
        a.send_message("a", b"a mark")
        assert await b.receive_message() == ControlMessage("a", b"hello?")
        assert await b.receive_message() == ControlMessage("c", b"a mark")
        assert await a.receive_message() == ControlMessage("a", b"a mark")

    run_virtual(main())


def test_endpoints_that_never_connected_see_no_loss() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        network.endpoint("a")
        b = network.endpoint("b")
        network.break_connection("a", "b")
        b.send_message("b", b"a mark")
        assert await b.receive_message() == ControlMessage("b", b"a mark")

    run_virtual(main())


# Sums


def members(network: SimulatedNetwork, names: str) -> list[tuple[SimulatedTransport, SimulatedGroup]]:
    made = [network.endpoint(name) for name in names]
    return [(transport, transport.group(key("group 0"), list(names))) for transport in made]


async def outcomes(groups: Sequence[SimulatedGroup], at: float, act: Any) -> list[tuple[float, object]]:
    """When each member has its sum of ones, and its value; `act` is called at a given time meanwhile."""

    async def member(group: SimulatedGroup) -> tuple[float, object]:
        tensor = torch.ones(1)
        try:
            await group.all_reduce(tensor)
        except NodeLost as error:
            return now(), str(error)
        return now(), tensor.item()

    asyncio.get_running_loop().call_later(at, act)
    return await asyncio.gather(*map(member, groups))


def test_each_member_gets_a_sum_when_the_slowest_contribution_reaches_it() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        groups = [group for _, group in members(network, "abc")]
        network.delivery_rule = slow({("a", "c"): 0.5, ("c", "b"): 0.25})
        assert await outcomes(groups, 1.0, lambda: None) == [(0.001, 3.0), (0.25, 3.0), (0.5, 3.0)]

    run_virtual(main())


def test_a_reduce_can_fail_for_one_member_after_another_has_the_sum() -> None:
    """As in a real network: the member that has the sum is the only source of it then."""

    async def main() -> None:
        network = SimulatedNetwork()
        groups = [group for _, group in members(network, "abc")]
        network.delivery_rule = slow({("a", "c"): 0.5})
        found = await outcomes(groups, 0.1, lambda: network.remove_endpoint("b"))
        assert found == [(0.001, 3.0), (0.001, 3.0), (0.101, "a sum over 3 workers broke off: b is gone")]

    run_virtual(main())


def test_a_reduce_over_a_broken_connection_fails_for_its_two_ends() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        groups = [group for _, group in members(network, "abc")]
        network.delivery_rule = slow({("c", "a"): 0.5, ("c", "b"): 0.5})
        found = await outcomes(groups, 0.1, lambda: network.break_connection("a", "b"))
        assert [value for _, value in found] == [
            "a sum over 3 workers broke off: b is gone",
            "a sum over 3 workers broke off: a is gone",
            3.0,
        ]

    run_virtual(main())


def test_a_member_cannot_reduce_over_a_broken_connection() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        (a, one), (_, other) = members(network, "ab")
        a.send_message("b", b"hello")
        network.break_connection("a", "b")
        await asyncio.sleep(1)
        for group in (one, other):
            with pytest.raises(NodeLost):
                await group.all_reduce(torch.ones(1))

    run_virtual(main())


def test_a_new_group_opens_new_connections() -> None:
    """Members that share a segment send each other nothing else: a wait for a frame would never end."""

    async def main() -> None:
        network = SimulatedNetwork()
        (a, _), (b, _) = members(network, "ab")
        a.send_message("b", b"hello")
        network.break_connection("a", "b")
        await asyncio.sleep(1)
        groups = [each.group(FrameKey(2, 0, "later"), "ab") for each in (a, b)]
        for group in groups:
            await group.join()
        found = await outcomes(groups, 0.0, lambda: None)
        assert [value for _, value in found] == [2.0, 2.0]

    run_virtual(main())


def test_a_reduce_with_an_unreachable_member_waits_until_the_connection_is_given_up() -> None:
    async def main() -> None:
        network = SimulatedNetwork()
        groups = [group for _, group in members(network, "ab")]
        network.delivery_rule = lambda parcel: None

        def heal() -> None:
            network.delivery_rule = lambda parcel: DeliveryTiming(0.001)
            network.break_connection("a", "b")

        found = await outcomes(groups, 7.0, heal)
        assert [at for at, _ in found] == pytest.approx([7.001, 7.001])
        assert [told for _, told in found] == [f"a sum over 2 workers broke off: {other} is gone" for other in "ba"]

    run_virtual(main())
