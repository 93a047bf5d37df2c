"""The real side: TCP, with one pump thread a process.

The pump receives ahead while the worker computes, straight into the memory of the tensors, and finishes what a send
could not place in the kernel's buffer at once. Sending itself happens in the caller's thread: one system call in the
usual case. Why not Gloo's send and receive: a wait there can be neither polled nor cancelled. Why not ZeroMQ: it hides
a lost connection, which is our fastest sign of a lost node.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from culm.errors import RunError, UsageError
from culm.transport import wire
from culm.transport.base import Address, Key, Letter, Mailbox, Tensors
from culm.transport.gloo import GlooGroup

_HANDSHAKE_S = 10.0
_BUFFER = 4 << 20
"""Room in the kernel for a few activations, so that a sender seldom needs the pump."""


class SocketTransport:
    """One endpoint: a listening socket, links out to those it sends to, links in from those it hears."""

    def __init__(self, *, secret: bytes, host: str = "127.0.0.1", ports: range | None = None) -> None:
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(host, ports)
        self.address: Address = f"{host}:{self._listener.getsockname()[1]}"
        self.mailbox = Mailbox()
        self._letters: asyncio.Queue[Letter] = asyncio.Queue()
        self._out: dict[Address, _LinkOut] = {}
        self._lock = threading.Lock()
        self._pump = _Pump(self._listener, self._accepted)

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        self._link(to).send(wire.frame(key, tensors))

    def post(self, to: Address, body: bytes) -> None:
        self._link(to).send(wire.letter(body))

    def arrived(self, key: Key) -> Tensors | None:
        return self.mailbox.take(key)

    async def receive(self, key: Key) -> Tensors:
        return await self.mailbox.get(key)

    async def letter(self) -> Letter:
        return await self._letters.get()

    def close_epochs(self, below: int) -> None:
        self.mailbox.close_epochs(below)

    def group(self, key: Key, members: Sequence[Address]) -> GlooGroup:
        return GlooGroup(self, key, members)

    async def close(self) -> None:
        for link in list(self._out.values()):
            await asyncio.to_thread(link.drain, _HANDSHAKE_S)
        self._pump.stop()

    def _link(self, to: Address) -> _LinkOut:
        link = self._out.get(to)
        if link is None:
            with self._lock:
                link = self._out.setdefault(to, _LinkOut(self._pump, to, self._lost))
            link.dial(self._secret, self.address)
        return link

    def _accepted(self, sock: socket.socket) -> None:
        """Shake hands aside, so that a silent caller holds nobody up; then hear it."""

        def meet() -> None:
            try:
                sock.settimeout(_HANDSHAKE_S)
                caller = wire.welcome(sock, self._secret)
            except (OSError, RunError, ValueError):
                sock.close()
                return
            _tune(sock)
            self._pump.watch(_LinkIn(sock, caller, self))

        threading.Thread(target=meet, name="culm-welcome", daemon=True).start()

    def deliver(self, caller: Address, body: bytes | None) -> None:
        """From the pump's thread: a letter, or the news that a connection broke."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._letters.put_nowait, Letter(caller, body))

    def _lost(self, peer: Address) -> None:
        self.deliver(peer, None)


def _listen(host: str, ports: range | None) -> socket.socket:
    for port in ports or (0,):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(128)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            if ports is None:
                raise UsageError(f"can not listen on {host}: {error.strerror}") from None
    assert ports is not None
    raise UsageError(
        f"all ports {ports.start} to {ports.stop - 1} on {host} are taken: give another range with --ports"
    )


def _tune(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)


