"""Connections between servers and workers: one socket for both directions that carries messages with tensors.

    prefix    4 bytes, length of the header
    header    msgpack: (message, [(type, shape), ...])
    payload   the bytes of each tensor, in order

The dialler and the listener prove to each other that they know the run's token (culm.transport.frames.handshake), so
workers of another run are rejected. Connections between machines are encrypted. Sending never blocks: bytes that the
kernel does not accept yet are queued without a copy.
"""

from __future__ import annotations

import asyncio
import collections
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from culm.errors import RunError
from culm.gnn.transport.gnn_messages import GnnMessage, decode_message, encode_message
from culm.transport.frames import frame_codec
from culm.transport.frames.connections import HANDSHAKE_S, set_socket_options
from culm.transport.frames.encrypted_socket import drop_sent
from culm.transport.frames.handshake import FrameSocket, authenticate_to_listener

if TYPE_CHECKING:
    from torch import Tensor

MessageHandler = Callable[["TensorLink", GnnMessage, "list[Tensor]"], None]
LinkLostHandler = Callable[["TensorLink"], None]
_DTYPE_BY_CODE = {"f": torch.float32, "q": torch.int64, "i": torch.int32, "B": torch.uint8}
_CODE_BY_DTYPE = {kind: code for code, kind in _DTYPE_BY_CODE.items()}
_PREFIX = struct.Struct("<I")
_RECEIVE_BUFFER_BYTES = 1 << 16
_INLINE_BYTES = 1 << 15
"""Tensors up to this total size are copied behind their header: a copy is cheaper than a system call."""
_REDIAL_INTERVAL_S = 0.05
_header_decoder = msgspec.msgpack.Decoder(tuple[msgspec.Raw, list[tuple[str, tuple[int, ...]]]])


