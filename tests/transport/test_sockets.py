"""What only sockets can get wrong: strangers on the port, dead processes, and bytes while somebody computes."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import socket
import threading
import time

import pytest
import torch

from culm.errors import RunError, UsageError
from culm.transport import wire
from culm.transport.base import Letter
from culm.transport.links import LinkIn
from culm.transport.sockets import SocketTransport

from .sides import PATIENCE_S, SECRET, SOCKETS, child, key, kill, leave, lost, patiently, same
from .test_wire import Bomb, bad_headers

LARGE = 16 << 20
"""Elements of a frame of 64 MB: many times what any buffer of the kernel holds."""


def dial(transport: SocketTransport) -> socket.socket:
    host, _, port = transport.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_a_large_frame_is_received_while_the_receiver_computes() -> None:
    """The receiver never gives its event loop a turn: the frame must come by itself."""

    async def main() -> None:
        sent = torch.arange(LARGE, dtype=torch.float32)
        async with SOCKETS.endpoints() as (a, b):
            await hello(a, b)
            a.send(b.address, key(), [sent])
            work, until = torch.randn(64, 64), time.monotonic() + PATIENCE_S
            while (found := b.arrived(key())) is None and time.monotonic() < until:
                work = torch.tanh(work @ work)
            assert found is not None
            assert found[0] is not None
            assert torch.equal(found[0], sent)

    patiently(main())


def test_a_letter_ends_the_look_out_for_a_frame() -> None:
    """Who watches for a frame holds its loop up; a letter may say that the frame will never come."""

    async def main() -> None:
        a, b = SocketTransport(secret=SECRET), SocketTransport(secret=SECRET, look_out=2 * PATIENCE_S)
        try:
            await hello(a, b)
            waiting = asyncio.create_task(b.receive(key()))
            a.post(b.address, b"never mind")
            assert await b.letter() == Letter(a.address, b"never mind")
            assert not waiting.done()
            waiting.cancel()
        finally:
            await a.close()
            await b.close()

    patiently(main())


async def hello(a: object, b: object) -> None:
    """A connection from a to b stands."""
    assert isinstance(a, SocketTransport)
    assert isinstance(b, SocketTransport)
    a.post(b.address, b"hello")
    assert await b.letter() == Letter(a.address, b"hello")


def test_large_frames_cross_in_both_directions() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            for one, other in ((a, b), (b, a)):
                one.send(other.address, key(), [torch.full((LARGE,), 2.0), torch.full((3,), 1.0)])
            for one in (a, b):
                large, small = await one.receive(key())
                assert large is not None
                assert small is not None
                assert large.min() == large.max() == 2.0
                assert torch.equal(small, torch.ones(3))

    patiently(main())


def test_a_killed_process_is_missed() -> None:
    """By whoever it had spoken to, without any time-out."""
    ours, theirs = socket.socketpair()

    def speak() -> None:
        async def main() -> None:
            other = SocketTransport(secret=SECRET)
            other.post(theirs.recv(100).decode(), b"I am here")
            await asyncio.Event().wait()

        asyncio.run(main())

    async def main(pid: int) -> None:
        mine = SocketTransport(secret=SECRET)
        ours.send(mine.address.encode())
        letter = await mine.letter()
        assert letter.body == b"I am here"
        os.kill(pid, signal.SIGKILL)
        assert await mine.letter() == Letter(letter.sender, None)
        await mine.close()

    with child(speak) as pid, ours, theirs:
        patiently(main(pid))


def test_a_killed_process_is_missed_by_whoever_speaks_to_it() -> None:
    """Also in the middle of a frame, with more of it queued than the dead will ever take."""
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
        os.kill(pid, signal.SIGSTOP)  # so that the frame can not get through
        mine.send(address, key(), [torch.zeros(LARGE)])
        kill(pid)
        assert await mine.letter() == Letter(address, None)
        await mine.close()

    with child(listen) as pid, ours, theirs:
        patiently(main(pid))


def test_who_confirms_nothing_for_too_long_is_missed_though_no_connection_was_closed() -> None:
    """As behind a switch that drops packets: the kernel alone would try on for a quarter of an hour."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            mine = SocketTransport(secret=SECRET, unheard=0.1)
            mine.send(address, key(), [torch.zeros(LARGE)])
            heard, _ = await asyncio.to_thread(silent.accept)
            with heard:
                await asyncio.to_thread(wire.welcome, heard, SECRET)  # and reads nothing from here on
                assert await mine.letter() == Letter(address, None)
            await mine.close()

    patiently(main())


