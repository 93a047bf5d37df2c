"""Large frames between processes of one machine travel through shared memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.transport.large_frames_job import make_job
from tests.transport.test_transport_contract import GAPS, TENSORS
from tests.transport.transport_variants import (
    SECRET,
    close_once,
    forked_child,
    frame_key,
    kill_process,
    next_lost_connection,
    run_with_timeout,
    same_tensor,
)
from torch import Tensor

import culm
from culm.device.shared_chunks import PageLocker, SharedChunks, SharedHostMemory
from culm.device.slab_pool import SlabPool
from culm.testing import reference
from culm.transport.frames import frame_codec, shared_memory
from culm.transport.frames.frame_codec import SharedPlace
from culm.transport.frames.shared_memory import MappedChunks, SharedFrames
from culm.transport.frames.sockets import SocketTransport

LARGE = 1 << 17
"""Elements of a frame that is worth it."""


@asynccontextmanager
async def endpoints(**options: Any) -> AsyncIterator[tuple[SocketTransport, SocketTransport]]:
    a, b = (SocketTransport(secret=SECRET, **options) for _ in range(2))
    try:
        yield a, b
    finally:
        await close_once(a)
        await close_once(b)


async def share(a: SocketTransport, b: SocketTransport) -> None:
    """Send frames until they travel through shared memory. The first ones do not: the receiver must map it first."""
    number = 0
    while not lent(a):
        number += 1
        a.send(b.address, frame_key(f"first {number}"), [torch.ones(LARGE)])
        (found,) = await b.receive(frame_key(f"first {number}"))
        assert same_tensor(found, torch.ones(LARGE))
    del found
    await until(lambda: not lent(a))


def lent(transport: SocketTransport) -> int:
    """Frames that were not acknowledged."""
    return 0 if transport._shared_frames is None else len(transport._shared_frames._lent)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_tensors_arrive_with_their_bits_layout_and_requires_grad() -> None:
    async def main() -> None:
        async with endpoints(min_shared_bytes=1) as (a, b):
            await share(a, b)
            for name, sent in TENSORS.items():
                a.send(b.address, frame_key(name), [None, sent, sent])
                assert lent(a) == bool(sent.numel()), name
                nothing, *found = await b.receive(frame_key(name))
                assert nothing is None
                assert all(same_tensor(each, sent) for each in found), name
                del found
                await until(lambda: not lent(a))
            for name, sent in GAPS.items():
                a.send(b.address, frame_key(name), [sent])
                (arrived,) = await b.receive(frame_key(name))
                assert same_tensor(arrived, sent.resolve_conj().resolve_neg().contiguous()), name

    run_with_timeout(main())


def test_a_receiver_owns_what_it_received_until_it_drops_it() -> None:
    """It may change its tensors; the sender does not use their memory again, and its own tensors do not change."""

    async def main() -> None:
        async with endpoints() as (a, b):
            await share(a, b)
            sent, kept = torch.arange(float(LARGE)), []
            for number in range(8):
                a.send(b.address, frame_key(f"{number}"), [sent])
                (found,) = await b.receive(frame_key(f"{number}"))
                assert found is not None
                kept.append(found.add_(number))
            assert lent(a) == 8
            assert torch.equal(sent, torch.arange(float(LARGE)))
            assert all(torch.equal(each, sent + number) for number, each in enumerate(kept))
            del found
            kept.clear()
            await until(lambda: not lent(a))
            assert a._shared_frames is not None
            assert a._shared_frames.pool.lent_bytes == 0

    run_with_timeout(main())


def test_small_frames_encrypted_ones_and_those_above_the_cap_travel_over_the_connection() -> None:
    async def main() -> None:
        async with endpoints() as (a, b):
            await share(a, b)
            a.send(b.address, frame_key("small"), [torch.ones(8)])
            assert not lent(a)
            assert a._shared_frames is not None
            a._shared_frames.pool.cap = 0
            kept = []
            for number in range(3):
                a.send(b.address, frame_key(f"{number}"), [torch.full((LARGE,), float(number))])
                kept.append((await b.receive(frame_key(f"{number}")))[0])
                assert lent(a) == 1
            assert [each is not None and each[-1].item() for each in kept] == [0, 1, 2]
        async with endpoints(encryption="on") as (a, b):
            for number in range(3):
                a.send(b.address, frame_key(f"{number}"), [torch.ones(LARGE)])
                await b.receive(frame_key(f"{number}"))
            assert a._shared_frames is None

    run_with_timeout(main())


def test_a_receiver_that_cannot_map_the_memory_gets_frames_over_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MappedChunks, "map", lambda *_: False)

    async def main() -> None:
        async with endpoints() as (a, b):
            for number in range(3):
                a.send(b.address, frame_key(f"{number}"), [torch.full((LARGE,), float(number))])
                (found,) = await b.receive(frame_key(f"{number}"))
                assert same_tensor(found, torch.full((LARGE,), float(number)))
            assert a._shared_frames is not None
            assert not lent(a)

    run_with_timeout(main())


def test_memory_of_another_process_or_that_can_shrink_is_not_mapped() -> None:
    frames, chunks = SharedFrames(), MappedChunks(lambda number: None)
    announcements = frames.put("b", [memoryview(bytearray(LARGE))], set())
    assert isinstance(announcements, list)
    (announced,) = announcements
    assert not chunks.map(announced._replace(token=bytes(32)))
    assert not chunks.map(announced._replace(descriptor=10**6))
    assert not chunks.map(announced._replace(process=2**22 + 1))
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(unsealed, announced.token + bytes(announced.size))
    assert not chunks.map(announced._replace(descriptor=unsealed))
    os.close(unsealed)
    assert chunks.map(announced)
    like = [torch.empty(4, device="meta")]
    assert chunks.tensors(SharedPlace(0, 4096, 0), like)[0].shape == (4,)
    for place in (SharedPlace(1, 4096, 0), SharedPlace(0, 0, 0), SharedPlace(0, 4097, 0)):
        with pytest.raises(ValueError, match="not shared"):
            chunks.tensors(place, like)
    with pytest.raises(ValueError, match="not shared"):
        chunks.tensors(SharedPlace(0, announced.size - 64, 0), [torch.empty(1000, device="meta")])
    frames.close()


def test_a_bit_that_flips_in_shared_memory_is_found_and_the_frame_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged: list[Any] = []

    async def main() -> None:
        async with endpoints() as (a, b):
            await share(a, b)
            b.set_damage_handler(lambda sender, key: damaged.append((sender, key)))
            put = SharedFrames.put

            def flipping(self: SharedFrames, *arguments: Any) -> Any:
                place = put(self, *arguments)
                if not damaged and isinstance(place, SharedPlace):
                    first = self._lent[place.frame].tensors[0]
                    assert first is not None
                    first[1000] ^= 4
                return place

            monkeypatch.setattr(SharedFrames, "put", flipping)
            sent = torch.randn(LARGE)
            a.send(b.address, frame_key("0F0"), [sent])
            (found,) = await b.receive(frame_key("0F0"))
            assert same_tensor(found, sent)
            await until(lambda: bool(damaged))
            assert damaged == [(a.address, frame_key("0F0"))]
            await until(lambda: not lent(a))

    run_with_timeout(main())


def test_frames_are_copied_to_memory_that_a_device_reaches_quickly() -> None:
    async def main() -> None:
        async with endpoints() as (a, b):
            pool = SlabPool(lambda size: memoryview(bytearray(size)), 1 << 30)
            b.set_frame_memory(lambda tensors: [t for t in pool.take(tensors).tensors() if t is not None])
            await share(a, b)
            sent = torch.randn(512, 512).t()
            a.send(b.address, frame_key("0F0"), [sent, None])
            found = await b.receive(frame_key("0F0"))
            assert same_tensor(found[0], sent)
            assert pool.lent_bytes >= sent.nbytes
            await until(lambda: not lent(a))

    run_with_timeout(main())


class Locks:
    """Stands in for the driver: the page-locked ranges of this process, by address."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.locked: dict[int, int] = {}
        self.count = 0
        self.memory = SharedHostMemory(SharedChunks(), PageLocker(self.lock, self.unlock))

    def lock(self, address: int, size: int) -> bool:
        ctypes.string_at(address + size - 1, 1)  # it is mapped
        assert address not in self.locked
        if not self.refuses:
            self.locked[address] = size
            self.count += 1
        return not self.refuses

    def unlock(self, address: int) -> None:
        ctypes.string_at(address + self.locked.pop(address) - 1, 1)