class TensorLink:
    """One end of a connection.

    `on_message` and `on_lost` are called from the event loop. Neither is called after `on_lost` or `close`.
    """

    def __init__(self, sock: FrameSocket, name: str, on_message: MessageHandler, on_lost: LinkLostHandler) -> None:
        set_socket_options(sock)
        self.name, self._sock, self._on_message, self._on_lost = name, sock, on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._send_queue: collections.deque[memoryview] = collections.deque()
        self._receive_buffer = memoryview(bytearray(_RECEIVE_BUFFER_BYTES))
        self._buffered_bytes = 0
        self._message: GnnMessage | None = None
        self._tensors: list[Tensor] = []
        self._remaining_payload: collections.deque[memoryview] = collections.deque()
        """Parts of the payload that have not been received yet."""
        self._is_open = True
        self._loop.add_reader(sock.fileno(), self._handle_readable)

    def send(self, message: GnnMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Queue a message. Large tensors must not be changed until it has arrived. Does nothing on a closed link."""
        if self._is_open:
            self.send_framed(frame_message(message, tensors))

    def send_framed(self, frames: Sequence[memoryview]) -> None:
        """Queue a message that is framed already, so that one for several links is framed once."""
        if not self._is_open:
            return
        idle = not self._send_queue
        self._send_queue.extend(frames)
        if idle:
            self._flush()

    def close(self) -> None:
        """Close the link at once, without calling `on_lost`."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    async def wait_until_drained(self) -> None:
        """Wait until the kernel has accepted all bytes."""
        while self._send_queue and self._is_open:
            await asyncio.sleep(0.001)

    def _flush(self) -> None:
        try:
            while self._send_queue:
                drop_sent(self._send_queue, self._sock.sendmsg(list(self._send_queue)[:32]))
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._handle_writable)
        except OSError:
            self._loop.call_soon(self._fail)  # not from inside `send`: the caller may be iterating over all links

    def _handle_writable(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        self._flush()

    def _handle_readable(self) -> None:
        """Receive large payloads directly into their tensors, everything else through the receive buffer."""
        try:
            while self._is_open:
                buffer = (
                    self._remaining_payload[0]
                    if self._remaining_payload and not self._buffered_bytes
                    else self._receive_buffer[self._buffered_bytes :]
                )
                count = self._sock.recv_into(buffer)
                if count == 0:
                    raise ConnectionError
                if self._remaining_payload and not self._buffered_bytes:
                    self._advance_payload(count)
                else:
                    self._buffered_bytes += count
                    self._parse_buffer()
                if count < len(buffer):
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError, msgspec.MsgspecError, RuntimeError):
            self._fail()

    def _advance_payload(self, count: int) -> None:
        part = self._remaining_payload[0]
        if count < len(part):
            self._remaining_payload[0] = part[count:]
            return
        self._remaining_payload.popleft()
        if not self._remaining_payload:
            self._deliver()

    def _parse_buffer(self) -> None:
        """Consume everything in the receive buffer that is complete."""
        at = 0
        while self._is_open:
            if self._message is None:
                used = self._parse_header(self._receive_buffer[at : self._buffered_bytes])
                if used == 0:
                    break
                at += used
            at += self._copy_payload(at)
            if self._remaining_payload:
                break
            self._deliver()
        rest = self._buffered_bytes - at
        if rest and at:
            self._receive_buffer[:rest] = bytes(self._receive_buffer[at : self._buffered_bytes])
        self._buffered_bytes = rest

    def _parse_header(self, data: memoryview) -> int:
        """Begin a message. Returns the bytes of its header, or 0 if it is incomplete."""
        if len(data) < _PREFIX.size:
            return 0
        length: int = _PREFIX.unpack_from(data)[0]
        whole = _PREFIX.size + length
        if length > frame_codec.MAX_HEADER_BYTES:
            raise ValueError(f"the header has {length} bytes: at most {frame_codec.MAX_HEADER_BYTES} are allowed")
        if len(data) < whole:
            self._grow_buffer(whole)
            return 0
        body, shapes = _header_decoder.decode(data[_PREFIX.size : whole])
        self._message = decode_message(body)
        self._tensors = [torch.empty(shape, dtype=_DTYPE_BY_CODE[code]) for code, shape in shapes]
        self._remaining_payload.extend(_tensor_bytes(t) for t in self._tensors if t.numel())
        return whole

    def _grow_buffer(self, size: int) -> None:
        """Make room for a header that is longer than the buffer. There is one at the start of a run."""
        if size > len(self._receive_buffer):
            larger = memoryview(bytearray(2 * size))
            larger[: self._buffered_bytes] = self._receive_buffer[: self._buffered_bytes]
            self._receive_buffer = larger

    def _copy_payload(self, at: int) -> int:
        """Copy buffered bytes into the tensors; returns their number."""
        start = at
        while self._remaining_payload and at < self._buffered_bytes:
            part = self._remaining_payload[0]
            count = min(len(part), self._buffered_bytes - at)
            part[:count] = self._receive_buffer[at : at + count]
            at += count
            if count < len(part):
                self._remaining_payload[0] = part[count:]
            else:
                self._remaining_payload.popleft()
        return at - start

    def _deliver(self) -> None:
        message, tensors = self._message, self._tensors
        assert message is not None
        self._message, self._tensors = None, []
        self._on_message(self, message, tensors)

    def _fail(self) -> None:
        if self._is_open:
            self.close()
            self._on_lost(self)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, for sending or receiving."""
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def frame_message(message: GnnMessage, tensors: Sequence[Tensor] = ()) -> list[memoryview]:
    """Return the frames of a message. Large tensors are not copied."""
    pieces = [tensor.detach().contiguous() for tensor in tensors]
    described = [(_CODE_BY_DTYPE[p.dtype], tuple(p.shape)) for p in pieces]
    header = msgspec.msgpack.encode((msgspec.Raw(encode_message(message)), described))
    if len(header) > frame_codec.MAX_HEADER_BYTES:
        raise RunError(
            f"the header of a {type(message).__name__} has {len(header)} bytes and at most "
            f"{frame_codec.MAX_HEADER_BYTES} are allowed: send large data as tensors"
        )
    bodies = [_tensor_bytes(p) for p in pieces if p.numel()]
    if sum(map(len, bodies)) <= _INLINE_BYTES:
        return [memoryview(b"".join([_PREFIX.pack(len(header)), header, *bodies]))]
    return [memoryview(_PREFIX.pack(len(header)) + header), *bodies]


async def connect_link(
    address: str, token: str, name: str, on_message: MessageHandler, on_lost: LinkLostHandler
) -> TensorLink:
    """Connect to another process of this run. Raises RunError if it does not answer or does not know the token."""
    try:
        sock = await asyncio.to_thread(_connect_socket, address, token, name)
        return TensorLink(sock, address, on_message, on_lost)
    except (OSError, ValueError) as error:
        raise RunError(f"{address} does not answer: {error}") from None


def _connect_socket(address: str, token: str, name: str) -> FrameSocket:
    """Return an authenticated socket. Dials again if the listener closes the connection during the handshake: a
    listener that many strangers dial drops unauthenticated connections, and an ended process refuses the next one."""
    host, _, port = address.rpartition(":")
    redial_until = time.monotonic() + HANDSHAKE_S
    while True:
        sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
        try:
            return authenticate_to_listener(sock, token.encode(), name, address)
        except ConnectionError:
            sock.close()
            if time.monotonic() > redial_until:
                raise
            time.sleep(_REDIAL_INTERVAL_S)
        except BaseException:
            sock.close()
            raise