def test_who_does_not_know_the_secret_can_not_send() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            assert isinstance(b, SocketTransport)
            stranger = SocketTransport(secret=b"another secret")
            stranger.post(b.address, b"let me in")
            stranger.send(b.address, key(), [torch.zeros(1)])
            assert await stranger.letter() == Letter(b.address, None)
            a.post(b.address, b"a friend")
            assert await b.letter() == Letter(a.address, b"a friend")
            assert b.arrived(key()) is None
            await stranger.close()

    patiently(main())


def test_a_caller_must_prove_the_secret_itself_not_only_echo_the_listener() -> None:
    """Whoever replays what it heard, or answers with noise, is hung up on."""

    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            assert isinstance(a, SocketTransport)
            for answer in (lambda heard: heard[16:], lambda _: bytes(32)):
                assert await asyncio.to_thread(_cheat, a, answer) == b""

    def _cheat(transport: SocketTransport, answer: object) -> bytes:
        with dial(transport) as stranger:
            stranger.sendall(bytes(16) + b"\x03you")
            heard = stranger.recv(48, socket.MSG_WAITALL)
            assert callable(answer)
            stranger.sendall(answer(heard))
            try:
                return stranger.recv(1)
            except ConnectionResetError:
                return b""

    patiently(main())


def test_who_does_not_know_the_secret_hears_nothing() -> None:
    """A stranger where a peer used to listen gets neither a letter nor a frame, and the sender is told."""
    heard: list[bytes] = []

    def impostor(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            heard.append(caller.recv(1 << 16))
            caller.sendall(bytes(48))
            while data := caller.recv(1 << 16):
                heard.append(data)

    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                thread = threading.Thread(target=impostor, args=(listener,))
                thread.start()
                address = f"127.0.0.1:{listener.getsockname()[1]}"
                a.post(address, b"the treasure is under the palm")
                assert await a.letter() == Letter(address, None)
                await asyncio.to_thread(thread.join)
        assert b"treasure" not in b"".join(heard)

    patiently(main())


@pytest.mark.parametrize("seed", range(4))
def test_noise_on_the_port_harms_nobody(seed: int) -> None:
    noise = random.Random(seed).randbytes(1000 * seed)

    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            assert isinstance(b, SocketTransport)
            with dial(b) as stranger, dial(b):  # one that talks nonsense, one that says nothing
                stranger.sendall(noise)
                a.send(b.address, key(), [torch.ones(3)])
                assert same((await b.receive(key()))[0], torch.ones(3))

    patiently(main())


def headed(header: bytes) -> bytes:
    return wire.PREFIX.pack(len(header)) + header


BROKEN = {
    "an oversized header": wire.PREFIX.pack(wire.LONGEST_HEADER + 1),
    "a pickle": headed(pickle.dumps(Bomb())),
    "an empty header": headed(b""),
    "a frame larger than the machine": headed(bad_headers()["more than any memory"]),
    "half a letter": bytes(wire.letter(b"hello")[0])[:-2],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_rules_is_lost_and_the_others_are_not(name: str) -> None:
    """It knows the secret, so it is one of us: with a bug, or another version."""

    async def main() -> None:
        async with SOCKETS.endpoints() as (a, b):
            assert isinstance(b, SocketTransport)
            await hello(a, b)
            with dial(b) as peer:
                await asyncio.to_thread(wire.introduce, peer, SECRET, "broken:1")
                peer.sendall(BROKEN[name])
                peer.shutdown(socket.SHUT_WR)
                assert await b.letter() == Letter("broken:1", None)
            a.send(b.address, key(), [torch.ones(1)])
            assert same((await b.receive(key()))[0], torch.ones(1))
        assert not Bomb.opened

    patiently(main())


def test_a_frame_in_tiny_pieces_is_a_frame() -> None:
    """Wherever the network cuts, also inside of the prefix."""
    data = b"".join(bytes(buffer) for buffer in wire.frame(key(), [torch.arange(20.0), None, torch.tensor(True)]))

    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            assert isinstance(a, SocketTransport)
            with dial(a) as peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.to_thread(wire.introduce, peer, SECRET, "slow:1")
                for at in range(0, len(data), 3):
                    peer.sendall(data[at : at + 3])
                    await asyncio.sleep(0)
                first, second, third = await a.receive(key())
                assert same(first, torch.arange(20.0))
                assert second is None
                assert same(third, torch.tensor(True))

    patiently(main())


def test_ports_are_taken_from_the_range_until_it_is_used_up() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"all ports {port} to {port} on 127.0.0.1 are taken"):
                SocketTransport(secret=SECRET, ports=range(port, port + 1))

    patiently(main())


def test_the_two_ends_of_a_handshake_agree_only_on_one_secret() -> None:
    def shake(secret: bytes, other: bytes) -> tuple[bool, bool]:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        theirs.settimeout(PATIENCE_S)
        welcomed: list[bool] = []

        def listen() -> None:
            try:
                welcomed.append(wire.welcome(theirs, other) == "me:1")
            except (RunError, OSError):
                welcomed.append(False)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            wire.introduce(ours, secret, "me:1")
            introduced = True
        except RunError:
            introduced = False
        ours.close()
        thread.join()
        theirs.close()
        return introduced, welcomed[0]

    assert shake(b"one", b"one") == (True, True)
    assert shake(b"one", b"two") == (False, False)


def test_a_loss_is_a_letter_of_its_own_for_each_peer() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            others = [SocketTransport(secret=SECRET) for _ in range(3)]
            for other in others:
                other.post(a.address, b"x")
            for _ in others:
                assert (await a.letter()).body == b"x"
            for other in others:
                await other.close()
            assert {(await lost(a)).sender for _ in others} == {other.address for other in others}

    patiently(main())


def test_a_connection_that_broke_is_made_anew_and_its_loss_was_said_once() -> None:
    """Both ends are alive: something between them has cut the line."""

    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            assert isinstance(a, SocketTransport)
            a.post(b.address, b"one")
            assert await b.letter() == Letter(a.address, b"one")
            line = a._out[b.address]._sock
            assert line is not None
            line.shutdown(socket.SHUT_RDWR)
            assert await a.letter() == Letter(b.address, None)
            assert await b.letter() == Letter(a.address, None)
            a.post(b.address, b"two")
            a.send(b.address, key(), [torch.ones(2)])
            assert await b.letter() == Letter(a.address, b"two")
            (found,) = await b.receive(key())
            assert same(found, torch.ones(2))

    patiently(main())


def test_somebody_who_is_gone_is_missed_once_however_often_it_is_written_to() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(2) as (a, b):
            a.post(b.address, b"x")
            await b.letter()
            await leave(b)
            assert await a.letter() == Letter(b.address, None)
            for _ in range(3):
                a.post(b.address, b"are you there?")
            a.post(a.address, b"a mark")
            assert await a.letter() == Letter(a.address, b"a mark")

    patiently(main())


def test_hands_that_were_being_shaken_when_an_endpoint_closed_are_let_go() -> None:
    async def main() -> None:
        async with SOCKETS.endpoints(1) as (a,):
            assert isinstance(a, SocketTransport)
            await leave(a)
            ours, theirs = socket.socketpair()
            with theirs:
                a._pump.hear(LinkIn(ours, "late:1", a.mailbox, a._deliver))
                assert theirs.recv(1) == b""

    patiently(main())