@asynccontextmanager
async def devices(*, refuses: bool = False) -> AsyncIterator[tuple[SocketTransport, SocketTransport, SlabPool, Locks]]:
    """Two endpoints whose workers have devices, the slabs of the first one, and the locks of the second one."""
    async with endpoints() as (a, b):
        ours, theirs = Locks(), Locks(refuses=refuses)
        pool = SlabPool(ours.memory.chunks.allocate, 1 << 30, 1 << 21)
        other_pool = SlabPool(theirs.memory.chunks.allocate, 1 << 30, 1 << 21)
        a.set_frame_memory(lambda like: slab(pool, *like), ours.memory)
        b.set_frame_memory(lambda like: slab(other_pool, *like), theirs.memory)
        yield a, b, pool, theirs


def slab(pool: SlabPool, *like: Tensor) -> list[Tensor]:
    return [tensor for tensor in pool.take(like).tensors() if tensor is not None]


def test_tensors_in_slabs_are_sent_without_a_copy() -> None:
    async def main() -> None:
        async with devices() as (a, b, pool, locks):
            await share(a, b)
            for number in range(40):
                one, other = slab(pool, torch.empty(LARGE), torch.empty(256, 512).t())
                one.fill_(number), other.copy_(torch.randn(512, 256))
                small = torch.tensor([float(number)])  # in ordinary memory
                a.send(b.address, frame_key(f"{number}"), [one, None, small, other, torch.empty(0)])
                found = await b.receive(frame_key(f"{number}"))
                assert found[1] is None
                for sent, arrived in ((one, found[0]), (small, found[2]), (other, found[3])):
                    assert same_tensor(arrived, sent)
                if lent(a):
                    break
            assert a._shared_frames is not None
            copied = a._shared_frames.pool.lent_bytes
            assert 0 < copied < 10_000, "the small tensor alone"
            one[7] = -1.0
            assert found[0] is not None
            assert found[0][7] == -1.0, "it is the memory of the sender"
            assert locks.count >= 1
            assert set(locks.locked.values()) == {4096 + (1 << 21)}, "not the pool, whose pages may be returned"
            del one, other, found, sent, arrived
            await until(lambda: not lent(a))
            a._shared_frames.pool.cap = -1  # tensors in slabs need none of it
            again = 0
            while not lent(a):  # its chunk may not be mapped yet
                (one,) = slab(pool, torch.empty(LARGE))
                a.send(b.address, frame_key(f"again {again}"), [one.fill_(3.0)])
                (found_again,) = await b.receive(frame_key(f"again {again}"))
                assert same_tensor(found_again, one)
                again += 1

    run_with_timeout(main())


