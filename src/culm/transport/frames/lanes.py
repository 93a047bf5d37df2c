"""Large frames over several connections between two endpoints.

One connection is limited by a core at each end, and by what many networks allow a flow. A payload of more than
PIECE_BYTES is cut into pieces, which travel over further connections (lanes), each with a thread at both ends. The
header travels over the first connection, so that control messages and small frames do not wait behind a payload.

    piece    24 bytes: number of the frame, index of the piece, checksum of both (8 each);  the bytes

A piece is sent from the memory of the tensors and received in that of the frame. Its checksum is computed by the thread
that has received it. Lanes are opened when the first large frame is sent; until all of them are open, and for good if
one cannot be opened, payloads follow their header. When a lane that is open breaks, the first connection breaks, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from culm.errors import RunError
from culm.transport.frames import frame_codec
from culm.transport.frames.encrypted_socket import drop_sent

if TYPE_CHECKING:
    import collections

    from culm.transport.frames.frame_codec import EncodedFrame, FrameHeader, LanePlace
    from culm.transport.frames.handshake import FrameSocket

LANES = 4
"""Connections for payloads between two endpoints: over loopback four carried 16 GB/s where one carried 5."""
MAX_LANES = 64
"""More lanes of one sender are refused."""
_PIECE_HEADER = struct.Struct("<QQQ")
_NUMBERS = struct.Struct("<QQ")
_FIRST_LOOK_S, _NEXT_LOOK_S = 0.002, 0.01
"""How long a lane waits for the header of its frame before it looks for it itself."""


class _Piece(NamedTuple):
    header: memoryview
    content: memoryview


class OutboundLanes:
    """The lanes from this endpoint to another one."""

    def __init__(self, dial: Callable[[], FrameSocket], count: int, on_broken: Callable[[], None]) -> None:
        """`dial` opens an authenticated connection, blocking the caller. `on_broken`: an open lane broke."""
        self._dial, self._count, self._on_broken = dial, count, on_broken
        self._token = os.urandom(16)
        self._numbers = itertools.count()
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._unsent = 0
        self._sockets: list[FrameSocket] = []
        self._is_started = self._is_stopped = False
        self.is_open = False
        """Whether payloads can be sent."""

    def start(self) -> None:
        """Begin to open the lanes."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._open, name="culm-dial", daemon=True).start()

    def _open(self) -> None:
        try:
            for _ in range(self._count):
                sock = self._dial()
                sock.setblocking(True)
                with self._condition:
                    self._sockets.append(sock)
                    is_stopped = self._is_stopped
                if is_stopped:
                    raise ConnectionError
                _send_all(sock, frame_codec.encode_lane_opening(self._token))
        except (OSError, RunError, ValueError):
            self.stop()
            return
        with self._condition:
            for sock in self._sockets:
                threading.Thread(target=self._send_pieces, args=(sock,), name="culm-lane", daemon=True).start()
            self.is_open = not self._is_stopped

    def send(self, frame: EncodedFrame) -> LanePlace:
        """Queue the payload of a frame. Returns what its header says."""
        number = next(self._numbers)
        pieces = frame_codec.cut_pieces(frame.payload)
        with self._condition:
            self._unsent += len(pieces)
        for index, piece in enumerate(pieces):
            digest = xxhash.xxh3_64_intdigest(_NUMBERS.pack(number, index))
            self._pieces.put(_Piece(memoryview(_PIECE_HEADER.pack(number, index, digest)), piece))
        return frame_codec.LanePlace(self._token, number)

    def _send_pieces(self, sock: FrameSocket) -> None:
        try:
            while (piece := self._pieces.get()) is not None:
                _send_all(sock, [*piece])
                del piece  # its tensor may be used for something else
                with self._condition:
                    self._unsent -= 1
                    self._condition.notify_all()
        except OSError:
            self.is_open = False
            if not self._is_stopped:
                self._on_broken()

    def drain(self, seconds: float) -> None:
        """Wait until the kernel has all pieces, for up to `seconds`."""
        with self._condition:
            self._condition.wait_for(lambda: not self._unsent or self._is_stopped or not self.is_open, timeout=seconds)

    def stop(self) -> None:
        """Close the lanes. What is queued is dropped. Never waits, and calls nobody back."""
        with self._condition:
            self._is_stopped, self.is_open = True, False
            sockets, self._sockets = self._sockets, []
            self._condition.notify_all()
        with contextlib.suppress(queue.Empty):
            while True:
                self._pieces.get_nowait()
        for sock in sockets:
            self._pieces.put(None)
            close_lane(sock)


def _send_all(sock: FrameSocket, buffers: list[memoryview]) -> None:
    from collections import deque

    unsent: collections.deque[memoryview] = deque(buffers)
    while unsent:
        drop_sent(unsent, sock.sendmsg(unsent))


