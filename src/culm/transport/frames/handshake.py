"""Mutual authentication of the two ends of a connection, and the keys that encrypt it.

    dialler to listener    version, whether to encrypt, nonce, public key, its own address, the address it dialled
    listener to dialler    nonce, public key, proof
    dialler to listener    proof

A proof is an HMAC-SHA256 over everything before it, under a key that is derived from the run's secret and, with
encryption, from an X25519 exchange with fresh keys. Therefore

- a process that does not know the secret can neither send nor listen, and cannot relay a connection to a listener with
  another address than the one that was dialled;
- a proof is of use for this connection, in this direction and at this end only: it cannot be replayed or reflected;
- the ends agree on whether the connection is encrypted: a listener refuses a dialler that decides otherwise;
- a secret that leaks later decrypts no connection of the past.

The secret must be random: from a recorded proof, guesses can be checked at any speed. Nothing that is received is ever
unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from culm.errors import RunError
from culm.transport.frames.encrypted_socket import EncryptedSocket, RecordKeys
from culm.transport.frames.encryption_policy import EncryptionPolicy, encrypts_socket
from culm.transport.interface import Address

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

VERSION = b"culm\x02"
NONCE_BYTES = 32
PUBLIC_KEY_BYTES = 32
PROOF_BYTES = 32
_HELLO_BYTES = len(VERSION) + 1 + NONCE_BYTES + PUBLIC_KEY_BYTES
_NO_KEY = bytes(PUBLIC_KEY_BYTES)

FrameSocket: TypeAlias = "socket.socket | EncryptedSocket"
"""A connected socket after the handshake."""
Steps: TypeAlias = "Generator[int, bytes, HandshakeResult]"
"""One end of a handshake: yields how many bytes it needs next and is sent them."""


class HandshakeResult(NamedTuple):
    """What one end knows after a handshake."""

    peer: Address
    """The other end."""
    keys: RecordKeys | None
    """None: the connection is not encrypted."""

    def wrap(self, sock: socket.socket) -> FrameSocket:
        """The socket to use from now on."""
        return sock if self.keys is None else EncryptedSocket(sock, self.keys)


def authenticate_to_listener(
    sock: socket.socket, secret: bytes, own_address: Address, dialled: Address, policy: EncryptionPolicy = "auto"
) -> FrameSocket:
    """On the dialling end: prove the secret, check the proof of the other end, and send our address. Returns the socket
    to send on.

    Raises RunError if the other end does not know the secret, or is not the one that was dialled.
    """
    steps = dialler_steps(sock.sendall, secret, own_address, dialled, encrypt=encrypts_socket(policy, sock))
    return _run_blocking(sock, steps).wrap(sock)


def authenticate_dialler(
    sock: socket.socket,
    secret: bytes,
    own_address: Address,
    policy: EncryptionPolicy = "auto",
    seconds: float | None = None,
) -> tuple[Address, FrameSocket]:
    """On the listening end: the address of the caller once it has proved the secret, and the socket to receive on.

    `seconds`: for the whole handshake; a caller that sends a byte now and then gets no longer. Raises TimeoutError, and
    RunError if the caller does not know the secret, dialled another address, or decides otherwise about encryption.
    """
    steps = listener_steps(sock.sendall, secret, own_address, encrypt=encrypts_socket(policy, sock))
    result = _run_blocking(sock, steps, None if seconds is None else time.monotonic() + seconds)
    return result.peer, result.wrap(sock)


def dialler_steps(
    send: Callable[[bytes], object], secret: bytes, own_address: Address, dialled: Address, *, encrypt: bool
) -> Steps:
    """The dialling end of a handshake. `send` sends a few bytes."""
    private_key = _new_private_key() if encrypt else None
    hello = VERSION + bytes([encrypt]) + os.urandom(NONCE_BYTES) + _public_bytes(private_key)
    hello += _with_length(own_address) + _with_length(dialled)
    send(hello)
    answer = yield NONCE_BYTES + PUBLIC_KEY_BYTES
    schedule = _KeySchedule(secret, _shared_key(private_key, answer[NONCE_BYTES:]), hello + answer)
    if not hmac.compare_digest((yield PROOF_BYTES), schedule.derive(b"proof of the listener")):
        raise RunError("the node that was dialled does not know the run's secret")
    send(schedule.derive(b"proof of the dialler"))
    return HandshakeResult(dialled, schedule.record_keys(dials=True) if encrypt else None)


def listener_steps(send: Callable[[bytes], object], secret: bytes, own_address: Address, *, encrypt: bool) -> Steps:
    """The listening end of a handshake. `send` sends a few bytes."""
    hello = yield _HELLO_BYTES
    if not hello.startswith(VERSION):
        raise RunError("a caller is not a culm process, or one of another version")
    names = []
    for _ in range(2):
        length = yield 1
        name = (yield length[0]) if length[0] else b""
        hello += length + name
        names.append(name.decode())
    caller, dialled = names
    if hello[len(VERSION)] != encrypt:
        raise RunError(
            f"{caller} {'does not encrypt' if encrypt else 'encrypts'} its connection, and this end must not"
        )
    if dialled != own_address:
        raise RunError(f"{caller} dialled {dialled}, and this is {own_address}: another process relays its connection")
    private_key = _new_private_key() if encrypt else None
    answer = os.urandom(NONCE_BYTES) + _public_bytes(private_key)
    caller_key = hello[_HELLO_BYTES - PUBLIC_KEY_BYTES : _HELLO_BYTES]
    schedule = _KeySchedule(secret, _shared_key(private_key, caller_key), hello + answer)
    send(answer + schedule.derive(b"proof of the listener"))
    if not hmac.compare_digest((yield PROOF_BYTES), schedule.derive(b"proof of the dialler")):
        raise RunError("a caller does not know the run's secret")
    return HandshakeResult(caller, schedule.record_keys(dials=False) if encrypt else None)


class _KeySchedule:
    """Keys derived as in HKDF (RFC 5869) from the secret and the exchanged key, for everything that was said."""

    def __init__(self, secret: bytes, shared_key: bytes, transcript: bytes) -> None:
        self._root = hmac.digest(secret, b"culm handshake " + shared_key, "sha256")
        self._transcript = hashlib.sha256(transcript).digest()

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes for one purpose."""
        return hmac.digest(self._root, purpose + b"\0" + self._transcript + b"\x01", "sha256")

    def record_keys(self, *, dials: bool) -> RecordKeys:
        forth, back = self.derive(b"key from the dialler"), self.derive(b"key from the listener")
        return RecordKeys(forth, back) if dials else RecordKeys(back, forth)


def _with_length(address: Address) -> bytes:
    name = address.encode()
    return bytes([len(name)]) + name


def _new_private_key() -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # not needed on one machine

    return X25519PrivateKey.generate()


def _public_bytes(private_key: X25519PrivateKey | None) -> bytes:
    return _NO_KEY if private_key is None else private_key.public_key().public_bytes_raw()


def _shared_key(private_key: X25519PrivateKey | None, public_key: bytes) -> bytes:
    """The exchanged key; empty without encryption. Raises ValueError for a key that gives a predictable one."""
    if private_key is None:
        return b""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return private_key.exchange(X25519PublicKey.from_public_bytes(public_key))


def _run_blocking(sock: socket.socket, steps: Steps, until: float | None = None) -> HandshakeResult:
    """Run one end of a handshake over a blocking socket."""
    try:
        count = next(steps)
        while True:
            count = steps.send(_receive_exactly(sock, count, until))
    except StopIteration as end:
        result: HandshakeResult = end.value
        return result


def _receive_exactly(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    data = b""
    while len(data) < count:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 0.001))
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed during the handshake")
        data += more
    return data
