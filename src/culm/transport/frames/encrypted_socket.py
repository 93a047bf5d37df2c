"""A socket whose bytes travel in encrypted records.

    record   4 bytes: length of the rest;  the bytes, encrypted with AES-256-GCM, and its tag of 16 bytes

The nonce is the number of the record and is not sent, so that a record that is changed, left out, repeated or moved to
another place or connection does not decrypt. The key of each direction comes from the handshake. It is replaced by a
hash of itself long before AES-GCM needs it.

An end of the connection is not authenticated: an attacker who can cut a connection can cut it between two records. To a
receiver that is a lost connection, as it is when the other end closes.
"""

from __future__ import annotations

import collections
import hmac
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from culm.transport.frames.frame_codec import DamagedHeader

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_RECORD_BYTES = 256 << 10
"""Bytes of a record before encryption."""
TAG_BYTES = 16
LENGTH_BYTES = 4
_REKEY_BYTES = 1 << 36
"""Bytes that one key encrypts: 2^32 blocks, where the odds against AES-GCM are still below 2^-64."""
_JOIN_BYTES = 16 << 10
"""Buffers below this size share a record; a larger one starts its own, so that it is not copied before encryption."""
_BATCH_BYTES = 1 << 20
"""Bytes encrypted before the kernel is called."""
_FIRST_BUFFER_BYTES = 16 << 10


class RecordKeys(NamedTuple):
    """The keys of the two directions of a connection, as one end uses them."""

    send: bytes
    receive: bytes


class DamagedRecord(DamagedHeader):
    """A record is not the one that was sent at this place of the connection."""


class RecordCipher:
    """Encrypts or decrypts the records of one direction, in order."""

    def __init__(self, key: bytes, rekey_bytes: int = _REKEY_BYTES) -> None:
        self._key, self._rekey_bytes = key, rekey_bytes
        self._cipher = _aes_gcm(key)
        self._number = 0
        self._key_bytes = 0

    def seal(self, plaintext: bytes | memoryview) -> bytes:
        """The next record, without its length."""
        nonce = self._next_nonce(len(plaintext))
        return self._cipher.encrypt(nonce, plaintext, None)

    def open(self, record: bytes | memoryview) -> bytes:
        """The content of the next record. Raises DamagedRecord."""
        from cryptography.exceptions import InvalidTag

        nonce = self._next_nonce(len(record) - TAG_BYTES)
        try:
            return self._cipher.decrypt(nonce, record, None)
        except InvalidTag:
            raise DamagedRecord("a record was changed, repeated or left out on its way") from None

    def _next_nonce(self, size: int) -> bytes:
        """The nonce of the next record; the key is changed first if it is due. Both ends count the same bytes, so that
        both change the key before the same record."""
        if self._key_bytes + size > self._rekey_bytes and self._key_bytes:
            self._key, self._key_bytes = hmac.digest(self._key, b"culm next key", "sha256"), 0
            self._cipher = _aes_gcm(self._key)
        self._key_bytes += size
        self._number += 1
        return self._number.to_bytes(12, "big")


