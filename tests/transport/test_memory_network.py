"""The simulated network: what travels as it is told to, and who hears of what when a connection ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
import torch

from culm.errors import NodeLost
from culm.testing import run_virtual
from culm.transport.base import Key, Letter
from culm.transport.memory import MemoryGroup, MemoryNetwork, MemoryTransport, Parcel, Passage


def key(name: str = "0F0") -> Key:
    return Key(1, 0, name)


def slow(seconds: dict[tuple[str, str], float], *, in_order: bool = True) -> Any:
    """A way on which some links take longer than the millisecond of the others."""

    def way(parcel: Parcel) -> Passage:
        return Passage(seconds.get((parcel.source, parcel.target), 0.001), in_order or parcel.kind != "frame")

    return way


def now() -> float:
    return asyncio.get_running_loop().time()


async def arrival(work: Coroutine[Any, Any, Any]) -> float:
    await work
    return now()


def test_a_parcel_takes_as_long_as_its_way_says() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.way = lambda parcel: Passage(0.5 + parcel.size * 0.25)
        a, b = network.endpoint("a"), network.endpoint("b")
        a.post("b", b"four")
        a.send("b", key(), [torch.zeros(2), None])
        await b.letter()
        assert now() == 0.5 + 4 * 0.25
        await b.receive(key())
        assert now() == 0.5 + 8 * 0.25

    run_virtual(main())


def test_what_is_slow_holds_up_what_follows_on_its_connection_and_nothing_else() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b, c = (network.endpoint(name) for name in "abc")
        network.way = lambda parcel: Passage(1.0 if parcel.size == 5 else 0.1)
        a.post("b", b"first")
        a.post("b", b"second")
        c.post("b", b"other")
        c.post("b", b"others")
        assert [await b.letter() for _ in range(4)] == [
            Letter("a", b"first"),
            Letter("a", b"second"),
            Letter("c", b"other"),
            Letter("c", b"others"),
        ]
        assert now() == 1.0
        c.post("b", b"at once")
        await b.letter()
        assert now() == pytest.approx(1.1)

    run_virtual(main())


def test_frames_overtake_where_the_way_lets_them_and_are_found_by_their_names() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = network.endpoint("a"), network.endpoint("b")
        network.way = lambda parcel: Passage(float(100 - parcel.size), in_order=False)
        for count in (1, 2, 3):
            a.send("b", key(str(count)), [torch.full((count,), float(count))])
        times = [await arrival(b.receive(key(str(count)))) for count in (3, 2, 1)]
        assert times == [88.0, 92.0, 96.0]

    run_virtual(main())


def test_what_has_no_way_vanishes_and_nobody_is_told() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = network.endpoint("a"), network.endpoint("b")
        network.way = lambda parcel: None
        a.post("b", b"lost")
        a.send("b", key(), [torch.ones(1)])
        await a.close()
        network.way = lambda parcel: Passage(0.0)
        b.post("b", b"a mark")
        assert await b.letter() == Letter("b", b"a mark")
        assert b.arrived(key()) is None

    run_virtual(main())


@pytest.mark.parametrize("silence", [False, True])
def test_what_the_dead_had_sent_arrives_unless_their_machine_went_too(silence: bool) -> None:
    async def main() -> None:
        network = MemoryNetwork(latency=1.0)
        a, b = network.endpoint("a"), network.endpoint("b")
        a.post("b", b"last words")
        network.drop("a", silence=silence)
        if not silence:
            assert await b.letter() == Letter("a", b"last words")
        assert await b.letter() == Letter("a", None)

    run_virtual(main())


def test_a_severed_connection_is_missed_on_both_sides_once_and_made_anew_by_who_sends() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b, c = (network.endpoint(name) for name in "abc")
        a.post("b", b"hello")
        await b.letter()
        network.sever("a", "b")
        network.sever("b", "a")
        assert await a.letter() == Letter("b", None)
        assert await b.letter() == Letter("a", None)
        a.post("b", b"hello?")
        c.post("b", b"a mark")
        a.post("a", b"a mark")
        assert await b.letter() == Letter("a", b"hello?")
        assert await b.letter() == Letter("c", b"a mark")
        assert await a.letter() == Letter("a", b"a mark")

    run_virtual(main())


def test_those_who_never_met_do_not_miss_each_other() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.endpoint("a")
        b = network.endpoint("b")
        network.sever("a", "b")
        b.post("b", b"a mark")
        assert await b.letter() == Letter("b", b"a mark")

    run_virtual(main())


# Sums


def members(network: MemoryNetwork, names: str) -> list[tuple[MemoryTransport, MemoryGroup]]:
    made = [network.endpoint(name) for name in names]
    return [(transport, transport.group(key("group 0"), list(names))) for transport in made]


async def outcomes(groups: Sequence[MemoryGroup], at: float, act: Any) -> list[tuple[float, object]]:
    """When each member has its sum of ones, and what; something is done at a time meanwhile."""

    async def member(group: MemoryGroup) -> tuple[float, object]:
        tensor = torch.ones(1)
        try:
            await group.all_reduce(tensor)
        except NodeLost as error:
            return now(), str(error)
        return now(), tensor.item()

    asyncio.get_running_loop().call_later(at, act)
    return await asyncio.gather(*map(member, groups))


def test_each_member_has_a_sum_when_it_has_heard_the_slowest_of_the_others() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        groups = [group for _, group in members(network, "abc")]
        network.way = slow({("a", "c"): 0.5, ("c", "b"): 0.25})
        assert await outcomes(groups, 1.0, lambda: None) == [(0.001, 3.0), (0.25, 3.0), (0.5, 3.0)]

    run_virtual(main())


def test_a_sum_can_break_off_for_one_member_when_another_has_it() -> None:
    """As a real one does: whoever has it is the only one to ask then."""

    async def main() -> None:
        network = MemoryNetwork()
        groups = [group for _, group in members(network, "abc")]
        network.way = slow({("a", "c"): 0.5})
        found = await outcomes(groups, 0.1, lambda: network.drop("b"))
        assert found == [(0.001, 3.0), (0.001, 3.0), (0.101, "a sum over 3 workers broke off: b is gone")]

    run_virtual(main())


def test_a_sum_over_a_severed_connection_breaks_off_for_its_two_ends() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        groups = [group for _, group in members(network, "abc")]
        network.way = slow({("c", "a"): 0.5, ("c", "b"): 0.5})
        found = await outcomes(groups, 0.1, lambda: network.sever("a", "b"))
        assert [value for _, value in found] == [
            "a sum over 3 workers broke off: b is gone",
            "a sum over 3 workers broke off: a is gone",
            3.0,
        ]

    run_virtual(main())


def test_after_its_connection_was_severed_a_member_can_not_sum_over_it_any_more() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        (a, one), (_, other) = members(network, "ab")
        a.post("b", b"hello")
        network.sever("a", "b")
        await asyncio.sleep(1)
        for group in (one, other):
            with pytest.raises(NodeLost):
                await group.all_reduce(torch.ones(1))

    run_virtual(main())


def test_a_new_group_has_connections_of_its_own() -> None:
    """Those that share a segment send each other nothing else: whoever waits for a frame to do it waits for ever."""

    async def main() -> None:
        network = MemoryNetwork()
        (a, _), (b, _) = members(network, "ab")
        a.post("b", b"hello")
        network.sever("a", "b")
        await asyncio.sleep(1)
        groups = [each.group(Key(2, 0, "later"), "ab") for each in (a, b)]
        for group in groups:
            await group.join()
        found = await outcomes(groups, 0.0, lambda: None)
        assert [value for _, value in found] == [2.0, 2.0]

    run_virtual(main())


def test_a_sum_that_a_member_can_not_be_heard_in_waits_until_the_connection_is_given_up() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        groups = [group for _, group in members(network, "ab")]
        network.way = lambda parcel: None

        def heal() -> None:
            network.way = lambda parcel: Passage(0.001)
            network.sever("a", "b")

        found = await outcomes(groups, 7.0, heal)
        assert [at for at, _ in found] == pytest.approx([7.001, 7.001])
        assert [told for _, told in found] == [f"a sum over 2 workers broke off: {other} is gone" for other in "ba"]

    run_virtual(main())