def test_a_slab_is_used_again_when_the_receiver_has_dropped_it() -> None:
    async def main() -> None:
        async with devices() as (a, b, pool, _):
            received = []
            for number in range(60):
                (sent,) = slab(pool, torch.empty(LARGE))
                a.send(b.address, frame_key(f"{number}"), [sent.fill_(number)])
                del sent
                a.release_sent_frames()
                received.append((await b.receive(frame_key(f"{number}")))[0])
                if number % 4 == 3:
                    values = [each[5].item() for each in received if each is not None]
                    assert values == [*range(number - 3, number + 1)]
                    received.clear()
                    await until(lambda: not lent(a))
            assert pool.lent_bytes == 0
            assert pool.peak_bytes < 8 * 4 * LARGE

    run_with_timeout(main())


def test_without_a_page_lock_frames_are_copied_by_the_receiver() -> None:
    async def main() -> None:
        async with devices(refuses=True) as (a, b, pool, _):
            kept = []
            for number in range(20):
                (sent,) = slab(pool, torch.empty(LARGE))
                a.send(b.address, frame_key(f"{number}"), [sent.fill_(number)])
                (found,) = await b.receive(frame_key(f"{number}"))
                kept.append(found)
                sent.fill_(-1.0)
            assert [each is not None and each[9].item() for each in kept] == [*range(20)]
            await until(lambda: not lent(a))

    run_with_timeout(main())


def test_a_receiver_without_a_device_owns_what_a_device_has_sent() -> None:
    async def main() -> None:
        async with endpoints() as (a, b):
            ours = Locks()
            pool = SlabPool(ours.memory.chunks.allocate, 1 << 30, 1 << 21)
            a.set_frame_memory(lambda like: slab(pool, *like), ours.memory)
            (sent,) = slab(pool, torch.ones(LARGE))
            for number in range(20):
                a.send(b.address, frame_key(f"{number}"), [sent.fill_(1.0)])
                (found,) = await b.receive(frame_key(f"{number}"))
                assert found is not None
                found.zero_()
                assert sent.sum() == LARGE
            await until(lambda: not lent(a))

    run_with_timeout(main())


