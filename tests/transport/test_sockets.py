"""Properties of the socket transport only: strangers on the port, dead processes, and I/O while the worker computes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import signal
import socket
import threading
import time

import pytest
import torch
import xxhash
from tests.gnn.silent_connections import open_files_allowed
from tests.transport.test_frame_codec import Bomb, bad_headers
from tests.transport.transport_variants import (
    SECRET,
    SOCKETS,
    TIMEOUT_S,
    close_once,
    forked_child,
    frame_key,
    hello_bytes,
    kill_process,
    next_lost_connection,
    run_with_timeout,
    same_tensor,
)

from culm.device.slab_pool import SlabPool
from culm.errors import RunError, UsageError
from culm.transport.frames import frame_codec, handshake, sockets
from culm.transport.frames.connections import MAX_SENT_FRAMES, InboundConnection, OutboundConnection, SentFrames
from culm.transport.frames.sockets import MAX_PENDING_HANDSHAKES, SocketTransport
from culm.transport.interface import ControlMessage

LARGE = 16 << 20
"""Elements of a frame of 64 MB: many times the size of any kernel buffer."""


def dial(transport: SocketTransport) -> socket.socket:
    host, _, port = transport.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def test_a_large_frame_is_received_while_the_receiver_computes() -> None:
    """The receiver never yields to its event loop: the I/O thread must receive the frame."""

    async def main() -> None:
        sent = torch.arange(LARGE, dtype=torch.float32)
        async with SOCKETS.endpoints() as (a, b):
            await hello(a, b)
            a.send(b.address, frame_key(), [sent])
            work, until = torch.randn(64, 64), time.monotonic() + TIMEOUT_S
            while (found := b.try_receive(frame_key())) is None and time.monotonic() < until:
                work = torch.tanh(work @ work)
            assert found is not None
            assert found[0] is not None
            assert torch.equal(found[0], sent)

    run_with_timeout(main())


def test_a_message_ends_the_polling_for_a_frame() -> None:
    """Polling for a frame blocks the event loop; a control message may say that the frame will never come."""

    async def main() -> None:
        a, b = SocketTransport(secret=SECRET), SocketTransport(secret=SECRET, spin_s=2 * TIMEOUT_S)
        try:
            await hello(a, b)
            waiting = asyncio.create_task(b.receive(frame_key()))
            a.send_message(b.address, b"never mind")
            assert await b.receive_message() == ControlMessage(a.address, b"never mind")
            assert not waiting.done()
            waiting.cancel()
        finally:
            await a.close()
            await b.close()

    run_with_timeout(main())


def test_a_worker_with_a_device_does_not_block_its_event_loop_while_it_waits_for_a_frame() -> None:
    """The event loop sends what the device has completed meanwhile."""

    async def main() -> None:
        a, b = SocketTransport(secret=SECRET), SocketTransport(secret=SECRET, spin_s=2 * TIMEOUT_S)
        try:
            await hello(a, b)
            b.set_frame_memory(lambda tensors: None)
            b.set_computing(True)
            waiting = asyncio.create_task(b.receive(frame_key()))
            await asyncio.sleep(0)
            b.send(a.address, frame_key("output"), [torch.ones(2)])
            await a.receive(frame_key("output"))
            a.send(b.address, frame_key(), [torch.ones(3)])
            (found,) = await waiting
            assert found is not None
            assert found.tolist() == [1, 1, 1]
        finally:
            await a.close()
            await b.close()

    run_with_timeout(main())


async def hello(a: object, b: object) -> None:
    """Wait until the connection from a to b exists."""
    assert isinstance(a, SocketTransport)
    assert isinstance(b, SocketTransport)
    a.send_message(b.address, b"hello")
    assert await b.receive_message() == ControlMessage(a.address, b"hello")


def test_large_frames_cross_in_both_directions() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            for one, other in ((a, b), (b, a)):
                one.send(other.address, frame_key(), [torch.full((LARGE,), 2.0), torch.full((3,), 1.0)])
            for one in (a, b):
                large, small = await one.receive(frame_key())
                assert large is not None
                assert small is not None
                assert large.min() == large.max() == 2.0
                assert torch.equal(small, torch.ones(3))

    run_with_timeout(main())


def test_a_killed_process_is_reported_as_lost() -> None:
    """By every endpoint that has sent to it, without a timeout."""
    ours, theirs = socket.socketpair()

    def speak() -> None:
        async def main() -> None:
            other = SocketTransport(secret=SECRET)
            other.send_message(theirs.recv(100).decode(), b"I am here")
            await asyncio.Event().wait()

        asyncio.run(main())

    async def main(pid: int) -> None:
        mine = SocketTransport(secret=SECRET)
        ours.send(mine.address.encode())
        letter = await mine.receive_message()
        assert letter.body == b"I am here"
        os.kill(pid, signal.SIGKILL)
        assert await mine.receive_message() == ControlMessage(letter.sender, None)
        await mine.close()

    with forked_child(speak) as pid, ours, theirs:
        run_with_timeout(main(pid))


def test_a_killed_process_is_reported_to_endpoints_that_send_to_it() -> None:
    """Also in the middle of a frame, with more of it queued than the dead process will ever receive."""
    ours, theirs = socket.socketpair()

    def listen() -> None:
        async def main() -> None:
            other = SocketTransport(secret=SECRET)
            theirs.send(other.address.encode())
            await asyncio.Event().wait()

        asyncio.run(main())

    async def main(pid: int) -> None:
        mine = SocketTransport(secret=SECRET)
        address = ours.recv(100).decode()
        os.kill(pid, signal.SIGSTOP)  # so that the frame cannot be sent completely
        mine.send(address, frame_key(), [torch.zeros(LARGE)])
        kill_process(pid)
        assert await mine.receive_message() == ControlMessage(address, None)
        await mine.close()

    with forked_child(listen) as pid, ours, theirs:
        run_with_timeout(main(pid))


def test_an_endpoint_that_acknowledges_nothing_is_reported_as_lost() -> None:
    """As behind a switch that drops packets: the kernel alone would retry for a quarter of an hour."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            mine = SocketTransport(secret=SECRET, unacknowledged_s=0.1)
            mine.send(address, frame_key(), [torch.zeros(LARGE)])
            heard, _ = await asyncio.to_thread(silent.accept)
            with heard:
                await asyncio.to_thread(handshake.authenticate_dialler, heard, SECRET, address)
                # and reads nothing from now on
                assert await mine.receive_message() == ControlMessage(address, None)
            await mine.close()

    run_with_timeout(main())


