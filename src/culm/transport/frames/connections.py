"""Connections between two endpoints: each carries one direction, in order, without blocking a thread."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.transport.frames import frame_codec
from culm.transport.frames.encrypted_socket import drop_sent
from culm.transport.frames.encryption_policy import EncryptionPolicy
from culm.transport.frames.handshake import FrameSocket, authenticate_to_listener
from culm.transport.frames.lanes import OutboundLanes
from culm.transport.frames.mailbox import Mailbox
from culm.transport.interface import Address, FrameKey, FrameMemory

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.shared_chunks import PageLocker
    from culm.transport.frames.io_thread import SocketIOThread
    from culm.transport.frames.lanes import InboundLanes
    from culm.transport.frames.shared_memory import MappedChunks, SharedFrames

HANDSHAKE_S = 10.0
_REDIAL_INTERVAL_S = 0.5
"""Time between two attempts to reach an endpoint again."""
_MIN_SENT_FRAMES, MAX_SENT_FRAMES, _MAX_SENT_BYTES = 4, 512, 64 << 20
"""Sent frames that are kept for a repetition: the last ones up to this number and size, and always a few. The objects
of a small frame take 2 KB, whatever it carries."""
_SOCKET_BUFFER_BYTES = 4 << 20
"""Kernel buffers that hold a few activations, so that a send rarely needs the I/O thread."""


def set_socket_options(sock: FrameSocket, unacknowledged_s: float = HANDSHAKE_S) -> None:
    """Make a socket non-blocking, with large buffers and no delay.

    `unacknowledged_s`: the connection breaks when data was not acknowledged for that long. By default the kernel
    retries for a quarter of an hour without reporting anything.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1e3 * unacknowledged_s))
    sock.settimeout(None)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)