def test_memory_of_a_lost_sender_is_unlocked_when_its_last_tensor_is_dropped() -> None:
    async def main() -> None:
        async with devices() as (a, b, pool, locks):
            number = 0
            while not lent(a):
                (sent,) = slab(pool, torch.empty(LARGE))
                a.send(b.address, frame_key(f"{number}"), [sent.fill_(1.0)])
                (found,) = await b.receive(frame_key(f"{number}"))
                number += 1
            assert locks.locked
            await close_once(a)
            assert (await next_lost_connection(b)).body is None
            await until(lambda: len(locks.locked) == 1)
            assert found is not None
            assert found.sum() == LARGE
            del found
            await until(lambda: not locks.locked)

    run_with_timeout(main())


def test_memory_of_a_lost_sender_is_unlocked_although_its_connection_is_garbage_before() -> None:
    """Without the unlock the driver would go on using its pages for whatever is mapped at its address next."""

    def mapped_chunks() -> list[MappedChunks]:
        return [each for each in gc.get_objects() if isinstance(each, MappedChunks)]

    of_other_tests = mapped_chunks()

    async def main() -> None:
        async with devices() as (a, b, pool, locks):
            number = 0
            while not lent(a):
                (sent,) = slab(pool, torch.empty(LARGE))
                a.send(b.address, frame_key(f"{number}"), [sent.fill_(1.0)])
                (found,) = await b.receive(frame_key(f"{number}"))
                number += 1
            await close_once(a)
            assert (await next_lost_connection(b)).body is None
            await until(lambda: not b._io_thread._inbound)
            gc.collect()  # as at the beginning of each epoch
            assert not [each for each in mapped_chunks() if each not in of_other_tests and each._holds]
            assert len(locks.locked) == 1, "the memory that is still in use"
            assert found is not None
            assert found.sum() == LARGE
            del found
            await until(lambda: not locks.locked)

    run_with_timeout(main())


def test_memory_of_senders_is_unlocked_when_the_receiver_closes() -> None:
    async def main() -> None:
        async with devices() as (a, b, pool, locks):
            number = 0
            while not lent(a):
                (sent,) = slab(pool, torch.empty(LARGE))
                a.send(b.address, frame_key(f"{number}"), [sent.fill_(1.0)])
                (found,) = await b.receive(frame_key(f"{number}"))
                number += 1
            del found
            assert locks.locked
            await close_once(b)
            gc.collect()
            await until(lambda: not locks.locked)

    run_with_timeout(main())


def named_shared_memory() -> list[str]:
    folder = Path("/dev/shm")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.real
def test_frames_of_a_sender_that_was_killed_arrive_and_nothing_remains() -> None:
    before = named_shared_memory()
    sent = torch.arange(float(LARGE))

    async def main() -> None:
        ours, theirs = socket.socketpair()

        def run_sender() -> None:
            async def send() -> None:
                a = SocketTransport(secret=SECRET)
                peer = theirs.recv(100).decode()
                number = 0
                while not lent(a):
                    a.send(peer, frame_key(f"{number}"), [sent + number])
                    number += 1
                    await asyncio.sleep(0.001)
                theirs.send(str(number).encode())
                await asyncio.sleep(100)

            asyncio.run(send())

        with ours, theirs, forked_child(run_sender) as sender:
            b = SocketTransport(secret=SECRET)
            ours.send(b.address.encode())
            count = int(await asyncio.to_thread(ours.recv, 10))
            kill_process(sender)
            for number in range(count):
                assert same_tensor((await b.receive(frame_key(f"{number}")))[0], sent + number)
            assert (await next_lost_connection(b)).body is None
            await close_once(b)

    run_with_timeout(main())
    assert named_shared_memory() == before


@pytest.mark.real
def test_memory_lent_to_a_receiver_is_free_when_it_was_killed_and_not_before() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()

        def run_receiver() -> None:
            async def receive() -> None:
                b = SocketTransport(secret=SECRET)
                theirs.send(b.address.encode())
                kept: list[Tensor | None] = []
                number = 0
                while True:
                    kept.extend(await b.receive(frame_key(f"{number}")))
                    number += 1

            asyncio.run(receive())

        with ours, theirs, forked_child(run_receiver) as receiver:
            a = SocketTransport(secret=SECRET)
            peer = (await asyncio.to_thread(ours.recv, 100)).decode()
            number = 0
            while lent(a) < 3:
                a.send(peer, frame_key(f"{number}"), [torch.ones(LARGE)])
                number += 1
                await asyncio.sleep(0.001)
            assert a._shared_frames is not None
            os.kill(receiver, signal.SIGSTOP)
            a._outbound[peer].fail()  # the connection breaks, and the receiver may still read
            a._shared_frames.release_of_ended_receivers()
            assert lent(a) >= 3
            kill_process(receiver)
            a._shared_frames.release_of_ended_receivers()
            assert not lent(a)
            await close_once(a)

    run_with_timeout(main())


