"""The real side: TCP, with one pump thread a process.

The pump receives ahead while the worker computes, straight into the memory of the tensors, and finishes what a send
could not place in the kernel's buffer at once. In the usual case it has nothing to do: sending is one system call in
the caller's thread, and a worker that waits reads for itself, so that a frame wakes one thread and not two.
Why not Gloo's send and receive: a wait there can be neither polled nor cancelled. Why not ZeroMQ: it hides a lost
connection, which is our fastest sign of a lost node.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from culm.errors import RunError, UsageError
from culm.transport import wire
from culm.transport.base import Address, Key, Letter, Mailbox, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from culm.transport.gloo import GlooGroup

_HANDSHAKE_S = 10.0
_AHEAD = 128 << 10
"""While the worker computes, less than this may wait in the kernel until it asks: to fetch a small frame costs less
than to take turns with the worker for the interpreter."""
_GLANCE_S = 0.05
"""How long a letter may wait for a worker that computes."""
_BUFFER = 4 << 20
"""Room in the kernel for a few activations, so that a sender seldom needs the pump."""


class SocketTransport:
    """One endpoint: a listening socket, links out to those it sends to, links in from those it hears."""

    def __init__(
        self, *, secret: bytes, host: str = "127.0.0.1", ports: range | None = None, look_out: float = 0.0
    ) -> None:
        self._secret = secret
        self._look_out_s = look_out
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(host, ports)
        self.address: Address = f"{host}:{self._listener.getsockname()[1]}"
        self.mailbox = Mailbox()
        self._letters: asyncio.Queue[Letter] = asyncio.Queue()
        self._out: dict[Address, _LinkOut] = {}
        self._lock = threading.Lock()
        self._pump = _Pump(self._listener, self._accepted)
        self._loop.add_reader(self._pump.inner.fileno(), self._pump.read)

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        self._link(to).send(wire.frame(key, tensors))

    def post(self, to: Address, body: bytes) -> None:
        self._link(to).send(wire.letter(body))

    def busy(self, computing: bool) -> None:
        self._pump.attend(not computing)

    def arrived(self, key: Key) -> Tensors | None:
        found = self.mailbox.take(key)
        if found is None:
            self._pump.read()
            found = self.mailbox.take(key)
        return found

    async def receive(self, key: Key) -> Tensors:
        found = self._look_out(key)
        if found is not None:
            return found
        with self._pump.resting():
            return await self.mailbox.get(key)

    def _look_out(self, key: Key) -> Tensors | None:
        """Look for a frame for up to `look_out` seconds before going to sleep: waking up takes longer than most
        frames do. The core is offered to others at every turn."""
        until = time.perf_counter() + self._look_out_s
        while (found := self.mailbox.take(key)) is None and time.perf_counter() < until:
            os.sched_yield()
            self._pump.read()
        return found

    async def letter(self) -> Letter:
        return await self._letters.get()

    def close_epochs(self, below: int) -> None:
        self.mailbox.close_epochs(below)

    def group(self, key: Key, members: Sequence[Address]) -> GlooGroup:
        from culm.transport.gloo import GlooGroup  # a launcher has no groups, and no torch

        return GlooGroup(self, key, members)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(asyncio.to_thread(link.drain, _HANDSHAKE_S) for link in list(self._out.values())))
        self._loop.remove_reader(self._pump.inner.fileno())
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
            self._pump.hear(_LinkIn(sock, caller, self))

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
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._prefix = bytearray(wire.PREFIX.size)
        self._header: bytearray | None = None
        self._frame: tuple[Key, list[Tensor | None], list[bool]] | None = None
        self._parts: collections.deque[memoryview] = collections.deque([memoryview(self._prefix)])

    def ready(self, events: int) -> bool:
        """Readable, seen by the pump or by the loop. False: the connection ended."""
        del events
        with self._lock:
            return self._read()

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

    def wake_at(self, count: int) -> None:
        """Be readable, for those who watch, from so many bytes on (or at the end of the connection)."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def fileno(self) -> int:
        return self._sock.fileno()

    def shut(self) -> None:
        self._sock.close()


class _Pump:
    """The thread that moves bytes while the worker computes, unless they are so few that the worker had better do it.

    `inner` watches the connections that we hear, `outer` everything else and, unless a worker waits and reads for
    itself, `inner`. Both are epoll sets of the kernel, which any thread may change while another waits on them.
    """

    def __init__(self, listener: socket.socket, accepted: Any) -> None:
        self._listener, self._accepted = listener, accepted
        self._links: dict[int, _LinkIn | _LinkOut] = {}
        self._resting = 0
        self._attends = True
        self._stop_in, self._stop_out = socket.socketpair()
        self.inner = select.epoll()
        self._outer = select.epoll()
        for watched in (listener.fileno(), self._stop_in.fileno(), self.inner.fileno()):
            self._outer.register(watched, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="culm-pump", daemon=True)
        self._thread.start()

    def hear(self, link: _LinkIn) -> None:
        """From any thread: begin to read a connection."""
        link.wake_at(1 if self._attends else _AHEAD)
        self._links[link.fileno()] = link
        self.inner.register(link.fileno(), select.EPOLLIN)

    def serve(self, link: _LinkOut, events: int) -> None:
        """From any thread: watch a connection that we send on."""
        self._links[link.fileno()] = link
        self._outer.register(link.fileno(), events)

    def change(self, link: _LinkOut, events: int) -> None:
        """From any thread: what a link waits for has changed."""
        with contextlib.suppress(FileNotFoundError):  # not served yet: it will be, with its interest of then
            self._outer.modify(link.fileno(), events)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """From the loop's thread: while it waits it reads for itself."""
        computing = not self._attends
        self._resting += 1
        if self._resting == 1:
            self._outer.unregister(self.inner.fileno())
            self.attend(True)
        try:
            yield
        finally:
            self._resting -= 1
            if self._resting == 0 and not self._outer.closed:
                self.attend(not computing)
                self._outer.register(self.inner.fileno(), select.EPOLLIN)

    def attend(self, closely: bool) -> None:
        """From the loop's thread: closely, every byte is seen at once; else only what is worth reading ahead."""
        self._attends = closely
        for link in list(self._links.values()):
            if isinstance(link, _LinkIn):
                link.wake_at(1 if closely else _AHEAD)

    def read(self) -> None:
        """Read what there is, in whichever thread asks."""
        for descriptor, link in list(self._links.items()):
            if isinstance(link, _LinkIn):
                self._ready(descriptor, select.EPOLLIN)

    def _ready(self, descriptor: int, events: int) -> None:
        link = self._links.get(descriptor)
        if link is not None and not link.ready(events):
            self._forget(descriptor, link)

    def _run(self) -> None:
        while True:
            happened = self._outer.poll(_GLANCE_S)
            if not happened and not self._attends:
                self.read()
            for descriptor, events in happened:
                if descriptor == self._stop_in.fileno():
                    return
                if descriptor == self.inner.fileno():
                    self.read()
                elif descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._ready(descriptor, events)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(True)
            self._accepted(sock)

    def _forget(self, descriptor: int, link: _LinkIn | _LinkOut) -> None:
        if self._links.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                (self.inner if isinstance(link, _LinkIn) else self._outer).unregister(descriptor)
            link.shut()

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._stop_out.send(b"x")
        self._thread.join()
        for descriptor, link in list(self._links.items()):
            self._forget(descriptor, link)
        self.inner.close()
        self._outer.close()
        for sock in (self._listener, self._stop_in, self._stop_out):
            sock.close()
