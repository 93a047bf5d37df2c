"""Large payloads over several connections: the same frames, losses and repetitions as over one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash
from tests.transport.large_frames_job import make_job
from tests.transport.transport_variants import (
    ENCRYPTED_LANES,
    LANES,
    SECRET,
    SMALL_PIECE,
    TIMEOUT_S,
    TransportVariant,
    close_once,
    forked_child,
    frame_key,
    kill_process,
    run_with_timeout,
    small_pieces,
)

import culm
from culm.device.slab_pool import SlabPool
from culm.testing import reference
from culm.transport.frames import frame_codec, lanes
from culm.transport.frames.frame_codec import PIECE_BYTES
from culm.transport.frames.lanes import InboundLanes, OutboundLanes
from culm.transport.frames.sockets import SocketTransport
from culm.transport.interface import ControlMessage, Transport

LARGE = torch.arange(4000.0).reshape(40, 100)
PIECES = -(-LARGE.nbytes // SMALL_PIECE)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread that has sent each piece."""
    found: list[threading.Thread] = []
    send_all = lanes._send_all

    def noted(sock: socket.socket, buffers: list[memoryview]) -> None:
        send_all(sock, buffers)
        if len(buffers) > 1:
            found.append(threading.current_thread())

    monkeypatch.setattr(lanes, "_send_all", noted)
    return found


async def eventually(check: object) -> None:
    assert callable(check)
    while not check():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("variant", [LANES, ENCRYPTED_LANES], ids=lambda side: side.name)
def test_a_large_payload_travels_in_pieces_and_a_small_one_does_not(
    variant: TransportVariant, pieces: list[threading.Thread]
) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            a.send(b.address, frame_key("0F0"), [torch.ones(10)])
            await b.receive(frame_key("0F0"))
            assert not pieces, "it is one piece"
            a.send(b.address, frame_key("0F1"), [LARGE.t(), None, torch.ones(3), torch.zeros(0, 4)])
            found = await b.receive(frame_key("0F1"))
            assert len(pieces) == PIECES + 1
            assert found[1] is None
            first, *_ = found
            assert first is not None
            assert torch.equal(first, LARGE.t())
            assert first.stride() == LARGE.t().stride()

    variant.run(main())


