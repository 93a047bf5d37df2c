"""Attackers in the network: what they change, repeat, relay or cut is detected before anything of it is used."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from tests.transport.transport_variants import (
    ENCRYPTED,
    SECRET,
    TIMEOUT_S,
    frame_key,
    run_with_timeout,
    same_tensor,
)

from culm.errors import RunError
from culm.transport.collectives.frame_group import FrameGroup
from culm.transport.collectives.gloo import GlooGroup
from culm.transport.frames import handshake
from culm.transport.frames.encrypted_socket import (
    LENGTH_BYTES,
    MAX_RECORD_BYTES,
    DamagedRecord,
    EncryptedSocket,
    RecordCipher,
    RecordKeys,
)
from culm.transport.frames.encryption_policy import EncryptionPolicy, encrypts_host
from culm.transport.frames.handshake import HandshakeResult, Steps
from culm.transport.frames.sockets import SocketTransport
from culm.transport.interface import ControlMessage

KEYS = RecordKeys(send=b"a" * 32, receive=b"b" * 32)
DIALLER, LISTENER = "10.0.0.1:7000", "10.0.0.2:7000"
Tamper = Callable[[int, bytes], bytes]
"""(number of a message of a handshake, its bytes) -> what arrives instead."""


def records_of(*messages: bytes, keys: RecordKeys = KEYS) -> list[bytes]:
    """What goes over the wire for some messages, record by record."""
    near, far = socket.socketpair()
    with near, far:
        sender = EncryptedSocket(near, keys)
        found = []
        for message in messages:
            assert sender.sendmsg([memoryview(message)]) == len(message)
            found.append(far.recv(1 << 20))
        return found


def received_from(wire: bytes, keys: RecordKeys = KEYS) -> bytes:
    """What the other end makes of these bytes, followed by the end of the connection."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(wire)
        near.shutdown(socket.SHUT_WR)
        receiver, buffer = EncryptedSocket(far, RecordKeys(keys.receive, keys.send)), memoryview(bytearray(1 << 10))
        return bytes(buffer[: receiver.recv_into(buffer)])


def test_what_is_sent_arrives_and_is_not_readable_on_the_wire() -> None:
    records = records_of(b"the treasure", b" is under the palm")
    assert received_from(b"".join(records)) == b"the treasure is under the palm"
    assert b"treasure" not in records[0]
    assert records_of(b"the same", b"the same")[0] != records_of(b"the same", b"the same")[1]


def test_a_record_with_any_bit_changed_is_not_delivered() -> None:
    (record,) = records_of(b"gradient")
    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1
        with pytest.raises((DamagedRecord, ConnectionError)):
            received_from(bytes(changed))


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0), (1, 0)])
def test_a_record_that_is_repeated_left_out_or_moved_is_detected(order: Sequence[int]) -> None:
    records = records_of(b"one", b"two", b"three")
    with pytest.raises(DamagedRecord, match="changed, repeated or left out"):
        received_from(b"".join(records[number] for number in order))


def test_a_record_of_another_connection_or_of_the_other_direction_is_detected() -> None:
    (of_another,) = records_of(b"one", keys=RecordKeys(b"c" * 32, b"d" * 32))
    (reflected,) = records_of(b"one", keys=RecordKeys(KEYS.receive, KEYS.send))
    for record in (of_another, reflected):
        with pytest.raises(DamagedRecord):
            received_from(record)


def test_a_cut_within_a_record_delivers_nothing_of_it() -> None:
    one, two = records_of(b"one", b"two")
    for length in range(1, len(two)):
        with pytest.raises(ConnectionError):
            received_from(one + two[:length])
    assert received_from(one) == b"one"  # a cut between records looks like a closed connection, and is reported as lost
    assert received_from(b"") == b""


def test_a_record_of_impossible_length_is_refused_before_memory_is_taken() -> None:
    for length in (0, 16, MAX_RECORD_BYTES + 17, 2**32 - 1):
        with pytest.raises(DamagedRecord, match=f"a record of {length} bytes"):
            received_from(length.to_bytes(LENGTH_BYTES, "big") + bytes(100))


def test_both_ends_change_the_key_before_the_same_record() -> None:
    sealing, opening = RecordCipher(b"k" * 32, rekey_bytes=100), RecordCipher(b"k" * 32, rekey_bytes=100)
    records = [sealing.seal(bytes([i]) * 40) for i in range(10)]
    assert [opening.open(record)[0] for record in records] == list(range(10))
    keeping = RecordCipher(b"k" * 32)
    assert [keeping.open(record)[0] for record in records[:2]] == [0, 1]
    with pytest.raises(DamagedRecord):
        keeping.open(records[2])


