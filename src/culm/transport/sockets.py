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
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from culm.errors import RunError, UsageError
from culm.transport import wire
from culm.transport.base import Address, Key, Letter, Mailbox, Tensors
from culm.transport.links import HANDSHAKE_S, LinkIn, LinkOut, tune
from culm.transport.pump import Pump

if TYPE_CHECKING:
    from torch import Tensor

    from culm.transport.gloo import GlooGroup


class SocketTransport:
    """One endpoint: a listening socket, links out to those it sends to, links in from those it hears."""

    def __init__(
        self,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        ports: range | None = None,
        look_out: float = 0.0,
        unheard: float = HANDSHAKE_S,
    ) -> None:
        """`unheard`: seconds after which a connection is broken whose other end confirms nothing."""
        self._secret = secret
        self._look_out_s, self._unheard_s = look_out, unheard
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(host, ports)
        self.address: Address = f"{host}:{self._listener.getsockname()[1]}"
        self.mailbox = Mailbox()
        self._letters: asyncio.Queue[Letter] = asyncio.Queue()
        self._unseen: collections.deque[Letter] = collections.deque()
        """Letters on their way from the thread that read them to the loop."""
        self._out: dict[Address, LinkOut] = {}
        self._lock = threading.Lock()
        self._pump = Pump(self._listener, self._accepted)
        self._loop.add_reader(self._pump.inner.fileno(), self._pump.read)

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        self._link(to).send(wire.frame(key, tensors))

    def post(self, to: Address, body: bytes) -> None:
        self._link(to).send(wire.letter(body))

    def busy(self, computing: bool) -> None:
        self._pump.busy(computing)

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
        frames do. The core is offered to others at every turn, and a letter ends the look-out: it may be urgent."""
        until = time.perf_counter() + self._look_out_s
        while (found := self.mailbox.take(key)) is None and not self._unseen and time.perf_counter() < until:
            os.sched_yield()
            self._pump.read()
        return found

    async def letter(self) -> Letter:
        return await self._letters.get()

    def close_epochs(self, below: int) -> dict[Key, Tensors]:
        return self.mailbox.close_epochs(below)

    def group(self, key: Key, members: Sequence[Address]) -> GlooGroup:
        from culm.transport.gloo import GlooGroup  # a launcher has no groups, and no torch

        return GlooGroup(self, key, members)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(asyncio.to_thread(link.drain, HANDSHAKE_S) for link in list(self._out.values())))
        self._loop.remove_reader(self._pump.inner.fileno())
        self._pump.stop()

    def _link(self, to: Address) -> LinkOut:
        """The connection to somebody; a new one where the last one broke: the other end may be there all the same."""
        link = self._out.get(to)
        if link is None or link.over:
            with self._lock:
                link = self._out.get(to)
                if link is None or link.over:
                    link = self._out[to] = LinkOut(self._pump, to, self._lost, again=link is not None)
            link.dial(self._secret, self.address, self._unheard_s)
        return link

    def _accepted(self, sock: socket.socket) -> None:
        """Shake hands aside, so that a silent caller holds nobody up; then hear it."""

        def meet() -> None:
            try:
                sock.settimeout(HANDSHAKE_S)
                caller = wire.welcome(sock, self._secret)
            except (OSError, RunError, ValueError):
                sock.close()
                return
            tune(sock)
            self._pump.hear(LinkIn(sock, caller, self.mailbox, self._deliver))

        threading.Thread(target=meet, name="culm-welcome", daemon=True).start()

    def _deliver(self, caller: Address, body: bytes | None) -> None:
        """From whichever thread reads: a letter, or the news that a connection broke."""
        self._unseen.append(Letter(caller, body))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(lambda: self._letters.put_nowait(self._unseen.popleft()))

    def _lost(self, peer: Address) -> None:
        self._deliver(peer, None)


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