def test_a_process_without_the_secret_cannot_send() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            assert isinstance(b, SocketTransport)
            stranger = SocketTransport(secret=b"another secret")
            stranger.send_message(b.address, b"let me in")
            stranger.send(b.address, frame_key(), [torch.zeros(1)])
            assert await stranger.receive_message() == ControlMessage(b.address, None)
            a.send_message(b.address, b"a friend")
            assert await b.receive_message() == ControlMessage(a.address, b"a friend")
            assert b.try_receive(frame_key()) is None
            await stranger.close()

    run_with_timeout(main())


def test_a_caller_must_prove_the_secret_itself_not_only_echo_the_listener() -> None:
    """A caller that replays what it received, or answers with noise, is disconnected."""

    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            assert isinstance(a, SocketTransport)
            for answer in (lambda heard: heard[-32:], lambda _: bytes(32)):
                assert await asyncio.to_thread(_cheat, a, answer) == b""

    def _cheat(transport: SocketTransport, answer: object) -> bytes:
        with dial(transport) as stranger:
            stranger.sendall(hello_bytes(transport.address))
            heard = stranger.recv(96, socket.MSG_WAITALL)
            assert callable(answer)
            stranger.sendall(answer(heard))
            try:
                return stranger.recv(1)
            except ConnectionResetError:
                return b""

    run_with_timeout(main())


