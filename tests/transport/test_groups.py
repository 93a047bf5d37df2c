"""Sums over a group, in memory and by Gloo: the same promises, also when a member dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor

from culm.errors import EpochClosed, NodeLost
from culm.transport.base import Group, Transport
from culm.transport.memory import MemoryTransport
from culm.transport.sockets import SocketTransport

from .sides import MEMORY, SECRET, SOCKETS, Side, child, exit_status, key, leave, patiently


@asynccontextmanager
async def groups(transports: Sequence[Transport], name: str = "group 0") -> AsyncIterator[list[Group]]:
    made = [transport.group(key(name), [t.address for t in transports]) for transport in transports]
    await asyncio.gather(*(group.join() for group in made))
    try:
        yield made
    finally:
        for group in made:
            group.close()


async def total(members: Sequence[Group], parts: Sequence[Tensor]) -> list[Tensor]:
    """What each member has after a sum over copies of the parts."""
    copies = [part.clone() for part in parts]
    await asyncio.gather(*(group.all_reduce(copy) for group, copy in zip(members, copies, strict=True)))
    return copies


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3])
def test_every_member_gets_the_sum_to_the_last_bit(side: Side, kind: torch.dtype, count: int) -> None:
    parts = [torch.arange(1000).to(kind) * (1 << 48 if kind is torch.int64 else 1) + i for i in range(count)]

    async def main() -> None:
        async with side.endpoints(count) as transports, groups(transports) as members:
            for found in await total(members, parts):
                assert torch.equal(found, torch.stack(parts).sum(0))

    side.run(main())


def test_what_members_have_is_the_same_for_all_to_the_last_bit(side: Side) -> None:
    """Also where the order of adding shows in the last bits."""
    parts = [torch.randn(10_000, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    async def main() -> None:
        async with side.endpoints(3) as transports, groups(transports) as members:
            first, *others = await total(members, parts)
            assert all(torch.equal(first, other) for other in others)

    side.run(main())


def test_sums_in_flight_at_once_are_told_apart_by_their_order(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints(2) as transports, groups(transports) as members:
            mine = [[torch.full((size,), float(i)) for i, size in enumerate((5, 30_000, 1, 7))] for _ in members]
            await asyncio.gather(*(g.all_reduce(t) for g, tensors in zip(members, mine, strict=True) for t in tensors))
            for tensors in mine:
                assert [t.unique().tolist() for t in tensors] == [[0.0], [2.0], [4.0], [6.0]]

    side.run(main())


def test_a_group_that_waits_for_a_member_that_never_comes_is_in_nobodys_way() -> None:
    """The first member lends the place where others meet: also while it waits there itself, in vain."""

    async def main() -> None:
        async with SOCKETS.endpoints(3) as transports:
            addresses = [transport.address for transport in transports]
            vain = [transport.group(key("vain"), addresses) for transport in transports[:2]]
            waiting = [asyncio.create_task(group.join()) for group in vain]
            done, _ = await asyncio.wait(waiting, timeout=0.5)
            assert not done
            async with groups(transports[:2], "others") as members:
                assert [t.tolist() for t in await total(members, [torch.ones(1)] * 2)] == [[2.0]] * 2
            for task, group in zip(waiting, vain, strict=True):
                task.cancel()
                group.close()

    SOCKETS.run(main())


def test_groups_over_the_same_workers_do_not_mix(side: Side) -> None:
    async def main() -> None:
        async with (
            side.endpoints(2) as transports,
            groups(transports, "group 0") as some,
            groups(transports, "group 1") as others,
        ):
            one, other = await asyncio.gather(
                total(some, [torch.tensor([1]), torch.tensor([2])]),
                total(others, [torch.tensor([10]), torch.tensor([20])]),
            )
            assert [int(t) for t in (*one, *other)] == [3, 3, 30, 30]

    side.run(main())


def test_a_group_can_be_made_anew_under_the_same_name_by_other_workers(side: Side) -> None:
    async def main() -> None:
        for _ in range(2):
            async with side.endpoints(2) as transports, groups(transports) as members:
                assert [int(t) for t in await total(members, [torch.tensor([1]), torch.tensor([2])])] == [3, 3]

    side.run(main())


def test_a_group_of_one_leaves_the_tensor_as_it_is(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints(1) as transports, groups(transports) as members:
            assert torch.equal((await total(members, [torch.arange(3)]))[0], torch.arange(3))

    side.run(main())


def test_a_member_that_has_left_can_not_take_its_own_part_for_the_sum(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints(2) as transports, groups(transports) as members:
            members[0].close()
            with pytest.raises(EpochClosed):
                await members[0].all_reduce(torch.ones(1))

    side.run(main())


def test_leaving_twice_is_leaving_once(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints(2) as transports, groups(transports) as members:
            members[0].close()
            members[0].close()

    side.run(main())


def test_a_wait_for_the_others_ends_when_it_is_cancelled(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints(2) as transports, groups(transports) as members:
            waiting = asyncio.create_task(members[0].all_reduce(torch.ones(1)))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    side.run(main())


def test_in_memory_a_member_that_dies_breaks_the_sum_off() -> None:
    """Under way, and begun afterwards. What the survivors' copies hold then is nobody's business."""

    async def main() -> None:
        async with MEMORY.endpoints(2) as transports, groups(transports) as members:
            waiting = asyncio.create_task(members[0].all_reduce(torch.ones(1)))
            await asyncio.sleep(0)
            assert isinstance(transports[1], MemoryTransport)
            await leave(transports[1])
            with pytest.raises(NodeLost, match="a sum over 2 workers broke off: endpoint-1 is gone"):
                await waiting
            with pytest.raises(NodeLost):
                await members[0].all_reduce(torch.ones(1))

    MEMORY.run(main())


class Other:
    """A second process with one member of a group; the parent is told its address and tells its own."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def tell(self, address: str) -> None:
        self.ours.send(address.encode())

    def hear(self) -> str:
        return self.ours.recv(100).decode()

    def meet(self, transport: Transport) -> list[str]:
        """In the child: the addresses of both, the parent's first."""
        self.theirs.send(transport.address.encode())
        return [self.theirs.recv(100).decode(), transport.address]