def close_lane(sock: FrameSocket) -> None:
    """Close a socket that another thread may be using. What the kernel has is sent."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class _IncompleteFrame:
    """A frame whose pieces arrive over lanes."""

    def __init__(self, frame: FrameHeader, payload: list[memoryview]) -> None:
        self.frame = frame
        self.pieces = frame_codec.cut_pieces(payload)
        self.digests: dict[int, int] = {}
        """By index of the piece: its checksum, once it has arrived."""


class InboundLanes:
    """The lanes from one connection of another endpoint to this one."""

    def __init__(
        self,
        deliver: Callable[[FrameHeader, int], None],
        read_headers: Callable[[], None],
        report_damage: Callable[[], None],
        forget: Callable[[], None],
    ) -> None:
        """All are called in the thread of a lane: `deliver` with a frame and its checksum, `read_headers` to read what
        has arrived on other connections, `report_damage` when the header of a piece is damaged, which breaks the
        connection, `forget` when the last lane has ended."""
        self._deliver, self._read_headers = deliver, read_headers
        self._report_damage, self._forget = report_damage, forget
        self._condition = threading.Condition()
        self._frames: dict[int, _IncompleteFrame] = {}
        self._sockets: list[FrameSocket] = []
        self._first: FrameSocket | None = None
        self._has_ended = False

    def add_lane(self, sock: FrameSocket) -> None:
        """Read pieces from a connection, in a thread. Raises ValueError if there are too many."""
        sock.setblocking(True)
        with self._condition:
            if self._has_ended or len(self._sockets) >= MAX_LANES:
                raise ValueError("too many connections for payloads")
            self._sockets.append(sock)
        threading.Thread(target=self._receive, args=(sock,), name="culm-lane", daemon=True).start()

    def expect(self, frame: FrameHeader, place: LanePlace, payload: list[memoryview], first: FrameSocket) -> None:
        """A header has arrived on the first connection: its pieces are received in `payload`. Raises ValueError."""
        with self._condition:
            if self._has_ended or place.number in self._frames:
                raise ValueError("a frame over a connection that broke")
            self._first = first
            self._frames[place.number] = _IncompleteFrame(frame, payload)
            self._condition.notify_all()

    def _receive(self, sock: FrameSocket) -> None:
        header = memoryview(bytearray(_PIECE_HEADER.size))
        try:
            while True:
                _receive_all(sock, header)
                number, index, digest = _PIECE_HEADER.unpack(header)
                if xxhash.xxh3_64_intdigest(_NUMBERS.pack(number, index)) != digest:
                    raise frame_codec.DamagedHeader("the checksum of a piece's header does not match")
                self._receive_piece(sock, number, index)
        except (OSError, ValueError, LookupError) as error:
            if isinstance(error, frame_codec.DamagedHeader):
                self._report_damage()
            self._end(sock, is_broken=not isinstance(error, OSError))

    def _receive_piece(self, sock: FrameSocket, number: int, index: int) -> None:
        incomplete = self._wait_for(number)
        if index in incomplete.digests:
            raise ValueError("a piece that arrived twice")
        piece = incomplete.pieces[index]
        _receive_all(sock, piece)
        digest = xxhash.xxh3_64_intdigest(piece)
        with self._condition:
            incomplete.digests[index] = digest
            if len(incomplete.digests) < len(incomplete.pieces):
                return
            del self._frames[number]
        digests = [incomplete.digests[each] for each in range(len(incomplete.pieces))]
        self._deliver(incomplete.frame, frame_codec.combine_digests(digests))

    def _wait_for(self, number: int) -> _IncompleteFrame:
        """The frame with a number, once its header was read. Raises ConnectionError when the first connection ended."""
        seconds = _FIRST_LOOK_S
        while True:
            with self._condition:
                self._condition.wait_for(lambda: number in self._frames or self._has_ended, timeout=seconds)
                if number in self._frames:
                    return self._frames[number]
                if self._has_ended:
                    raise ConnectionError
            self._read_headers()  # the thread that usually reads them may be computing
            seconds = _NEXT_LOOK_S

    def _end(self, sock: FrameSocket, *, is_broken: bool) -> None:
        """A lane ended: so does the first connection if something was under way or the lane was broken."""
        with self._condition:
            if sock in self._sockets:
                self._sockets.remove(sock)
            is_last, first = not self._sockets, self._first
            is_broken |= bool(self._frames)
        sock.close()
        if is_broken and first is not None:
            with contextlib.suppress(OSError):
                first.shutdown(socket.SHUT_RDWR)
        if is_last:
            self._forget()

    def end(self) -> None:
        """The first connection has ended. Lanes deliver what they still receive for headers that were read."""
        with self._condition:
            self._has_ended, self._first = True, None
            self._condition.notify_all()

    def close(self) -> None:
        """Close the lanes."""
        self.end()
        with self._condition:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _receive_all(sock: FrameSocket, buffer: memoryview) -> None:
    """Fill a buffer. Raises ConnectionError at the end of the connection."""
    while buffer:
        count = sock.recv_into(buffer)
        if count == 0:
            raise ConnectionError
        buffer = buffer[count:]
