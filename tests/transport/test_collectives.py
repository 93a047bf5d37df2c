"""Sums over a group, simulated and by Gloo: the same contract, also when a member dies."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch
from tests.transport.transport_variants import (
    ENCRYPTED,
    MEMORY,
    SECRET,
    SOCKETS,
    TransportVariant,
    close_once,
    exit_status,
    forked_child,
    frame_key,
    run_with_timeout,
)
from torch import Tensor

from culm.errors import EpochClosed, NodeLost
from culm.transport.frames.encryption_policy import EncryptionPolicy
from culm.transport.frames.simulated_network import SimulatedTransport
from culm.transport.frames.sockets import SocketTransport
from culm.transport.interface import Group, Transport


@asynccontextmanager
async def groups(transports: Sequence[Transport], name: str = "group 0") -> AsyncIterator[list[Group]]:
    made = [transport.group(frame_key(name), [t.address for t in transports]) for transport in transports]
    await asyncio.gather(*(group.join() for group in made))
    try:
        yield made
    finally:
        for group in made:
            group.close()


async def total(members: Sequence[Group], parts: Sequence[Tensor]) -> list[Tensor]:
    """What each member has after an all-reduce of copies of the parts."""
    copies = [part.clone() for part in parts]
    await asyncio.gather(*(group.all_reduce(copy) for group, copy in zip(members, copies, strict=True)))
    return copies


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3])
def test_every_member_gets_the_sum_to_the_last_bit(variant: TransportVariant, kind: torch.dtype, count: int) -> None:
    parts = [torch.arange(1000).to(kind) * (1 << 48 if kind is torch.int64 else 1) + i for i in range(count)]

    async def main() -> None:
        async with variant.endpoints(count) as transports, groups(transports) as members:
            for found in await total(members, parts):
                assert torch.equal(found, torch.stack(parts).sum(0))

    variant.run(main())


def test_all_members_get_the_same_bits(variant: TransportVariant) -> None:
    """Also where the order of additions shows in the last bits."""
    parts = [torch.randn(10_000, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    async def main() -> None:
        async with variant.endpoints(3) as transports, groups(transports) as members:
            first, *others = await total(members, parts)
            assert all(torch.equal(first, other) for other in others)

    variant.run(main())


@pytest.mark.parametrize("count", [2, 3])
def test_large_and_odd_tensors_are_summed_in_the_order_of_the_members(count: int) -> None:
    """Over frames: shares of members, pieces of large tensors, and tensors smaller than the group."""
    shapes = [(3_000_017,), (0,), (1,), (7, 5), (40_000,)]
    parts = [[torch.randn(shape, generator=torch.Generator().manual_seed(i)) for shape in shapes] for i in range(count)]
    expected = [sum(terms[1:], start=terms[0]) for terms in zip(*parts, strict=True)]

    async def main() -> None:
        async with ENCRYPTED.endpoints(count) as transports, groups(transports) as members:
            copies = [[part.clone() for part in own] for own in parts]
            await asyncio.gather(*(group.all_reduce(*own) for group, own in zip(members, copies, strict=True)))
            assert all(torch.equal(mine, total) for own in copies for mine, total in zip(own, expected, strict=True))

    ENCRYPTED.run(main())


def test_concurrent_reduces_are_matched_by_their_order(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints(2) as transports, groups(transports) as members:
            mine = [[torch.full((size,), float(i)) for i, size in enumerate((5, 30_000, 1, 7))] for _ in members]
            await asyncio.gather(*(g.all_reduce(t) for g, tensors in zip(members, mine, strict=True) for t in tensors))
            for tensors in mine:
                assert [t.unique().tolist() for t in tensors] == [[0.0], [2.0], [4.0], [6.0]]

    variant.run(main())


def test_a_group_that_waits_for_a_missing_member_does_not_block_others() -> None:
    """The first member hosts the rendezvous; also while it waits there itself, in vain."""

    async def main() -> None:
        async with SOCKETS.endpoints(3) as transports:
            addresses = [transport.address for transport in transports]
            vain = [transport.group(frame_key("vain"), addresses) for transport in transports[:2]]
            waiting = [asyncio.create_task(group.join()) for group in vain]
            done, _ = await asyncio.wait(waiting, timeout=0.5)
            assert not done
            async with groups(transports[:2], "others") as members:
                assert [t.tolist() for t in await total(members, [torch.ones(1)] * 2)] == [[2.0]] * 2
            for task, group in zip(waiting, vain, strict=True):
                task.cancel()
                group.close()

    SOCKETS.run(main())


def test_groups_over_the_same_workers_do_not_mix(variant: TransportVariant) -> None:
    async def main() -> None:
        async with (
            variant.endpoints(2) as transports,
            groups(transports, "group 0") as some,
            groups(transports, "group 1") as others,
        ):
            one, other = await asyncio.gather(
                total(some, [torch.tensor([1]), torch.tensor([2])]),
                total(others, [torch.tensor([10]), torch.tensor([20])]),
            )
            assert [int(t) for t in (*one, *other)] == [3, 3, 30, 30]

    variant.run(main())


def test_a_group_can_be_created_again_under_the_same_name_by_other_workers(variant: TransportVariant) -> None:
    async def main() -> None:
        for _ in range(2):
            async with variant.endpoints(2) as transports, groups(transports) as members:
                assert [int(t) for t in await total(members, [torch.tensor([1]), torch.tensor([2])])] == [3, 3]

    variant.run(main())


def test_a_group_of_one_leaves_the_tensor_as_it_is(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints(1) as transports, groups(transports) as members:
            assert torch.equal((await total(members, [torch.arange(3)]))[0], torch.arange(3))

    variant.run(main())


def test_a_member_that_has_left_gets_an_error_instead_of_its_own_part(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints(2) as transports, groups(transports) as members:
            members[0].close()
            with pytest.raises(EpochClosed):
                await members[0].all_reduce(torch.ones(1))

    variant.run(main())


def test_closing_a_group_twice_is_harmless(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints(2) as transports, groups(transports) as members:
            members[0].close()
            members[0].close()

    variant.run(main())


def test_a_wait_for_the_others_ends_when_it_is_cancelled(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints(2) as transports, groups(transports) as members:
            waiting = asyncio.create_task(members[0].all_reduce(torch.ones(1)))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    variant.run(main())


def test_a_lost_simulated_member_fails_the_reduce() -> None:
    """For reduces under way, and for those that begin afterwards. The survivors' copies are undefined then."""

    async def main() -> None:
        async with MEMORY.endpoints(2) as transports, groups(transports) as members:
            waiting = asyncio.create_task(members[0].all_reduce(torch.ones(1)))
            await asyncio.sleep(0)
            assert isinstance(transports[1], SimulatedTransport)
            await close_once(transports[1])
            with pytest.raises(NodeLost, match="a sum over 2 workers broke off: endpoint-1 is gone"):
                await waiting
            with pytest.raises(NodeLost):
                await members[0].all_reduce(torch.ones(1))

    MEMORY.run(main())


