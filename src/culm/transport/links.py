"""Connections between two endpoints: one direction each, in order, without blocking anybody."""

from __future__ import annotations

import collections
import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.transport import wire
from culm.transport.base import Address, Key, Mailbox

if TYPE_CHECKING:
    from torch import Tensor

    from culm.transport.pump import Pump

HANDSHAKE_S = 10.0
_REDIAL_S = 0.5
"""Between two attempts to reach somebody again."""
_BUFFER = 4 << 20
"""Room in the kernel for a few activations, so that a sender seldom needs the pump."""


def tune(sock: socket.socket, unheard_s: float = HANDSHAKE_S) -> None:
    """`unheard_s`: what the other end has not confirmed after so long breaks the connection. The kernel would try on
    for a quarter of an hour, at longer and longer intervals, and say nothing."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1e3 * unheard_s))
    sock.settimeout(None)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)


class LinkOut:
    """A connection that we send on. Frames leave in order; `_queue` holds what the kernel had no room for."""

    def __init__(self, pump: Pump, to: Address, lost: Callable[[Address], None], *, again: bool = False) -> None:
        """`again`: an earlier one broke, and that was said; that there still is none is no news."""
        self._pump, self._to, self._lost, self._again = pump, to, lost, again
        self._condition = threading.Condition()
        self._queue: collections.deque[memoryview] = collections.deque()
        self._sock: socket.socket | None = None
        self._broken = False
        self._broke_at = 0.0
        self._dialled = False

    @property
    def over(self) -> bool:
        """Whether it broke, and it is time to try another one."""
        return self._broken and (not self._again or time.monotonic() - self._broke_at > _REDIAL_S)

    def dial(self, secret: bytes, me: Address, unheard_s: float = HANDSHAKE_S) -> None:
        with self._condition:
            if self._dialled:
                return
            self._dialled = True
        threading.Thread(target=self._connect, args=(secret, me, unheard_s), name="culm-dial", daemon=True).start()

    def _connect(self, secret: bytes, me: Address, unheard_s: float) -> None:
        host, _, port = self._to.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
            wire.introduce(sock, secret, me)
            tune(sock, unheard_s)
        except (OSError, RunError, ValueError):
            self.fail()
            return
        with self._condition:
            self._sock = sock
            self._flush()
            self._pump.serve(self, self._interest())

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
                self._pump.change(self, self._interest())

    def _flush(self) -> None:
        """Send as much as the kernel takes. Called with the lock held."""
        assert self._sock is not None
        try:
            while self._queue:
                sent = self._sock.sendmsg(list(self._queue)[:64])
                while sent:
                    head = self._queue[0]
                    if sent < len(head):
                        self._queue[0] = head[sent:]
                        break
                    sent -= len(self._queue.popleft())
        except BlockingIOError:
            pass
        except OSError:
            self._fail_locked()
        self._condition.notify_all()

    def ready(self, events: int) -> bool:
        """From the pump: writable, or the other end closed. False: forget this link."""
        with self._condition:
            if events & ~select.EPOLLOUT and self._closed_by_peer():
                self._fail_locked()
            elif events & select.EPOLLOUT:
                self._flush()
                self._pump.change(self, self._interest())
            return not self._broken

    def _closed_by_peer(self) -> bool:
        assert self._sock is not None
        try:
            return not self._sock.recv(1)  # nobody ever sends on this direction: a byte or an end, both are the end
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _interest(self) -> int:
        return select.EPOLLIN | (select.EPOLLOUT if self._queue else 0)

    def fail(self) -> None:
        with self._condition:
            self._fail_locked()

    def _fail_locked(self) -> None:
        if not self._broken:
            self._broken, self._broke_at = True, time.monotonic()
            self._queue.clear()
            self._condition.notify_all()
            if self._sock is not None or not self._again:
                self._lost(self._to)

    def drain(self, seconds: float) -> None:
        """Wait until everything is with the kernel; not for somebody who is being tried again."""
        with self._condition:
            self._condition.wait_for(lambda: not self._queue or self._broken or self._trying, timeout=seconds)

    @property
    def _trying(self) -> bool:
        return self._again and self._sock is None

    def fileno(self) -> int:
        assert self._sock is not None
        return self._sock.fileno()

    def shut(self) -> None:
        if self._sock is not None:
            self._sock.close()


class LinkIn:
    """A connection that we hear: header, then the tensors, straight into their memory."""

    def __init__(
        self,
        sock: socket.socket,
        caller: Address,
        mailbox: Mailbox,
        deliver: Callable[[Address, bytes | None], None],
    ) -> None:
        self._sock, self._caller, self._mailbox, self._deliver = sock, caller, mailbox, deliver
        self._lock = threading.Lock()
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        self._prefix = bytearray(wire.PREFIX.size)
        self._header: bytearray | None = None
        self._frame: tuple[Key, list[Tensor | None], list[bool]] | None = None
        self._parts: collections.deque[memoryview] = collections.deque([memoryview(self._prefix)])

    def ready(self) -> bool:
        """Readable, seen by the pump, by the loop, or by both at once. False: the connection ended."""
        with self._lock:
            return not self._ended and self._read()

    def _read(self) -> bool:
        try:
            while True:
                while self._parts:
                    part = self._parts[0]
                    count = self._sock.recv_into(part)
                    if count == 0:
                        raise ConnectionError
                    if count == len(part):
                        self._parts.popleft()
                    else:
                        self._parts[0] = part[count:]
                self._advance()
        except BlockingIOError:
            return True
        except (OSError, ValueError, KeyError, TypeError):
            self._ended = True
            self._deliver(self._caller, None)
            return False

    def _advance(self) -> None:
        """A part is complete: prefix, header, or the whole frame."""
        if self._header is None:
            (length,) = wire.PREFIX.unpack(self._prefix)
            if length > wire.LONGEST_HEADER:
                raise ValueError("a header too long")
            self._header = bytearray(length)
            self._parts.append(memoryview(self._header))
            return
        if self._frame is None:
            parsed = wire.parse(self._header)
            if isinstance(parsed, bytes):
                self._deliver(self._caller, parsed)
                self._begin()
                return
            self._frame = parsed
            self._parts.extend(wire.tensor_bytes(t) for t in parsed[1] if t is not None and t.numel())
        if not self._parts:
            key, tensors, wants = self._frame
            for tensor, wanted in zip(tensors, wants, strict=True):
                if tensor is not None and wanted:
                    tensor.requires_grad_(True)
            self._mailbox.put(key, tuple(tensors))
            self._begin()

    def wake_at(self, count: int) -> None:
        """Be readable, for those who watch, from so many bytes on (or at the end of the connection)."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def fileno(self) -> int:
        return self._sock.fileno()

    def shut(self) -> None:
        self._sock.close()