class _LinkOut:
    """A connection that we send on. Frames leave in order; `_queue` holds what the kernel had no room for."""

    def __init__(self, pump: _Pump, to: Address, lost: Any) -> None:
        self._pump, self._to, self._lost = pump, to, lost
        self._condition = threading.Condition()
        self._queue: collections.deque[memoryview] = collections.deque()
        self._sock: socket.socket | None = None
        self._broken = False
        self._dialled = False

    def dial(self, secret: bytes, me: Address) -> None:
        with self._condition:
            if self._dialled:
                return
            self._dialled = True
        threading.Thread(target=self._connect, args=(secret, me), name="culm-dial", daemon=True).start()

    def _connect(self, secret: bytes, me: Address) -> None:
        host, _, port = self._to.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
            wire.introduce(sock, secret, me)
            _tune(sock)
        except (OSError, RunError, ValueError):
            self.fail()
            return
        with self._condition:
            self._sock = sock
            self._flush()
        self._pump.watch(self)

    def send(self, buffers: list[memoryview]) -> None:
        with self._condition:
            if self._broken:
                return
            idle = not self._queue
            self._queue.extend(buffers)
            if not idle or self._sock is None:
                return
            self._flush()
            waiting = bool(self._queue)
        if waiting:
            self._pump.wants_to_write(self)

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
            if events & selectors.EVENT_READ and self._closed_by_peer():
                self._fail_locked()
            elif events & selectors.EVENT_WRITE:
                self._flush()
            return not self._broken

    def _closed_by_peer(self) -> bool:
        assert self._sock is not None
        try:
            return not self._sock.recv(1)  # nobody ever sends on this direction: a byte or an end, both are the end
        except BlockingIOError:
            return False
        except OSError:
            return True

    def interest(self) -> int:
        with self._condition:
            return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0)

    def fail(self) -> None:
        with self._condition:
            self._fail_locked()

    def _fail_locked(self) -> None:
        if not self._broken:
            self._broken = True
            self._queue.clear()
            self._condition.notify_all()
            self._lost(self._to)

    def drain(self, seconds: float) -> None:
        """Wait until everything is with the kernel."""
        with self._condition:
            self._condition.wait_for(lambda: not self._queue or self._broken, timeout=seconds)

    def fileno(self) -> int:
        assert self._sock is not None
        return self._sock.fileno()

    def shut(self) -> None:
        if self._sock is not None:
            self._sock.close()


class _LinkIn:
    """A connection that we hear: header, then the tensors, straight into their memory."""

    def __init__(self, sock: socket.socket, caller: Address, owner: SocketTransport) -> None:
        self._sock, self._caller, self._owner = sock, caller, owner
        self._begin()

    def _begin(self) -> None:
        self._prefix = bytearray(wire.PREFIX.size)
        self._header: bytearray | None = None
        self._frame: tuple[Key, list[Tensor | None], list[bool]] | None = None
        self._parts: collections.deque[memoryview] = collections.deque([memoryview(self._prefix)])

    def ready(self, events: int) -> bool:
        """From the pump: readable. False: the connection ended."""
        del events
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
            self._owner.deliver(self._caller, None)
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
                self._owner.deliver(self._caller, parsed)
                self._begin()
                return
            self._frame = parsed
            self._parts.extend(wire.tensor_bytes(t) for t in parsed[1] if t is not None and t.numel())
        if not self._parts:
            key, tensors, wants = self._frame
            for tensor, wanted in zip(tensors, wants, strict=True):
                if tensor is not None and wanted:
                    tensor.requires_grad_(True)
            self._owner.mailbox.put(key, tuple(tensors))
            self._begin()

    def interest(self) -> int:
        return selectors.EVENT_READ

    def fileno(self) -> int:
        return self._sock.fileno()

    def shut(self) -> None:
        self._sock.close()


class _Pump:
    """The thread that moves bytes while the worker computes."""

    def __init__(self, listener: socket.socket, accepted: Any) -> None:
        self._listener, self._accepted = listener, accepted
        self._selector = selectors.DefaultSelector()
        self._asked: collections.deque[Any] = collections.deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="culm-pump", daemon=True)
        self._thread.start()

    def watch(self, link: _LinkOut | _LinkIn) -> None:
        """From any thread: begin to serve a link."""
        self._ask(link)

    def wants_to_write(self, link: _LinkOut) -> None:
        """From any thread: bytes are left over."""
        self._ask(link)

    def _ask(self, what: Any) -> None:
        self._asked.append(what)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._ask(None)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, (_LinkIn, _LinkOut)):
                key.data.shut()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_in:
                    if not self._serve_asked():
                        return
                elif not key.data.ready(events):
                    self._forget(key.data)
                elif isinstance(key.data, _LinkOut):
                    self._set_interest(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(True)
            self._accepted(sock)

    def _serve_asked(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        while self._asked:
            link = self._asked.popleft()
            if link is None:
                return False
            self._set_interest(link)
        return True

    def _set_interest(self, link: _LinkOut | _LinkIn) -> None:
        fd, wanted = link.fileno(), link.interest()
        if fd < 0:
            return
        known = self._selector.get_map().get(fd)
        if known is None:
            self._selector.register(fd, wanted, link)
        elif known.events != wanted:
            self._selector.modify(fd, wanted, link)

    def _forget(self, link: _LinkOut | _LinkIn) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.fileno())
        link.shut()