async def member(transport: Transport, addresses: Sequence[str]) -> Group:
    group = transport.group(key("group 0"), addresses)
    await group.join()
    return group


def test_by_gloo_a_member_that_is_killed_breaks_the_sum_off() -> None:
    other = Other()

    def work() -> None:
        async def main() -> None:
            transport = SocketTransport(secret=SECRET)
            await member(transport, other.meet(transport))
            await asyncio.Event().wait()

        asyncio.run(main())

    async def main(pid: int) -> None:
        transport = SocketTransport(secret=SECRET)
        other.tell(transport.address)
        group = await member(transport, [transport.address, other.hear()])
        waiting = asyncio.create_task(group.all_reduce(torch.ones(1000)))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NodeLost, match="a sum over 2 workers broke off"):
            await waiting
        group.close()
        await transport.close()

    with child(work) as pid:
        patiently(main(pid))


@pytest.mark.parametrize("leaving", ["closed", "forgotten"])
def test_a_process_ends_though_its_sum_never_will(leaving: str) -> None:
    """The other member lives and never takes part: nothing may wait for it, whether the group was closed or not."""
    other = Other()

    def work() -> None:
        async def main() -> None:
            transport = SocketTransport(secret=SECRET)
            group = await member(transport, other.meet(transport))
            waiting = asyncio.create_task(group.all_reduce(torch.ones(1000)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if leaving == "closed":
                group.close()
            await transport.close()

        asyncio.run(main())

    async def main() -> int | None:
        transport = SocketTransport(secret=SECRET)
        other.tell(transport.address)
        group = await member(transport, [transport.address, other.hear()])
        status = await asyncio.to_thread(exit_status, pid)
        group.close()
        await transport.close()
        return status

    with child(work) as pid:
        assert patiently(main()) == 0


def test_a_process_ends_though_it_waits_for_a_member_that_never_comes() -> None:
    other = Other()

    def work() -> None:
        async def main() -> None:
            transport = SocketTransport(secret=SECRET)
            first, mine = other.meet(transport)
            joining = asyncio.create_task(member(transport, [mine, first]))
            transport.post(first, b"waiting")
            await asyncio.sleep(0.2)
            joining.cancel()
            await asyncio.wait([joining])
            await transport.close()

        asyncio.run(main())

    async def main() -> int | None:
        transport = SocketTransport(secret=SECRET)
        other.tell(transport.address)
        other.hear()
        assert (await transport.letter()).body == b"waiting"
        status = await asyncio.to_thread(exit_status, pid)
        await transport.close()
        return status

    with child(work) as pid:
        assert patiently(main()) == 0