@pytest.mark.parametrize("sizes", [(1,), (0x10000, 3), (300_000, 1, 2_500_000), (16 << 10,) * 40])
def test_buffers_of_any_size_arrive_whole_and_in_order_through_small_kernel_buffers(sizes: Sequence[int]) -> None:
    buffers = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    sender, receiver = EncryptedSocket(near, KEYS), EncryptedSocket(far, RecordKeys(KEYS.receive, KEYS.send))
    queue, found = [memoryview(buffer) for buffer in buffers], bytearray()
    part = memoryview(bytearray(100_000))
    with near, far:
        while len(found) < sum(sizes):
            with contextlib.suppress(BlockingIOError):
                if queue:
                    sent = sender.sendmsg(queue)
                    rest = b"".join(queue)[sent:]
                    queue = [memoryview(rest)] if rest else []
            with contextlib.suppress(BlockingIOError):
                found += part[: receiver.recv_into(part)]
    assert bytes(found) == b"".join(buffers)


def shake_hands(
    tamper: Tamper = lambda _, data: data,
    *,
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
    dialled: str = LISTENER,
    encrypt: tuple[bool, bool] = (True, True),
) -> tuple[HandshakeResult, HandshakeResult]:
    """Both ends of a handshake, with an attacker between them. Raises what the first end that notices raises."""
    arriving = {"dialler": bytearray(), "listener": bytearray()}
    count = 0

    def send_to(end: str) -> Callable[[bytes], None]:
        def send(data: bytes) -> None:
            nonlocal count
            arriving[end] += tamper(count, data)
            count += 1

        return send

    ends: dict[str, Steps] = {
        "dialler": handshake.dialler_steps(send_to("listener"), secrets[0], DIALLER, dialled, encrypt=encrypt[0]),
        "listener": handshake.listener_steps(send_to("dialler"), secrets[1], LISTENER, encrypt=encrypt[1]),
    }
    needed = {name: next(steps) for name, steps in ends.items()}
    results: dict[str, HandshakeResult] = {}
    while len(results) < 2:
        name = next(name for name in ends if name not in results and len(arriving[name]) >= needed[name])
        data, arriving[name] = arriving[name][: needed[name]], arriving[name][needed[name] :]
        try:
            needed[name] = ends[name].send(bytes(data))
        except StopIteration as end:
            results[name] = end.value
    return results["dialler"], results["listener"]


def recorded_handshake() -> list[bytes]:
    """The messages of a handshake."""
    recorded: list[bytes] = []

    def record(_: int, data: bytes) -> bytes:
        recorded.append(data)
        return data

    shake_hands(record)
    return recorded


def test_the_ends_of_a_handshake_agree_on_names_and_keys() -> None:
    one, other = shake_hands()
    assert (one.peer, other.peer) == (LISTENER, DIALLER)
    assert one.keys is not None
    assert other.keys is not None
    assert one.keys == (other.keys.receive, other.keys.send)
    assert one.keys.send != one.keys.receive
    assert shake_hands()[0].keys != one.keys
    assert shake_hands(encrypt=(False, False))[0].keys is None


def test_a_wrong_secret_is_noticed_at_both_ends() -> None:
    with pytest.raises(RunError, match="the node that was dialled does not know"):
        shake_hands(secrets=(SECRET, b"another"))
    sent: list[bytes] = []
    listening = handshake.listener_steps(sent.append, SECRET, LISTENER, encrypt=True)
    dialling = handshake.dialler_steps(sent.append, b"another", DIALLER, LISTENER, encrypt=True)
    next(listening)
    next(dialling)
    with pytest.raises(RunError, match="a caller does not know"):
        feed(listening, sent[0], b"\0" * 32)


def feed(steps: Steps, *parts: bytes) -> None:
    """Send bytes to one end of a handshake that waits for the beginning of a hello."""
    data = b"".join(parts)
    needed = handshake._HELLO_BYTES
    while len(data) >= needed:
        part, data = data[:needed], data[needed:]
        needed = steps.send(part)


def test_no_bit_of_a_handshake_can_be_changed() -> None:
    for number, message in enumerate(recorded_handshake()):
        for at in range(0, len(message), 7):

            def flip(which: int, data: bytes, number: int = number, at: int = at) -> bytes:
                changed = bytearray(data)
                if which == number:
                    changed[at] ^= 1
                return bytes(changed)

            with pytest.raises((RunError, ValueError, StopIteration, RuntimeError)):
                shake_hands(flip)


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    recorded = recorded_handshake()
    listening = handshake.listener_steps(lambda _: None, SECRET, LISTENER, encrypt=True)
    next(listening)
    with pytest.raises(RunError, match="a caller does not know"):
        feed(listening, recorded[0], recorded[2])


def test_the_proof_of_a_listener_cannot_be_reflected() -> None:
    said: list[bytes] = []
    listening = handshake.listener_steps(said.append, SECRET, LISTENER, encrypt=True)
    next(listening)
    hello: list[bytes] = []
    next(handshake.dialler_steps(hello.append, b"unknown", DIALLER, LISTENER, encrypt=True))
    feed(listening, hello[0])
    with pytest.raises(RunError, match="a caller does not know"):
        listening.send(said[0][-handshake.PROOF_BYTES :])