class OutboundConnection:
    """A connection that this endpoint sends on, in order. `_queue` holds what the kernel's buffer had no space for."""

    def __init__(
        self, io_thread: SocketIOThread, to: Address, on_lost: Callable[[Address], None], *, is_redial: bool = False
    ) -> None:
        """`is_redial`: an earlier connection broke, which was reported; a failure to connect again is not reported."""
        self._io_thread, self._to, self._on_lost, self._is_redial = io_thread, to, on_lost, is_redial
        self._condition = threading.Condition()
        self._queue: collections.deque[memoryview] = collections.deque()
        self._sock: FrameSocket | None = None
        self._sent_frames = SentFrames()
        self._announced_chunks: set[int] = set()
        self._confirmed_chunks: set[int] = set()
        self._lanes: OutboundLanes | None = None
        self.may_share = False
        """Whether the other end is on this machine, judging by its address, and encryption was not requested."""
        self._broken = False
        self._broke_at = 0.0
        self._dialled = False

    @property
    def may_redial(self) -> bool:
        """Whether the connection is broken and a new attempt is due."""
        return self._broken and (not self._is_redial or time.monotonic() - self._broke_at > _REDIAL_INTERVAL_S)

    @property
    def broken_s(self) -> float:
        """How long ago the connection broke; 0: it did not."""
        return time.monotonic() - self._broke_at if self._broken else 0.0

    def dial(
        self,
        secret: bytes,
        own_address: Address,
        policy: EncryptionPolicy,
        unacknowledged_s: float = HANDSHAKE_S,
        lanes: int = 0,
    ) -> None:
        """`lanes`: connections for large payloads, opened when there is one; 0: none."""
        with self._condition:
            if self._dialled:
                return
            self._dialled = True
            connect = functools.partial(_open_socket, self._to, secret, own_address, policy, unacknowledged_s)
            if lanes:
                self._lanes = OutboundLanes(connect, lanes, self.fail)
        threading.Thread(target=self._connect, args=(connect,), name="culm-dial", daemon=True).start()

    def _connect(self, connect: Callable[[], FrameSocket]) -> None:
        try:
            sock = connect()
        except (OSError, RunError, ValueError):
            self.fail()
            return
        self.may_share = isinstance(sock, socket.socket) and _within_machine(sock)
        with self._condition:
            self._sock = sock
            self._flush()
            self._io_thread.add_outbound(self, self._epoll_events())

    def send(self, buffers: list[memoryview]) -> None:
        with self._condition:
            if self._broken:
                return
            idle = not self._queue
            self._queue.extend(buffers)
            if not idle or self._sock is None:
                return
            self._flush()
            if self._queue:
                self._io_thread.update_events(self, self._epoll_events())

    def send_frame(self, frame: frame_codec.EncodedFrame, shared: SharedFrames | None = None) -> None:
        """Send a frame and keep it for a while, in case that it arrives damaged. `shared`: memory for a large one, if
        the other end can reach it."""
        buffers = frame.buffers()
        self._sent_frames.add(frame.key, buffers)
        if shared is not None:
            found = shared.put(self._to, frame.payload, self._confirmed_chunks)
            if isinstance(found, frame_codec.SharedPlace):
                self.send(frame.header_for(found))
                return
            for chunk in found or ():
                if chunk.chunk not in self._announced_chunks:
                    self._announced_chunks.add(chunk.chunk)
                    self.send(frame_codec.encode_announcement(chunk))
        elif self._lanes is not None and sum(map(len, frame.payload)) > frame_codec.PIECE_BYTES:
            self._lanes.start()
            if self._lanes.is_open:
                self.send(frame.header_for_lanes(self._lanes.send(frame)))
                return
        self.send(buffers)

    def confirm_chunk(self, chunk: int) -> None:
        """The other end has mapped a chunk of shared memory."""
        self._confirmed_chunks.add(chunk)

    def drop_epochs(self, below: int) -> None:
        """Drop what is kept of closed epochs."""
        self._sent_frames.drop_epochs(below)

    def release_sent_frames(self) -> None:
        """Drop all frames that are kept for a repetition."""
        self._sent_frames.clear()

    def resend_frame(self, key: FrameKey) -> None:
        """Send a frame again that arrived damaged. If it is no longer here, or its tensors have changed since, the
        connection breaks: what it carried is then sent again in another epoch."""
        buffers = self._sent_frames.find(key)
        if buffers is None:
            self.fail()
        else:
            self.send(buffers)

    def _flush(self) -> None:
        """Send as much as the kernel accepts. Called with the lock held."""
        assert self._sock is not None
        try:
            while self._queue:
                drop_sent(self._queue, self._sock.sendmsg(list(self._queue)[:64]))
        except BlockingIOError:
            pass
        except OSError:
            self._fail_locked()
        self._condition.notify_all()

    def handle_events(self, events: int) -> bool:
        """Called by the I/O thread: the socket is writable, or the other end closed it. False: remove this
        connection."""
        with self._condition:
            if events & ~select.EPOLLOUT and self._closed_by_peer():
                self._fail_locked()
            elif events & select.EPOLLOUT:
                self._flush()
                self._io_thread.update_events(self, self._epoll_events())
            return not self._broken

    def _closed_by_peer(self) -> bool:
        assert self._sock is not None
        try:
            return not self._sock.recv(
                1
            )  # the other end never sends on this connection: a byte is an error, as is its end
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _epoll_events(self) -> int:
        return select.EPOLLIN | (select.EPOLLOUT if self._queue else 0)

    def fail(self) -> None:
        with self._condition:
            self._fail_locked()

    def _fail_locked(self) -> None:
        if not self._broken:
            self._broken, self._broke_at = True, time.monotonic()
            self._queue.clear()
            if self._lanes is not None:
                self._lanes.stop()
            self._condition.notify_all()
            if self._sock is not None or not self._is_redial:
                self._on_lost(self._to)

    def drain(self, seconds: float) -> None:
        """Wait until the kernel has all data, for up to `seconds`; not for an endpoint that is being redialled."""
        with self._condition:
            self._condition.wait_for(lambda: not self._queue or self._broken or self._is_redialling, timeout=seconds)
        if self._lanes is not None:
            self._lanes.drain(seconds)

    @property
    def _is_redialling(self) -> bool:
        return self._is_redial and self._sock is None

    def fileno(self) -> int:
        assert self._sock is not None
        return self._sock.fileno()

    def close_socket(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if self._lanes is not None:
            self._lanes.stop()


def _open_socket(
    to: Address, secret: bytes, own_address: Address, policy: EncryptionPolicy, unacknowledged_s: float
) -> FrameSocket:
    """An authenticated connection to an endpoint."""
    host, _, port = to.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
    sock = authenticate_to_listener(plain, secret, own_address, to, policy)
    set_socket_options(sock, unacknowledged_s)
    return sock


def _within_machine(sock: socket.socket) -> bool:
    """Whether both ends of a connection have the same address."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:
        return False


class SentFrames:
    """The last frames of a connection. Damage is found as soon as a frame has arrived, so that few are enough.

    Tensors are not copied. A frame whose tensors have changed since is not sent again.
    """

    def __init__(self) -> None:
        self._frames: collections.deque[tuple[FrameKey, list[memoryview], int]] = collections.deque()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def add(self, key: FrameKey, buffers: list[memoryview]) -> None:
        size = sum(map(len, buffers))
        with self._lock:
            self._frames.append((key, buffers, size))
            self._held_bytes += size
            while len(self._frames) > MAX_SENT_FRAMES or (
                len(self._frames) > _MIN_SENT_FRAMES and self._held_bytes > _MAX_SENT_BYTES
            ):
                self._held_bytes -= self._frames.popleft()[2]

    def find(self, key: FrameKey) -> list[memoryview] | None:
        """The buffers of a frame; None: it was dropped, or its tensors have changed."""
        with self._lock:
            found = next((buffers for each, buffers, _ in reversed(self._frames) if each == key), None)
        return found if found is not None and frame_codec.is_unchanged(found) else None

    def clear(self) -> None:
        """Drop all frames."""
        with self._lock:
            self._frames.clear()
            self._held_bytes = 0

    def drop_epochs(self, below: int) -> None:
        """Drop the frames of closed epochs."""
        with self._lock:
            self._frames = collections.deque(frame for frame in self._frames if frame[0].epoch >= below)
            self._held_bytes = sum(size for *_, size in self._frames)


class InboundConnection:
    """A connection that this endpoint receives on: reads the header, then the tensors directly into their memory."""

    def __init__(
        self,
        sock: FrameSocket,
        sender: Address,
        mailbox: Mailbox,
        deliver: Callable[[Address, bytes | None], None],
        on_damaged: Callable[[Address, FrameKey | None], None],
        on_transport_message: Callable[[Address, frame_codec.TransportMessage], None],
        on_dropped: Callable[[Address, int], None],
        allocate: FrameMemory | None = None,
        find_locker: Callable[[], PageLocker | None] = lambda: None,
        find_lanes: Callable[[Address, bytes], InboundLanes] | None = None,
    ) -> None:
        """`on_damaged` is called with the sender and the key of a frame that arrived damaged (None: of a header, which
        breaks the connection), `on_transport_message` with what the other transport says (of a chunk, once it is
        mapped), `on_dropped` with the number of a frame in shared memory that is not used any more. `allocate`,
        `find_locker`: see Transport.set_frame_memory. `find_lanes` returns the lanes of a sender by their token; None:
        there are none."""
        self._allocate, self._find_locker = allocate, find_locker
        self._on_dropped = on_dropped
        self._find_lanes = find_lanes
        self._lanes: InboundLanes | None = None
        """Where the payloads of this connection arrive, once there is one."""
        self._lane_token: bytes | None = None
        """The lanes that this connection becomes one of."""
        self._mapped: MappedChunks | None = None
        self._sock, self._sender, self._mailbox, self._deliver = sock, sender, mailbox, deliver
        self._on_damaged, self._on_transport_message = on_damaged, on_transport_message
        self._lock = threading.Lock()
        self._ended = False
        self._start_frame()

    def _start_frame(self) -> None:
        self._prefix = bytearray(frame_codec.PREFIX.size)
        self._header: bytearray | None = None
        self._header_digest = 0
        self._frame: frame_codec.FrameHeader | None = None
        self._pending_buffers: collections.deque[memoryview] = collections.deque([memoryview(self._prefix)])

    def read_available(self) -> bool:
        """Read all available data. Called by the I/O thread, the event loop, or both at once. False: the connection
        ended."""
        with self._lock:
            return not self._ended and self._read()

    def _read(self) -> bool:
        try:
            while self._lane_token is None:
                while self._pending_buffers:
                    part = self._pending_buffers[0]
                    count = self._sock.recv_into(part)
                    if count == 0:
                        raise ConnectionError
                    if count == len(part):
                        self._pending_buffers.popleft()
                    else:
                        self._pending_buffers[0] = part[count:]
                self._advance()
            self._ended = True
            return False
        except BlockingIOError:
            return True
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._ended = True
            if self._mapped is not None:
                self._mapped.close()
            if self._lanes is not None:
                self._lanes.end()
            if isinstance(error, frame_codec.DamagedHeader):
                self._on_damaged(self._sender, None)
            self._deliver(self._sender, None)
            return False

    def _advance(self) -> None:
        """Continue after a complete prefix, header or frame."""
        if self._header is None:
            length, self._header_digest = frame_codec.decode_prefix(self._prefix)
            self._header = bytearray(length)
            self._pending_buffers.append(memoryview(self._header))
            return
        if self._frame is None:
            frame_codec.check_header(self._header, self._header_digest)
            find_shared = None if self._mapped is None else self._mapped.tensors
            parsed = frame_codec.decode_header(self._header, self._allocate, find_shared)
            if not isinstance(parsed, frame_codec.FrameHeader):
                self._handle_message(parsed)
                self._start_frame()
                return
            if parsed.lanes is not None:
                self._lanes = self._lanes_of(parsed.lanes.token)
                self._lanes.expect(parsed, parsed.lanes, self._payload_buffers(parsed), self._sock)
                self._start_frame()
                return
            self._frame = parsed
            if not parsed.shared_chunks:
                self._pending_buffers.extend(self._payload_buffers(parsed))
        if not self._pending_buffers:
            self._end_frame(self._frame)
            self._start_frame()

    def _handle_message(self, message: bytes | frame_codec.TransportMessage) -> None:
        if isinstance(message, bytes):
            self._deliver(self._sender, message)
        elif isinstance(message, frame_codec.ChunkAnnouncement):
            self._map(message)
        elif isinstance(message, frame_codec.LaneOpening):
            self._lane_token = message.token
        else:
            self._on_transport_message(self._sender, message)

    def _map(self, announced: frame_codec.ChunkAnnouncement) -> None:
        if self._mapped is None:
            from culm.transport.frames.shared_memory import MappedChunks  # imports torch

            self._mapped = MappedChunks(lambda number: self._on_dropped(self._sender, number), self._find_locker())
        if self._mapped.map(announced):
            self._mapped.lock(announced.chunk, lambda: self._on_transport_message(self._sender, announced))

    def _payload_buffers(self, frame: frame_codec.FrameHeader) -> list[memoryview]:
        return [frame_codec.tensor_bytes(t) for t in frame.tensors if t is not None and t.numel()]

    def _end_frame(self, frame: frame_codec.FrameHeader) -> None:
        """Deliver a complete frame, or ask for it again if it is damaged."""
        digest = frame_codec.checksum(self._payload_buffers(frame))
        tensors = frame.tensors
        if digest == frame.checksum and frame.shared_chunks:
            tensors = self._copies_of_unlocked(frame)
        deliver_frame(frame, digest, tensors, self._sender, self._mailbox, self._on_damaged)

    def _copies_of_unlocked(self, frame: frame_codec.FrameHeader) -> list[Tensor | None]:
        """The tensors of a frame in shared memory. Those that are not page-locked are copied where a device wants that,
        and always if they are memory that the sender keeps."""
        assert self._mapped is not None
        chunks, in_any_case = iter(frame.shared_chunks), False
        moving: list[Tensor | None] = []
        for tensor in frame.tensors:
            chunk = None if tensor is None or not tensor.numel() else next(chunks)
            moves = chunk is not None and not self._mapped.is_locked(chunk)
            moving.append(tensor if moves else None)
            in_any_case |= moves and chunk is not None and self._mapped.is_of_device(chunk)
        copies = frame_codec.copy_into(self._allocate, moving, in_any_case=in_any_case)
        return [tensor if copy is None else copy for tensor, copy in zip(frame.tensors, copies, strict=True)]

    def set_low_watermark(self, count: int) -> None:
        """Report the socket as readable only from `count` bytes on, or at the end of the connection."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close_socket(self) -> None:
        """Close the socket, or hand it to the lanes that it is one of. Nobody watches it any more."""
        if self._lane_token is None:
            self._sock.close()
            return
        self.set_low_watermark(1)
        try:
            self._lanes_of(self._lane_token).add_lane(self._sock)
        except (OSError, ValueError):
            self._sock.close()

    def _lanes_of(self, token: bytes) -> InboundLanes:
        if self._find_lanes is None:
            raise ValueError("this endpoint receives no payloads over other connections")
        return self._find_lanes(self._sender, token)


def deliver_frame(
    frame: frame_codec.FrameHeader,
    digest: int,
    tensors: list[Tensor | None],
    sender: Address,
    mailbox: Mailbox,
    on_damaged: Callable[[Address, FrameKey | None], None],
) -> None:
    """Deliver a complete frame; with another checksum than that of its header, ask for it again."""
    if digest != frame.checksum:
        on_damaged(sender, frame.key)
        return
    for tensor, required in zip(tensors, frame.requires_grad, strict=True):
        if tensor is not None and required:
            tensor.requires_grad_(True)
    mailbox.put(frame.key, tuple(tensors))
