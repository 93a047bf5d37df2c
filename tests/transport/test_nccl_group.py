"""Sums on devices: how members agree on NCCL, and what is true after a halt. The library is emulated: it behaves as
torch 2.11 with NCCL 2.28 was seen to (an abort completes the event of a sum that was never made)."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tests.transport.transport_variants import SOCKETS, frame_key
from torch import Tensor

from culm.device.device_sums import KeptCommunicators, NcclSupport, NoDeviceSums, find_obstacle
from culm.device.nccl_settings import configure_nccl
from culm.errors import DeviceFailed, EpochClosed, NodeLost
from culm.transport.collectives import nccl
from culm.transport.collectives.member_store import Rendezvous
from culm.transport.collectives.nccl import NcclGroup

GOOD = NcclSupport(version=(2, 28, 9), gpu="GPU-0")


class Event:
    """Complete when a test, or an abort, says so."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done = asyncio.Event()
        self.error: DeviceFailed | None = None

    def is_complete(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done.is_set()

    async def wait(self) -> None:
        await self.done.wait()
        if self.error is not None:
            raise self.error

    def seconds_since(self, earlier: object) -> float:
        raise NotImplementedError


@dataclass
class EmulatedLibrary:
    """Makes a sum when all members have launched it."""

    size: int
    terms: list[list[Sequence[Tensor]]] = field(default_factory=list)
    events: list[list[Event]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class EmulatedCommunicator:
    def __init__(self, library: EmulatedLibrary, rank: int, failure: str = "") -> None:
        self.library, self.rank, self.failure = library, rank, failure
        self.error = ""
        self.launched: list[Event] = []
        self.tensors: list[Sequence[Tensor]] = []
        self.aborted = threading.Event()

    def make_first_sum(self, size: int) -> None:
        assert size == self.library.size
        if self.failure:
            raise RuntimeError(self.failure)

    def launch(self, tensors: Sequence[Tensor]) -> Event:
        event, number = Event(), len(self.launched)
        self.launched.append(event)
        self.tensors.append(tensors)
        library = self.library
        if len(library.terms) <= number:
            library.terms.append([])
            library.events.append([])
        library.terms[number].append(tensors)
        library.events[number].append(event)
        if len(library.terms[number]) == library.size:
            sums = [torch.stack(parts).sum(0) for parts in zip(*library.terms[number], strict=True)]
            for own, done in zip(library.terms[number], library.events[number], strict=True):
                for tensor, total in zip(own, sums, strict=True):
                    tensor.copy_(total)
                done.done.set()
        return event

    def find_error(self) -> str:
        return self.error

    def abort(self) -> None:
        """As measured: afterwards each event is complete, and the tensors have their own values."""
        for event in self.launched:
            event.loop.call_soon_threadsafe(event.done.set)
        self.aborted.set()


@dataclass
class EmulatedSums:
    library: EmulatedLibrary
    supported: NcclSupport = GOOD
    failure: str = ""
    communicator: EmulatedCommunicator | None = None
    kept: KeptCommunicators = field(default_factory=KeptCommunicators)
    connected: int = 0

    def support(self) -> NcclSupport:
        return self.supported

    def connect(self, rendezvous: Rendezvous) -> EmulatedCommunicator:
        self.communicator = EmulatedCommunicator(self.library, rendezvous.rank, self.failure)
        self.connected += 1
        return self.communicator


def distinct(count: int) -> list[EmulatedSums]:
    """The sums of workers with a GPU each."""
    library = EmulatedLibrary(count)
    return [EmulatedSums(library, NcclSupport(version=(2, 28, 9), gpu=f"GPU-{rank}")) for rank in range(count)]


async def joined(transports: Sequence[object], sums: Sequence[object], epoch: int = 1) -> list[NcclGroup]:
    addresses = [t.address for t in transports]  # type: ignore[attr-defined]
    members = [
        NcclGroup(transport, frame_key("group 0")._replace(epoch=epoch), addresses, own)  # type: ignore[arg-type]
        for transport, own in zip(transports, sums, strict=True)
    ]
    await asyncio.gather(*(member.join() for member in members))
    return members


@pytest.mark.parametrize(
    ("members", "obstacle"),
    [
        ([GOOD, NcclSupport(version=(2, 28, 9), gpu="GPU-1")], ""),
        ([GOOD, GOOD], "two workers use one GPU"),
        ([GOOD, NcclSupport(version=(2, 28, 9), gpu="GPU-0", host_id="host1")], ""),
        ([NcclSupport(version=(2, 28, 9), gpu="GPU-0", host_id=f"host{i}") for i in range(4)], ""),
        ([NcclSupport(version=(2, 28, 9), gpu="GPU-0", host_id="host")] * 2, "two workers use one GPU"),
        ([GOOD, NcclSupport(version=(2, 29, 2), gpu="GPU-1")], "workers have NCCL 2.28.9 and 2.29.2"),
        ([GOOD, NcclSupport("a worker computes on the CPU")], "a worker computes on the CPU"),
        *(
            ([NcclSupport(version=(2, 28, patch), gpu="GPU-0")], "may hang after a loss" if 3 <= patch <= 8 else "")
            for patch in (2, 3, 8, 9)
        ),
    ],
)
def test_whether_workers_can_use_nccl_together(members: list[NcclSupport], obstacle: str) -> None:
    found = find_obstacle(members)
    assert obstacle in found
    assert bool(found) == bool(obstacle)


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_sums_are_made_on_the_devices(kind: torch.dtype) -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(3) as transports:
            members = await joined(transports, distinct(3))
            assert [(m.on_device, m.library, m.fallback_reason) for m in members] == [(True, "nccl", "")] * 3
            parts = [[torch.arange(5).to(kind) + rank, torch.ones(2, dtype=torch.float64)] for rank in range(3)]
            await asyncio.gather(*(member.all_reduce(*own) for member, own in zip(members, parts, strict=True)))
            for first, second in parts:
                assert first.tolist() == [3, 6, 9, 12, 15]
                assert second.tolist() == [3, 3]
            for member in members:
                member.close()
                assert member.broken_off == 0

    SOCKETS.run(main())


@pytest.mark.parametrize(
    ("reason", "odd"),
    [
        ("a worker computes on the CPU", NoDeviceSums()),
        ("two workers use one GPU", EmulatedSums(EmulatedLibrary(2), NcclSupport(version=(2, 28, 9), gpu="GPU-0"))),
        ("NCCL did not connect: no route", EmulatedSums(EmulatedLibrary(2), failure="no route")),
    ],
)
def test_all_members_use_gloo_if_one_of_them_cannot_use_nccl(reason: str, odd: object) -> None:
    if isinstance(odd, EmulatedSums) and odd.failure:
        odd.supported = NcclSupport(version=(2, 28, 9), gpu="GPU-1")

    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            usual = distinct(2)[0]
            members = await joined(transports, [usual, odd])
            for member in members:
                assert (member.on_device, member.library) == (False, "gloo")
                assert reason in member.fallback_reason
            parts = [torch.ones(3), torch.ones(3)]
            await asyncio.gather(*(member.all_reduce(own) for member, own in zip(members, parts, strict=True)))
            assert parts[0].tolist() == parts[1].tolist() == [2, 2, 2]
            if usual.communicator is not None:
                assert usual.communicator.aborted.wait(10), "one that had connected leaves again"
            for member in members:
                member.close()

    SOCKETS.run(main())


def test_workers_without_gpus_use_gloo_and_nothing_is_announced() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            members = await joined(transports, [NoDeviceSums(), NoDeviceSums()])
            parts = [torch.ones(3), torch.ones(3)]
            await asyncio.gather(*(member.all_reduce(own) for member, own in zip(members, parts, strict=True)))
            assert parts[0].tolist() == [2, 2, 2]
            for member in members:
                assert (member.on_device, member.library, member.fallback_reason) == (False, "gloo", "")
                member.close()

    SOCKETS.run(main())


async def sum_of_ones(members: Sequence[NcclGroup]) -> None:
    parts = [torch.ones(3) for _ in members]
    await asyncio.gather(*(member.all_reduce(own) for member, own in zip(members, parts, strict=True)))
    assert all(part.tolist() == [len(members)] * 3 for part in parts)


def test_a_group_in_which_nothing_was_under_way_is_used_again_in_the_next_epoch() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(3) as transports:
            sums = distinct(3)
            for epoch in (1, 2, 5):
                members = await joined(transports, sums, epoch)
                await sum_of_ones(members)
                for member in members:
                    member.close()
                with pytest.raises(EpochClosed):
                    await members[0].all_reduce(torch.ones(3))
            assert [each.connected for each in sums] == [1, 1, 1]
            for each in sums:
                each.kept.abort_rest()
                assert each.communicator is not None
                assert await asyncio.to_thread(each.communicator.aborted.wait, 10)

    SOCKETS.run(main())


def test_a_group_is_built_again_if_one_member_has_launched_a_sum_more_or_was_replaced() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            sums = distinct(2)
            members = await joined(transports, sums)
            await sum_of_ones(members)
            ahead = asyncio.create_task(members[0].all_reduce(torch.ones(3)))
            await asyncio.sleep(0)
            for member in members:
                member.close()
            with pytest.raises(EpochClosed):
                await ahead
            first = [each.communicator for each in sums]
            again = await joined(transports, sums, epoch=2)
            assert [each.connected for each in sums] == [2, 2]
            for old in first:
                assert old is not None
                assert await asyncio.to_thread(old.aborted.wait, 10)
            for member in again:
                member.close()
            second = sums[0].communicator
            newcomer = EmulatedSums(sums[0].library, sums[1].supported)
            for member in await joined(transports, [sums[0], newcomer], epoch=3):
                member.close()
            assert (sums[0].connected, newcomer.connected) == (3, 1)
            assert second is not None
            assert await asyncio.to_thread(second.aborted.wait, 10)

    SOCKETS.run(main())


def test_a_group_with_an_error_is_not_kept() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            sums = distinct(2)
            members = await joined(transports, sums)
            assert sums[0].communicator is not None
            sums[0].communicator.error = "NCCL reports remote error"
            members[0].close()
            assert await asyncio.to_thread(sums[0].communicator.aborted.wait, 10)
            members[1].close()

    SOCKETS.run(main())


def test_a_halt_between_launch_and_completion_discards_the_value() -> None:
    """The other member never launches: it has died."""

    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            sums = distinct(2)
            members = await joined(transports, sums)
            own = torch.ones(3)
            reducing = asyncio.create_task(members[0].all_reduce(own))
            await asyncio.sleep(0)
            communicator = sums[0].communicator
            assert communicator is not None
            assert len(communicator.launched) == 1
            members[0].close()
            assert members[0].broken_off == 1, "the event was read before the abort"
            assert await asyncio.to_thread(communicator.aborted.wait, 10)
            with pytest.raises(EpochClosed):  # although the abort has completed the event
                await reducing
            assert communicator.launched[0].is_complete()
            with pytest.raises(EpochClosed):
                await members[0].all_reduce(own)
            members[1].close()

    SOCKETS.run(main())


def test_a_group_whose_launch_failed_half_way_is_not_kept_and_its_tensors_stay_until_it_is_left() -> None:
    """The first sum of the two is under way then, and may be written at any time."""

    class FailsHalfWay(EmulatedCommunicator):
        may_end = threading.Event()

        def launch(self, tensors: Sequence[Tensor]) -> Event:
            super().launch(tensors[:1])
            raise RuntimeError("no memory")

        def abort(self) -> None:
            assert self.may_end.wait(10)
            self.tensors.clear()  # the library holds what it has launched only until the caller has waited
            super().abort()

    class SumsFailHalfWay(EmulatedSums):
        def connect(self, rendezvous: Rendezvous) -> EmulatedCommunicator:
            self.communicator = FailsHalfWay(self.library, rendezvous.rank)
            return self.communicator

    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            first, second = distinct(2)
            failing = SumsFailHalfWay(first.library, first.supported)
            members = await joined(transports, [failing, second])
            own = torch.ones(3)
            memory = weakref.ref(own)
            with pytest.raises(NodeLost):
                await members[0].all_reduce(own, torch.ones(2))
            communicator = failing.communicator
            assert communicator is not None
            communicator.tensors.clear()
            first.library.terms.clear()
            del own
            assert memory() is not None
            members[0].close()
            assert memory() is not None, "the sum may still be written"
            assert failing.kept.take(members[0]._group_name) is None
            FailsHalfWay.may_end.set()
            assert await asyncio.to_thread(communicator.aborted.wait, 10)
            for _ in range(1000):
                if memory() is None:
                    break
                await asyncio.sleep(0.01)
            assert memory() is None
            members[1].close()

    SOCKETS.run(main())


def test_what_an_abandoned_sum_writes_is_kept_until_the_abort_has_ended() -> None:
    class SlowToAbort(EmulatedCommunicator):
        may_end = threading.Event()

        def abort(self) -> None:
            assert self.may_end.wait(10)
            super().abort()

    class SumsSlowToAbort(EmulatedSums):
        def connect(self, rendezvous: Rendezvous) -> EmulatedCommunicator:
            self.communicator = SlowToAbort(self.library, rendezvous.rank)
            return self.communicator

    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            first, second = distinct(2)
            slow = SumsSlowToAbort(first.library, first.supported)
            members = await joined(transports, [slow, second])
            reducing = asyncio.create_task(members[0].all_reduce(torch.ones(3)))
            await asyncio.sleep(0)
            reducing.cancel()
            await asyncio.wait([reducing])
            assert isinstance(slow.communicator, SlowToAbort)
            slow.communicator.tensors.clear()  # now only the group keeps them
            members[0].close()
            again = asyncio.create_task(joined(transports, distinct(2)))  # waits for the end of the old group
            done, _ = await asyncio.wait([again], timeout=0.2)
            assert not done
            slow.communicator.may_end.set()
            for member in [*await again, members[1]]:
                member.close()

    SOCKETS.run(main())


def test_an_error_of_the_group_is_a_suspicion_and_not_an_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_LOOK_S", 0.01)

    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            sums = distinct(2)
            members = await joined(transports, sums)
            reducing = asyncio.create_task(members[0].all_reduce(torch.ones(3)))
            await asyncio.sleep(0)
            assert sums[0].communicator is not None
            sums[0].communicator.error = "NCCL reports remote error"
            with pytest.raises(NodeLost, match="a sum over 2 workers broke off: NCCL reports remote error"):
                await reducing
            for member in members:
                member.close()
            assert members[0].broken_off == 1

    SOCKETS.run(main())


def test_a_sum_that_completes_after_an_error_is_discarded() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            sums = distinct(2)
            members = await joined(transports, sums)
            communicator = sums[0].communicator
            assert communicator is not None
            reducing = asyncio.create_task(members[0].all_reduce(torch.ones(3)))
            await asyncio.sleep(0)
            communicator.error = "NCCL reports comm error"
            communicator.launched[0].done.set()
            with pytest.raises(NodeLost, match="comm error"):
                await reducing
            for member in members:
                member.close()

    SOCKETS.run(main())


def test_an_error_of_the_device_is_a_failed_device() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            sums = distinct(2)
            members = await joined(transports, sums)
            reducing = asyncio.create_task(members[0].all_reduce(torch.ones(3)))
            await asyncio.sleep(0)
            assert sums[0].communicator is not None
            event = sums[0].communicator.launched[0]
            event.error = DeviceFailed("the device reported an error")
            event.done.set()
            with pytest.raises(DeviceFailed):
                await reducing
            for member in members:
                member.close()

    SOCKETS.run(main())


def test_a_group_that_is_closed_while_it_connects_leaves() -> None:
    class Stuck(EmulatedCommunicator):
        connecting = threading.Event()

        def make_first_sum(self, size: int) -> None:
            self.connecting.set()
            assert self.aborted.wait(10)

    class StuckSums(EmulatedSums):
        def connect(self, rendezvous: Rendezvous) -> EmulatedCommunicator:
            self.communicator = Stuck(self.library, rendezvous.rank)
            return self.communicator

    async def main() -> None:
        async with SOCKETS.endpoints(2) as transports:
            first, second = distinct(2)
            stuck = StuckSums(first.library, first.supported)
            addresses = [transport.address for transport in transports]
            members = [
                NcclGroup(transport, frame_key("group 0"), addresses, sums)
                for transport, sums in zip(transports, (stuck, second), strict=True)
            ]
            joining = [asyncio.create_task(member.join()) for member in members]
            assert await asyncio.to_thread(Stuck.connecting.wait, 10)
            for task, member in zip(joining, members, strict=True):
                task.cancel()
                member.close()
            await asyncio.wait(joining)
            assert stuck.communicator is not None
            assert await asyncio.to_thread(stuck.communicator.aborted.wait, 10)

    SOCKETS.run(main())


def test_workers_that_share_a_gpu_look_like_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    configure_nccl(3, shares_gpu=False, within_machine=True)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "NCCL_HOSTID" not in os.environ
    configure_nccl(3, shares_gpu=True, within_machine=True)
    assert os.environ["NCCL_HOSTID"].startswith("culm-3-")
    assert (os.environ["NCCL_NET"], os.environ["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