def test_the_first_large_payload_does_not_wait_for_lanes(pieces: list[threading.Thread]) -> None:
    """They are opened meanwhile, and used for those that follow."""
    large = torch.randn(3 * PIECE_BYTES // 8)

    async def main() -> None:
        a, b = (SocketTransport(secret=SECRET, min_shared_bytes=None, lanes=2) for _ in range(2))
        try:
            a.send(b.address, frame_key("0"), [large])
            await b.receive(frame_key("0"))
            assert not pieces
            connection = a._outbound[b.address]
            await eventually(lambda: connection._lanes is not None and connection._lanes.is_open)
            a.send(b.address, frame_key("1"), [large])
            (found,) = await b.receive(frame_key("1"))
            assert found is not None
            assert torch.equal(found, large)
            assert len(pieces) == 2
        finally:
            await close_once(a)
            await close_once(b)

    run_with_timeout(main())


def test_without_lanes_payloads_follow_their_header(
    monkeypatch: pytest.MonkeyPatch, pieces: list[threading.Thread]
) -> None:
    """An endpoint to which no further connection can be opened."""

    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            assert isinstance(a, SocketTransport)
            a.send(b.address, frame_key("hello"), [torch.ones(1)])
            await b.receive(frame_key("hello"))

            def refused(*arguments: object) -> None:
                raise OSError("too many open files")

            outbound = a._outbound[b.address]._lanes
            assert outbound is not None
            monkeypatch.setattr(outbound, "_dial", refused)
            for number in range(3):
                a.send(b.address, frame_key(str(number)), [LARGE])
                (found,) = await b.receive(frame_key(str(number)))
                assert found is not None
                assert torch.equal(found, LARGE)
            assert not pieces

    LANES.run(main())


def test_pieces_are_received_in_the_memory_of_the_device_which_is_free_again_afterwards() -> None:
    large = torch.randn(1 << 16)

    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            pool = SlabPool(lambda size: memoryview(bytearray(size)), 1 << 30)
            sending = SlabPool(lambda size: memoryview(bytearray(size)), 1 << 30)
            b.set_frame_memory(lambda tensors: [t for t in pool.take(tensors).tensors() if t is not None])
            (sent,) = sending.take([large]).tensors(reader=True)
            assert sent is not None
            sent.copy_(large)
            a.send(b.address, frame_key(), [sent])
            del sent
            arrived = await b.receive(frame_key())
            assert arrived[0] is not None
            assert torch.equal(arrived[0], large)
            assert pool.lent_bytes >= large.nbytes
            del arrived
            await asyncio.sleep(0)
            await eventually(lambda: pool.lent_bytes == 0)
            a.release_sent_frames()
            await eventually(lambda: sending.lent_bytes == 0)

    LANES.run(main())


@pytest.mark.parametrize("variant", [LANES, ENCRYPTED_LANES], ids=lambda side: side.name)
def test_a_payload_that_arrives_damaged_is_sent_again(
    variant: TransportVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged: list[object] = []
    receive_all = lanes._receive_all
    done: list[bool] = []

    def damaging(sock: socket.socket, buffer: memoryview) -> None:
        receive_all(sock, buffer)
        if len(buffer) == SMALL_PIECE and not done:
            done.append(True)
            buffer[3] ^= 1

    monkeypatch.setattr(lanes, "_receive_all", damaging)

    async def main() -> None:
        async with variant.endpoints() as (a, b):
            b.set_damage_handler(lambda sender, key: damaged.append((sender, key)))
            a.send(b.address, frame_key(), [LARGE])
            (found,) = await b.receive(frame_key())
            assert found is not None
            assert torch.equal(found, LARGE)
            assert damaged == [(a.address, frame_key())]

    variant.run(main())


def test_a_damaged_header_of_a_piece_breaks_the_connection_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged: list[object] = []
    receive_all = lanes._receive_all
    done: list[bool] = []

    def damaging(sock: socket.socket, buffer: memoryview) -> None:
        receive_all(sock, buffer)
        if len(buffer) == lanes._PIECE_HEADER.size and not done:
            done.append(True)
            buffer[8] ^= 1

    monkeypatch.setattr(lanes, "_receive_all", damaging)

    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            b.set_damage_handler(lambda sender, key: damaged.append((sender, key)))
            a.send(b.address, frame_key(), [LARGE])
            assert await b.receive_message() == ControlMessage(a.address, None)
            assert await a.receive_message() == ControlMessage(b.address, None)
            assert damaged == [(a.address, None)]
            a.send(b.address, frame_key(), [LARGE])
            (found,) = await b.receive(frame_key())
            assert found is not None
            assert torch.equal(found, LARGE)

    LANES.run(main())


def test_a_lane_that_breaks_is_one_loss() -> None:
    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            assert isinstance(a, SocketTransport)
            a.send(b.address, frame_key("0"), [LARGE])
            await b.receive(frame_key("0"))
            outbound = a._outbound[b.address]._lanes
            assert outbound is not None
            outbound._sockets[1].shutdown(socket.SHUT_RDWR)
            a.send(b.address, frame_key("1"), [LARGE.repeat(100, 1)])
            assert await a.receive_message() == ControlMessage(b.address, None)
            a.send(b.address, frame_key("2"), [LARGE])
            (found,) = await b.receive(frame_key("2"))
            assert found is not None
            assert torch.equal(found, LARGE)
            assert a._messages.empty()

    LANES.run(main())


def test_a_sender_that_is_killed_during_a_payload_is_lost_once_and_leaves_no_threads() -> None:
    async def main() -> None:
        before = threading.active_count()
        b = SocketTransport(secret=SECRET, min_shared_bytes=None, lanes=3)

        def send_forever() -> None:
            async def child() -> None:
                a = SocketTransport(secret=SECRET, min_shared_bytes=None, lanes=3)
                large, number = torch.ones(PIECE_BYTES), 0
                while True:
                    a.send(b.address, frame_key(str(number)), [large])
                    number += 1
                    await asyncio.sleep(0.05)

            asyncio.run(child())

        with forked_child(send_forever) as pid:
            await eventually(lambda: len(b._inbound_lanes) == 1)
            await eventually(lambda: any(group._frames for group in list(b._inbound_lanes.values())))
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0)
            kill_process(pid)
        lost = await b.receive_message()
        assert lost.body is None
        await eventually(lambda: not b._inbound_lanes)
        await asyncio.sleep(0.05)
        assert b._messages.empty()
        await close_once(b)
        await eventually(lambda: threading.active_count() <= before)

    run_with_timeout(main())


def test_a_payload_of_a_closed_epoch_is_received_and_dropped() -> None:
    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            b.close_epochs(2)
            a.send(b.address, frame_key("old", epoch=1), [LARGE])
            a.send(b.address, frame_key("new", epoch=2), [LARGE])
            await b.receive(frame_key("new", epoch=2))
            await asyncio.sleep(0.05)
            assert not b.close_epochs(3)

    LANES.run(main())


def test_headers_are_read_while_the_receiver_computes() -> None:
    """The header, which is small, would wait for the receiver otherwise, and the payload for the header."""

    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            a.send_message(b.address, b"hello")
            await b.receive_message()
            b.set_computing(True)
            a.send(b.address, frame_key(), [LARGE])
            assert isinstance(b, SocketTransport)
            until = time.monotonic() + TIMEOUT_S
            while b.mailbox.take(frame_key()) is None:  # without reading, unlike try_receive
                assert time.monotonic() < until
                time.sleep(0.001)
            b.set_computing(False)

    LANES.run(main())


def test_an_endpoint_that_closes_has_sent_its_payloads() -> None:
    async def main() -> None:
        async with LANES.endpoints() as (a, b):
            for number in range(20):
                a.send(b.address, frame_key(str(number)), [LARGE + number])
            await close_once(a)
            for number in range(20):
                (found,) = await b.receive(frame_key(str(number)))
                assert found is not None
                assert torch.equal(found, LARGE + number)

    LANES.run(main())


class Reader:
    """Inbound lanes, and what they say."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.ended = threading.Event()
        self.damage = 0
        self.lanes = InboundLanes(
            lambda frame, digest: self.delivered.append(digest), lambda: None, self._count_damage, self.ended.set
        )

    def _count_damage(self) -> None:
        self.damage += 1


def header(size: int) -> frame_codec.FrameHeader:
    place = frame_codec.LanePlace(b"token", 0)
    return frame_codec.FrameHeader(frame_key(), [torch.empty(size)], [False], 0, (), place)


@pytest.mark.parametrize("bad", ["index", "twice", "number of no frame"])
def test_a_sender_that_sends_invalid_pieces_loses_its_connection(bad: str) -> None:
    reader, (ours, theirs), (first, watched) = Reader(), socket.socketpair(), socket.socketpair()
    with small_pieces(), theirs, first, watched:
        content = bytearray(4 * SMALL_PIECE)
        reader.lanes.add_lane(ours)
        reader.lanes.expect(header(SMALL_PIECE), frame_codec.LanePlace(b"token", 0), [memoryview(content)], first)

        def piece(number: int, index: int) -> bytes:
            digest = xxhash.xxh3_64_intdigest(lanes._NUMBERS.pack(number, index))
            return lanes._PIECE_HEADER.pack(number, index, digest) + bytes(SMALL_PIECE)

        theirs.sendall(piece(0, 0))
        if bad == "number of no frame":
            theirs.sendall(piece(7, 0))
            reader.lanes.end()
        else:
            theirs.sendall(piece(0, 0 if bad == "twice" else 9))
            assert watched.recv(1) == b"", "the first connection was shut down"
        assert reader.ended.wait(TIMEOUT_S)
        assert not reader.delivered


def test_lanes_that_stop_while_they_open_leave_nothing_open() -> None:
    made: list[socket.socket] = []
    outbound: list[OutboundLanes] = []

    def dial() -> socket.socket:
        ours, theirs = socket.socketpair()
        made.extend((ours, theirs))
        if len(made) == 4:
            outbound[0].stop()
        return ours

    outbound.append(OutboundLanes(dial, 3, lambda: None))
    outbound[0]._open()
    assert not outbound[0].is_open
    assert made[0].fileno() == made[2].fileno() == -1
    for sock in made:
        sock.close()


def test_two_endpoints_send_payloads_to_each_other_at_once() -> None:
    large = torch.randn(5 * PIECE_BYTES // 4 + 3)

    async def main() -> None:
        made: list[Transport] = [SocketTransport(secret=SECRET, min_shared_bytes=None, lanes=2) for _ in range(2)]
        a, b = made
        try:
            for number in range(6):
                for here, there in ((a, b), (b, a)):
                    here.send(there.address, frame_key(str(number)), [large + number])
                await asyncio.sleep(0.02)
            for number in range(6):
                for each in made:
                    (found,) = await each.receive(frame_key(str(number)))
                    assert found is not None
                    assert torch.equal(found, large + number)
        finally:
            for each in made:
                await close_once(each)
        gc.collect()

    run_with_timeout(main())


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_a_run_over_encrypted_lanes_survives_a_loss_bit_for_bit(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Encrypted, so that payloads do not travel through shared memory."""
    monkeypatch.setenv("LANE_FRAMES", str(tmp_path))
    monkeypatch.setattr(frame_codec, "PIECE_BYTES", PIECE_BYTES)
    job = "tests/transport/lane_frames_job.py:make_job"
    run = culm.train(job, pipelines=2, stages=2, strategy=strategy, encrypt="on", kills=["node=1 step=3 at=1F1"])
    assert len(list(tmp_path.iterdir())) >= 4, "every worker sent payloads over lanes"
    assert run.preemptions == 1
    assert run.state_sha256 == reference(make_job()).state_sha256