def test_a_connection_cannot_be_relayed_to_another_listener() -> None:
    """Not as it is, and not with the address replaced."""
    with pytest.raises(RunError, match=r"dialled 10\.0\.0\.9:7000, and this is 10\.0\.0\.2:7000: another"):
        shake_hands(dialled="10.0.0.9:7000")
    with pytest.raises(RunError, match="the node that was dialled does not know"):
        shake_hands(lambda _, data: data.replace(b"10.0.0.9", b"10.0.0.2"), dialled="10.0.0.9:7000")


def test_encryption_cannot_be_switched_off_on_the_way() -> None:
    """By claiming for one end that the other does not encrypt, in one direction or in both."""

    def says_plain(number: int, data: bytes) -> bytes:
        at = len(handshake.VERSION)
        return data[:at] + b"\0" + data[at + 1 :] if number == 0 else data

    with pytest.raises(RunError, match="does not encrypt its connection"):
        shake_hands(says_plain)
    with pytest.raises(ValueError, match="shared key"):
        shake_hands(says_plain, encrypt=(True, False))
    with pytest.raises(RunError, match="encrypts its connection, and this end must not"):
        shake_hands(encrypt=(True, False))


def test_a_public_key_that_gives_a_known_key_is_refused() -> None:
    def weaken(number: int, data: bytes) -> bytes:
        at = len(handshake.VERSION) + 1 + handshake.NONCE_BYTES
        return data[:at] + bytes(32) + data[at + 32 :] if number == 0 else data

    with pytest.raises(ValueError, match="shared key"):
        shake_hands(weaken)


@contextlib.contextmanager
def relay_to(address: str) -> Iterator[str]:
    """A process in the middle that passes on what it gets, in both directions; yields its address."""
    host, _, port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            caller, _ = listener.accept()
            with caller, socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as onward:
                back = threading.Thread(target=_pass_on, args=(onward, caller))
                back.start()
                _pass_on(caller, onward)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("policy", ["on", "off"])
def test_an_endpoint_does_not_talk_through_a_process_in_the_middle(policy: EncryptionPolicy) -> None:
    async def main() -> None:
        a, b = (SocketTransport(secret=SECRET, encryption=policy) for _ in range(2))
        with relay_to(b.address) as address:
            a.send_message(address, b"for the relay")
            assert await a.receive_message() == ControlMessage(address, None)
        a.send_message(b.address, b"direct")
        assert await b.receive_message() == ControlMessage(a.address, b"direct")
        await a.close()
        await b.close()

    run_with_timeout(main())


def test_endpoints_that_differ_about_encryption_do_not_talk() -> None:
    async def main() -> None:
        plain = SocketTransport(secret=SECRET, encryption="off")
        encrypted = SocketTransport(secret=SECRET, encryption="on")
        plain.send_message(encrypted.address, b"in the clear")
        assert await plain.receive_message() == ControlMessage(encrypted.address, None)
        encrypted.send_message(plain.address, b"encrypted")
        assert await encrypted.receive_message() == ControlMessage(plain.address, None)
        await plain.close()
        await encrypted.close()

    run_with_timeout(main())


def test_a_record_that_is_damaged_on_its_way_breaks_the_connection_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seal, damaged, found = RecordCipher.seal, list[bool](), []

    def damage_once(self: RecordCipher, plaintext: bytes | memoryview) -> bytes:
        record = bytearray(seal(self, plaintext))
        if not damaged and len(plaintext) > 1000:
            damaged.append(True)
            record[500] ^= 1
        return bytes(record)

    monkeypatch.setattr(RecordCipher, "seal", damage_once)

    async def main() -> None:
        async with ENCRYPTED.endpoints() as (a, b):
            b.set_damage_handler(lambda sender, key: found.append((sender, key)))
            a.send(b.address, frame_key("first"), [torch.arange(2000.0)])
            assert await b.receive_message() == ControlMessage(a.address, None)
            assert await a.receive_message() == ControlMessage(b.address, None)
            assert b.try_receive(frame_key("first")) is None
            a.send(b.address, frame_key("second"), [torch.arange(2000.0)])
            assert same_tensor((await b.receive(frame_key("second")))[0], torch.arange(2000.0))
            assert found == [(a.address, None)]

    run_with_timeout(main())


def test_connections_between_machines_are_encrypted_by_default() -> None:
    assert [encrypts_host("auto", host) for host in ("127.0.0.1", "127.8.9.1", "10.0.0.1", "::1", "host")] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert encrypts_host("on", "127.0.0.1")
    assert not encrypts_host("off", "10.0.0.1")


def test_gradient_sums_leave_gloo_as_soon_as_one_member_is_on_another_machine() -> None:
    async def main() -> None:
        transport, always = SocketTransport(secret=SECRET), SocketTransport(secret=SECRET, encryption="on")
        here = [transport.address, "127.0.0.1:1"]
        assert isinstance(transport.group(frame_key(), here), GlooGroup)
        assert isinstance(transport.group(frame_key(), [*here, "10.0.0.1:1"]), FrameGroup)
        assert isinstance(always.group(frame_key(), [always.address, "127.0.0.1:1"]), FrameGroup)
        await transport.close()
        await always.close()

    run_with_timeout(main())