def test_another_process_at_the_address_of_a_lost_receiver_is_watched_itself() -> None:
    frames = SharedFrames()
    with forked_child(signal.pause) as first, forked_child(signal.pause) as second:
        assert frames.add_receiver("b", first)
        place = frames.put("b", [memoryview(bytearray(LARGE))], {0})
        assert isinstance(place, SharedPlace)
        kill_process(first)
        assert frames.add_receiver("b", second)
        assert not frames._lent, "the first one has ended"
        frames.put("b", [memoryview(bytearray(LARGE))], {0})
        frames.handle_lost_connection("b")
        frames.release_of_ended_receivers()
        assert len(frames._lent) == 1
    frames.release_of_ended_receivers()
    assert not frames._lent
    frames.close()


def test_a_broken_connection_shares_memory_again_after_the_next_one_has_mapped_it() -> None:
    async def main() -> None:
        async with endpoints() as (a, b):
            await share(a, b)
            a.send(b.address, frame_key("kept"), [torch.ones(LARGE)])
            (kept,) = await b.receive(frame_key("kept"))
            a._outbound[b.address].fail()
            await next_lost_connection(a)
            number = 0
            while lent(a) < 2:
                number += 1
                a.send(b.address, frame_key(f"{number}"), [torch.full((LARGE,), 2.0)])
                await asyncio.sleep(0.001)
            (found,) = await b.receive(frame_key(f"{number}"))
            assert same_tensor(found, torch.full((LARGE,), 2.0))
            assert same_tensor(kept, torch.ones(LARGE)), "its memory is not used again"

    run_with_timeout(main())


def test_a_frame_in_memory_that_was_never_announced_is_invalid() -> None:
    frame = frame_codec.encode_frame(frame_key(), [torch.ones(4)])
    (header,) = frame.header_for(SharedPlace(0, 4096, 0))
    with pytest.raises(ValueError, match="not shared"):
        frame_codec.decode_header(bytes(header)[frame_codec.PREFIX.size :])


def test_memory_that_the_system_refuses_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert SharedFrames().put("b", [memoryview(bytearray(LARGE))], set()) is None


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_a_run_over_shared_memory_survives_a_loss_bit_for_bit(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LARGE_FRAMES", str(tmp_path))
    job, before = make_job(), named_shared_memory()
    run = culm.train(job, pipelines=2, stages=2, strategy=strategy, kills=["node=1 step=2 at=1F1"])
    assert len(list(tmp_path.iterdir())) >= 4, "every worker sent frames through shared memory"
    assert run.preemptions == 1
    assert run.state_sha256 == reference(job).state_sha256
    assert named_shared_memory() == before


def test_pages_of_many_idle_slabs_return_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after layers were moved: only what the next frames need is kept. Neighbours of a slab are not touched."""
    size = 1 << 20
    monkeypatch.setattr(shared_memory, "MAX_IDLE_BYTES", 2 * size)
    frames = SharedFrames(chunk_bytes=32 * size)
    payload = [memoryview(bytearray(b"x" * (size - 100)))]

    def put() -> SharedPlace:
        place = frames.put("b", payload, {0})
        assert isinstance(place, SharedPlace)
        return place

    def resident_bytes() -> int:
        return 512 * os.fstat(frames._chunks._chunks[0].descriptor).st_blocks

    places = [put() for _ in range(9)]
    full = resident_bytes()
    assert full > 8 * size
    frames.acknowledge([place.frame for place in places[:8]])
    assert resident_bytes() < full - 5 * size
    kept = frames._lent[places[8].frame].tensors[0]
    assert kept is not None
    assert bytes(kept.numpy()) == bytes(payload[0])
    for _ in range(8):
        again = frames._lent[put().frame].tensors[0]
        assert again is not None
        assert bytes(again.numpy()) == bytes(payload[0])
    frames.close()
