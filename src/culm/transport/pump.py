"""The thread that moves bytes while the worker computes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator

from culm.transport.links import LinkIn, LinkOut

_AHEAD = 128 << 10
"""While the worker computes, less than this may wait in the kernel until it asks: to fetch a small frame costs less
than to take turns with the worker for the interpreter."""
_GLANCE_S = 0.05
"""How long a letter may wait for a worker that computes."""


class Pump:
    """Reads and writes for a process, unless what there is to read is so little that the worker had better do it.

    `inner` watches the connections that we hear, `outer` everything else and, unless a worker waits and reads for
    itself, `inner`. Both are epoll sets of the kernel, which any thread may change while another waits on them.
    """

    def __init__(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._listener, self._accepted = listener, accepted
        self._heard: dict[int, LinkIn] = {}
        self._served: dict[int, LinkOut] = {}
        self._computing = False
        self._waits = 0
        self._stop_in, self._stop_out = socket.socketpair()
        self.inner = select.epoll()
        self._outer = select.epoll()
        for watched in (listener.fileno(), self._stop_in.fileno(), self.inner.fileno()):
            self._outer.register(watched, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="culm-pump", daemon=True)
        self._thread.start()

    def hear(self, link: LinkIn) -> None:
        """From any thread: begin to read a connection."""
        link.wake_at(self._enough())
        self._heard[link.fileno()] = link
        self._watch(self.inner, link, select.EPOLLIN)

    def serve(self, link: LinkOut, events: int) -> None:
        """From any thread: watch a connection that we send on."""
        self._served[link.fileno()] = link
        self._watch(self._outer, link, events)

    def _watch(self, watcher: select.epoll, link: LinkIn | LinkOut, events: int) -> None:
        try:
            watcher.register(link.fileno(), events)
        except ValueError:  # closed: hands were being shaken when the pump was stopped
            link.shut()

    def change(self, link: LinkOut, events: int) -> None:
        """From any thread: what a link waits for has changed."""
        # Not served yet: it will be, with its interest of then. Stopped: nobody waits any more.
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._outer.modify(link.fileno(), events)

    def busy(self, computing: bool) -> None:
        """From the loop's thread: while it computes, only what is worth reading ahead is seen at once."""
        self._computing = computing
        self._attend()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """From the loop's thread: while it waits it sees every byte, and reads for itself."""
        self._waits += 1
        if self._waits == 1:
            self._outer.unregister(self.inner.fileno())
            self._attend()
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and not self._outer.closed:
                self._attend()
                self._outer.register(self.inner.fileno(), select.EPOLLIN)

    def _enough(self) -> int:
        return _AHEAD if self._computing and not self._waits else 1

    def _attend(self) -> None:
        for link in list(self._heard.values()):
            link.wake_at(self._enough())

    def read(self) -> None:
        """Read what there is, in whichever thread asks."""
        for descriptor, link in list(self._heard.items()):
            if not link.ready():
                self._forget(descriptor)

    def _run(self) -> None:
        while True:
            happened = self._outer.poll(_GLANCE_S)
            if not happened and self._computing:
                self.read()
            for descriptor, events in happened:
                if descriptor == self._stop_in.fileno():
                    return
                if descriptor == self.inner.fileno():
                    self.read()
                elif descriptor == self._listener.fileno():
                    self._accept()
                elif (link := self._served.get(descriptor)) is not None and not link.ready(events):
                    self._forget(descriptor)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(True)
            self._accepted(sock)

    def _forget(self, descriptor: int) -> None:
        for links, watcher in ((self._heard, self.inner), (self._served, self._outer)):
            link = links.pop(descriptor, None)
            if link is not None:
                with contextlib.suppress(OSError):
                    watcher.unregister(descriptor)
                link.shut()

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._stop_out.send(b"x")
        self._thread.join()
        for descriptor in [*self._heard, *self._served]:
            self._forget(descriptor)
        self.inner.close()
        self._outer.close()
        for sock in (self._listener, self._stop_in, self._stop_out):
            sock.close()