def test_a_process_without_the_secret_receives_nothing() -> None:
    """A stranger that listens where a peer used to gets neither a message nor a frame, and the sender is notified."""
    heard: list[bytes] = []

    def impostor(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            heard.append(caller.recv(1 << 16))
            caller.sendall(bytes(96))
            while data := caller.recv(1 << 16):
                heard.append(data)

    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                thread = threading.Thread(target=impostor, args=(listener,))
                thread.start()
                address = f"127.0.0.1:{listener.getsockname()[1]}"
                a.send_message(address, b"the treasure is under the palm")
                assert await a.receive_message() == ControlMessage(address, None)
                await asyncio.to_thread(thread.join)
        assert b"treasure" not in b"".join(heard)

    run_with_timeout(main())


@pytest.mark.parametrize("seed", range(4))
def test_noise_on_the_port_is_harmless(seed: int) -> None:
    noise = random.Random(seed).randbytes(1000 * seed)

    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            assert isinstance(b, SocketTransport)
            with dial(b) as stranger, dial(b):  # one sends nonsense, one sends nothing
                stranger.sendall(noise)
                a.send(b.address, frame_key(), [torch.ones(3)])
                assert same_tensor((await b.receive(frame_key()))[0], torch.ones(3))

    run_with_timeout(main())


def headed(header: bytes) -> bytes:
    return frame_codec.PREFIX.pack(len(header), xxhash.xxh3_64_intdigest(header)) + header


BROKEN = {
    "an oversized header": frame_codec.PREFIX.pack(frame_codec.MAX_HEADER_BYTES + 1, 0),
    "a pickle": headed(pickle.dumps(Bomb())),
    "an empty header": headed(b""),
    "a frame larger than the machine": headed(bad_headers()["more than any memory"]),
    "half a letter": bytes(frame_codec.encode_message(b"hello")[0])[:-2],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_sends_invalid_data_is_lost_and_others_are_not(name: str) -> None:
    """The peer knows the secret, so it belongs to the run: it has a bug, or another version."""

    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            assert isinstance(b, SocketTransport)
            await hello(a, b)
            with dial(b) as peer:
                await asyncio.to_thread(handshake.authenticate_to_listener, peer, SECRET, "broken:1", b.address)
                peer.sendall(BROKEN[name])
                peer.shutdown(socket.SHUT_WR)
                assert await b.receive_message() == ControlMessage("broken:1", None)
            a.send(b.address, frame_key(), [torch.ones(1)])
            assert same_tensor((await b.receive(frame_key()))[0], torch.ones(1))
        assert not Bomb.opened

    run_with_timeout(main())


def test_a_frame_can_arrive_in_tiny_pieces() -> None:
    """Wherever the network splits the data, also inside the prefix."""
    data = b"".join(
        bytes(buffer)
        for buffer in frame_codec.encode_frame(frame_key(), [torch.arange(20.0), None, torch.tensor(True)]).buffers()
    )

    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            assert isinstance(a, SocketTransport)
            with dial(a) as peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.to_thread(handshake.authenticate_to_listener, peer, SECRET, "slow:1", a.address)
                for at in range(0, len(data), 3):
                    peer.sendall(data[at : at + 3])
                    await asyncio.sleep(0)
                first, second, third = await a.receive(frame_key())
                assert same_tensor(first, torch.arange(20.0))
                assert second is None
                assert same_tensor(third, torch.tensor(True))

    run_with_timeout(main())


def test_ports_are_taken_from_the_range_until_it_is_used_up() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"all ports {port} to {port} on 127.0.0.1 are taken"):
                SocketTransport(secret=SECRET, ports=range(port, port + 1))

    run_with_timeout(main())


def test_the_two_ends_of_a_handshake_agree_only_on_one_secret() -> None:
    def shake(secret: bytes, other: bytes) -> tuple[bool, bool]:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        theirs.settimeout(TIMEOUT_S)
        welcomed: list[bool] = []

        def listen() -> None:
            try:
                welcomed.append(handshake.authenticate_dialler(theirs, other, "you:1")[0] == "me:1")
            except (RunError, OSError):
                welcomed.append(False)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            handshake.authenticate_to_listener(ours, secret, "me:1", "you:1")
            introduced = True
        except RunError:
            introduced = False
        ours.close()
        thread.join()
        theirs.close()
        return introduced, welcomed[0]

    assert shake(b"one", b"one") == (True, True)
    assert shake(b"one", b"two") == (False, False)


def test_a_loss_is_one_message_per_peer() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            others = [SocketTransport(secret=SECRET) for _ in range(3)]
            for other in others:
                other.send_message(a.address, b"x")
            for _ in others:
                assert (await a.receive_message()).body == b"x"
            for other in others:
                await other.close()
            assert {(await next_lost_connection(a)).sender for _ in others} == {other.address for other in others}

    run_with_timeout(main())


def test_a_broken_connection_is_reopened_and_its_loss_reported_once() -> None:
    """Both ends are alive; something between them cut the connection."""

    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            assert isinstance(a, SocketTransport)
            a.send_message(b.address, b"one")
            assert await b.receive_message() == ControlMessage(a.address, b"one")
            line = a._outbound[b.address]._sock
            assert line is not None
            line.shutdown(socket.SHUT_RDWR)
            assert await a.receive_message() == ControlMessage(b.address, None)
            assert await b.receive_message() == ControlMessage(a.address, None)
            a.send_message(b.address, b"two")
            a.send(b.address, frame_key(), [torch.ones(2)])
            assert await b.receive_message() == ControlMessage(a.address, b"two")
            (found,) = await b.receive(frame_key())
            assert same_tensor(found, torch.ones(2))

    run_with_timeout(main())


def test_a_lost_endpoint_is_reported_once_however_often_it_is_sent_to() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            a.send_message(b.address, b"x")
            await b.receive_message()
            await close_once(b)
            assert await a.receive_message() == ControlMessage(b.address, None)
            for _ in range(3):
                a.send_message(b.address, b"are you there?")
            a.send_message(a.address, b"a mark")
            assert await a.receive_message() == ControlMessage(a.address, b"a mark")

    run_with_timeout(main())


def test_a_handshake_under_way_when_an_endpoint_closes_is_abandoned() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            assert isinstance(a, SocketTransport)
            await close_once(a)
            ours, theirs = socket.socketpair()
            with theirs:
                a._io_thread.add_inbound(
                    InboundConnection(
                        ours,
                        "late:1",
                        a.mailbox,
                        a._deliver_message,
                        a._handle_damage,
                        a._handle_transport_message,
                        a._handle_dropped_frame,
                    )
                )
                assert theirs.recv(1) == b""

    run_with_timeout(main())


def damage_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Flip a bit in buffer `number` of the first frame with a payload that is sent from now on."""
    send = OutboundConnection.send
    done: list[bool] = []

    def damaging(self: OutboundConnection, buffers: list[memoryview]) -> None:
        if len(buffers) > 1 and not done:
            done.append(True)
            damaged = bytearray(buffers[number])
            damaged[-1] ^= 1
            buffers = [memoryview(damaged) if at == number else buffer for at, buffer in enumerate(buffers)]
        send(self, buffers)

    monkeypatch.setattr(OutboundConnection, "send", damaging)


def test_a_frame_that_arrives_damaged_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, found = torch.arange(20.0), []

    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            b.set_damage_handler(lambda sender, key: found.append((sender, key)))
            damage_once(monkeypatch, 1)
            a.send(b.address, frame_key(), [sent])
            (arrived,) = await b.receive(frame_key())
            assert arrived is not None
            assert torch.equal(arrived, sent)
            assert found == [(a.address, frame_key())]

    run_with_timeout(main())


def test_a_header_that_arrives_damaged_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            b.set_damage_handler(lambda sender, key: found.append((sender, key)))
            damage_once(monkeypatch, 0)
            a.send(b.address, frame_key(), [torch.arange(20.0)])
            assert await b.receive_message() == ControlMessage(a.address, None)
            assert await a.receive_message() == ControlMessage(b.address, None)
            await asyncio.sleep(0)
            assert found == [(a.address, None)]

    run_with_timeout(main())


def test_a_frame_whose_tensors_have_changed_is_not_sent_again() -> None:
    """Other values under the same name would be worse than a broken connection, after which all is sent again."""
    sent, frames = torch.arange(4.0), SentFrames()
    frames.add(frame_key(), frame_codec.encode_frame(frame_key(), [sent]).buffers())
    assert frames.find(frame_key()) is not None
    sent += 1
    assert frames.find(frame_key()) is None


def test_sent_frames_are_dropped_with_their_epoch_and_above_the_limit() -> None:
    frames, buffers = SentFrames(), [memoryview(bytes(40 << 20))]
    keys = [frame_key(epoch=number) for number in range(8)]
    for key in keys:
        frames.add(key, buffers)
    assert [key.epoch for key, *_ in frames._frames] == [4, 5, 6, 7]
    frames.drop_epochs(6)
    assert [key.epoch for key, *_ in frames._frames] == [6, 7]


def test_few_of_many_small_frames_are_kept_for_a_repetition() -> None:
    """An epoch may last for weeks, and 64 MB in frames of a few bytes would be half a million of them."""
    frames = SentFrames()
    for step in range(2 * MAX_SENT_FRAMES):
        frames.add(frame_key(step=step), frame_codec.encode_frame(frame_key(step=step), [torch.ones(2)]).buffers())
    assert frames.find(frame_key(step=MAX_SENT_FRAMES - 1)) is None
    assert frames.find(frame_key(step=MAX_SENT_FRAMES)) is not None


def test_connections_that_broke_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may outlive thousands of others."""
    monkeypatch.setattr(sockets, "FORGET_AFTER_S", 0.0)

    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            assert isinstance(a, SocketTransport)
            for _ in range(5):
                lost = SocketTransport(secret=SECRET)
                a.send_message(lost.address, b"hello")
                await lost.receive_message()
                await lost.close()
                assert (await next_lost_connection(a)).sender == lost.address
            a.send_message(b.address, b"hello")
            await b.receive_message()
            assert list(a._outbound) == [b.address]

    run_with_timeout(main())


@pytest.mark.real
def test_silent_connections_take_no_threads_and_delay_no_one() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            assert isinstance(a, SocketTransport)
            with contextlib.ExitStack() as strangers:
                for _ in range(1500):
                    strangers.enter_context(dial(a))
                b.send_message(a.address, b"hello")
                assert await a.receive_message() == ControlMessage(b.address, b"hello")
                handshakes = [thread for thread in threading.enumerate() if thread.name == "culm-handshake"]
                assert len(handshakes) <= 2 * MAX_PENDING_HANDSHAKES

    with open_files_allowed(3500):
        run_with_timeout(main())


def test_large_frames_are_received_in_the_memory_of_the_device() -> None:
    """In slabs, which are free again when the frame was used. Small frames are not worth it."""
    large, small = torch.randn(1 << 16).reshape(256, 256).t(), torch.ones(3)

    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            pool = SlabPool(lambda size: memoryview(bytearray(size)), 1 << 30)
            b.set_frame_memory(lambda tensors: [t for t in pool.take(tensors).tensors() if t is not None])
            a.send(b.address, frame_key("0F0"), [large, None, small])
            a.send(b.address, frame_key("0F1"), [small])
            arrived = await b.receive(frame_key("0F0"))
            first, nothing, last = arrived
            assert first is not None
            assert nothing is None
            assert last is not None
            assert torch.equal(first, large)
            assert first.stride() == large.stride()
            assert torch.equal(last, small)
            assert pool.lent_bytes >= large.nbytes
            del arrived, first, last
            await b.receive(frame_key("0F1"))
            await asyncio.sleep(0)  # the event loop refers to what woke a task until it is suspended again
            assert pool.lent_bytes == 0

    run_with_timeout(main())


def test_sent_frames_are_released_when_their_memory_is_needed() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            pool = SlabPool(lambda size: memoryview(bytearray(size)), 1 << 30)
            slab = pool.take([torch.empty(4)])
            kept = slab.tensors()
            a.send(b.address, frame_key(), slab.tensors(reader=True))
            await b.receive(frame_key())
            assert slab.readers == 1, "kept in case that it arrived damaged"
            a.release_sent_frames()
            await pool.wait_for_readers()  # the thread that sent the frame may still hold it
            assert slab.readers == 0
            del kept
            assert pool.lent_bytes == 0

    run_with_timeout(main())