class EncryptedSocket:
    """A non-blocking socket with the calls that connections use. Sending and receiving are independent: two threads may
    each do one of them."""

    def __init__(self, sock: socket.socket, keys: RecordKeys) -> None:
        self._sock = sock
        self._sealing, self._opening = RecordCipher(keys.send), RecordCipher(keys.receive)
        self._unsent: collections.deque[memoryview] = collections.deque()
        """Encrypted records that the kernel has not accepted yet."""
        self._unsent_plaintext_bytes = 0
        self._buffer = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        self._buffer_start, self._buffer_end = 0, 0
        """The part of the buffer that holds received records, the first one from its beginning."""
        self._plaintext = memoryview(b"")
        """The rest of a record that has been decrypted."""

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send the beginning of some bytes. Returns the number of bytes sent, all of which the kernel has.

        Raises BlockingIOError if the kernel accepts no more. The next call must then have the same bytes at its
        beginning: some of them may be encrypted already.
        """
        if not self._unsent:
            self._unsent_plaintext_bytes = self._seal(buffers)
        while self._unsent:
            drop_sent(self._unsent, self._sock.sendmsg(self._unsent))
        return self._unsent_plaintext_bytes

    def _seal(self, buffers: Sequence[memoryview]) -> int:
        """Encrypt up to _BATCH_BYTES; returns how many bytes."""
        accepted = 0
        for plaintext in _cut_records(buffers):
            record = self._sealing.seal(plaintext)
            self._unsent += (memoryview(len(record).to_bytes(LENGTH_BYTES, "big")), memoryview(record))
            accepted += len(plaintext)
            if accepted >= _BATCH_BYTES:
                break
        return accepted

    def recv_into(self, buffer: memoryview) -> int:
        """Receive bytes until the buffer is full or no complete record is left; returns their number, 0 at the end.

        Raises BlockingIOError if there is nothing yet, ConnectionError if the end comes within a record, and
        DamagedRecord.
        """
        filled = 0
        while filled < len(buffer):
            if self._plaintext:
                count = min(len(self._plaintext), len(buffer) - filled)
                buffer[filled : filled + count] = self._plaintext[:count]
                self._plaintext = self._plaintext[count:]
                filled += count
                continue
            try:
                received = self._receive_record()
            except BlockingIOError:
                if filled:
                    break
                raise
            if not received:
                break
        return filled

    def _receive_record(self) -> bool:
        """Receive and decrypt the next record. Returns False at the end of the connection."""
        while (record := self._take_record()) is None:
            count = self._sock.recv_into(self._buffer[self._buffer_end :])
            if count == 0:
                if self._buffer_end > self._buffer_start:
                    raise ConnectionError("the connection was closed within a record")
                return False
            self._buffer_end += count
        self._plaintext = memoryview(self._opening.open(record))
        return True

    def _take_record(self) -> memoryview | None:
        """The first record in the buffer; None if it is incomplete: there is then space for the rest of it."""
        available = self._buffer_end - self._buffer_start
        needed = LENGTH_BYTES
        if available >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[self._buffer_start : self._buffer_start + LENGTH_BYTES], "big")
            if not TAG_BYTES < length <= MAX_RECORD_BYTES + TAG_BYTES:
                raise DamagedRecord(f"a record of {length} bytes")
            needed += length
        if available < needed or needed == LENGTH_BYTES:
            self._make_space(needed)
            return None
        start, self._buffer_start = self._buffer_start + LENGTH_BYTES, self._buffer_start + needed
        return self._buffer[start : self._buffer_start]

    def _make_space(self, needed: int) -> None:
        """Move the incomplete record to the beginning of the buffer, where `needed` bytes must fit."""
        rest = bytes(self._buffer[self._buffer_start : self._buffer_end])
        if needed > len(self._buffer):
            self._buffer = memoryview(bytearray(2 * (LENGTH_BYTES + MAX_RECORD_BYTES + TAG_BYTES)))
        self._buffer[: len(rest)] = rest
        self._buffer_start, self._buffer_end = 0, len(rest)

    def recv(self, count: int) -> bytes:
        """Bytes as they arrive, encrypted: to find out whether the other end has closed a connection on which it does
        not send."""
        return self._sock.recv(count)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def setblocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def drop_sent(queue: collections.deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes of a queue."""
    while count:
        head = queue[0]
        if count < len(head):
            queue[0] = head[count:]
            return
        count -= len(queue.popleft())


def _cut_records(buffers: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """The contents of records for some buffers, in order. Small buffers share a record."""
    small: list[memoryview] = []
    for buffer in buffers:
        if len(buffer) < _JOIN_BYTES and sum(map(len, small)) + len(buffer) <= MAX_RECORD_BYTES:
            small.append(buffer)
            continue
        if small:
            yield b"".join(small)
            small = []
        for start in range(0, len(buffer), MAX_RECORD_BYTES):
            yield buffer[start : start + MAX_RECORD_BYTES]
    if small:
        yield b"".join(small)


def _aes_gcm(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # a run on one machine does not need it

    return AESGCM(key)