class Other:
    """A second process with one member of a group; it exchanges addresses with the parent."""

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
    group = transport.group(frame_key("group 0"), addresses)
    await group.join()
    return group


@pytest.mark.parametrize("encryption", ["off", "on"])
def test_a_member_that_is_killed_fails_the_reduce(encryption: EncryptionPolicy) -> None:
    """Over Gloo, and over encrypted frames."""
    other = Other()

    def work() -> None:
        async def main() -> None:
            transport = SocketTransport(secret=SECRET, encryption=encryption)
            await member(transport, other.meet(transport))
            await asyncio.Event().wait()

        asyncio.run(main())

    async def main(pid: int) -> None:
        transport = SocketTransport(secret=SECRET, encryption=encryption)
        other.tell(transport.address)
        group = await member(transport, [transport.address, other.hear()])
        waiting = asyncio.create_task(group.all_reduce(torch.ones(1000)))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NodeLost, match="a sum over 2 workers broke off"):
            await waiting
        group.close()
        await transport.close()

    with forked_child(work) as pid:
        run_with_timeout(main(pid))


@pytest.mark.parametrize("leaving", ["closed", "forgotten"])
def test_a_process_can_end_while_its_reduce_hangs(leaving: str) -> None:
    """The other member is alive and never takes part: the process must not wait for it, whether the group was closed or
    not."""
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

    with forked_child(work) as pid:
        assert run_with_timeout(main()) == 0


def test_a_process_can_end_while_it_waits_for_a_missing_member() -> None:
    other = Other()

    def work() -> None:
        async def main() -> None:
            transport = SocketTransport(secret=SECRET)
            first, mine = other.meet(transport)
            joining = asyncio.create_task(member(transport, [mine, first]))
            transport.send_message(first, b"waiting")
            await asyncio.sleep(0.2)
            joining.cancel()
            await asyncio.wait([joining])
            await transport.close()

        asyncio.run(main())

    async def main() -> int | None:
        transport = SocketTransport(secret=SECRET)
        other.tell(transport.address)
        other.hear()
        assert (await transport.receive_message()).body == b"waiting"
        status = await asyncio.to_thread(exit_status, pid)
        await transport.close()
        return status

    with forked_child(work) as pid:
        assert run_with_timeout(main()) == 0


async def turns_of_the_loop() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("phase", ["join", "sum"])
@pytest.mark.parametrize("kind", [SOCKETS, ENCRYPTED], ids=["gloo", "frames"])
def test_an_epoch_that_ends_during_a_sum_leaves_no_unread_exception(kind: TransportVariant, phase: str) -> None:
    """asyncio would print it, with a traceback, in every recovery."""
    said: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(str(context["message"])))
        async with kind.endpoints(3) as transports:
            addresses = [transport.address for transport in transports]
            present = transports if phase == "sum" else transports[:2]
            members = [transport.group(frame_key("group 0"), addresses) for transport in present]
            joining = [asyncio.create_task(member.join()) for member in members]
            if phase == "sum":
                await asyncio.gather(*joining)
                joining = [asyncio.create_task(members[0].all_reduce(torch.ones(3), torch.ones(60_000)))]
            await turns_of_the_loop()
            for transport in transports:  # as a worker that is halted does it
                transport.close_epochs(1 << 40)
            await asyncio.sleep(0)  # what waits for frames gets EpochClosed
            for task in joining:
                task.cancel()
            for member in members:
                member.close()
            await asyncio.wait(joining)
            del joining, members, task, member
            await turns_of_the_loop()
            gc.collect()

    kind.run(main())
    assert said == []
