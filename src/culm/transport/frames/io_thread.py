"""The I/O thread of a process: reads and writes sockets while the worker computes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator

from culm.transport.frames.connections import InboundConnection, OutboundConnection

_READ_AHEAD_BYTES = 128 << 10
"""While the worker computes, fewer bytes than this stay in the kernel until the worker reads them itself: reading a
small frame costs less than a switch of the interpreter between two threads."""
_MAX_MESSAGE_DELAY_S = 0.05
"""Longest delay of a control message while the worker computes."""


class SocketIOThread:
    """Reads and writes for a process, except for small amounts of data, which the worker reads itself.

    `inbound_epoll` watches the connections that are received on. `_main_epoll` watches all others and, unless a worker
    waits and reads for itself, `inbound_epoll`. Both are epoll sets: any thread may change them while another waits.
    """

    def __init__(self, listener: socket.socket, on_accept: Callable[[socket.socket], None]) -> None:
        self._listener, self._on_accept = listener, on_accept
        self._inbound: dict[int, InboundConnection] = {}
        self._outbound: dict[int, OutboundConnection] = {}
        self._computing = False
        self._waiting_count = 0
        self._stop_in, self._stop_out = socket.socketpair()
        self.inbound_epoll = select.epoll()
        self._main_epoll = select.epoll()
        for watched in (listener.fileno(), self._stop_in.fileno(), self.inbound_epoll.fileno()):
            self._main_epoll.register(watched, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="culm-io", daemon=True)
        self._thread.start()

    def add_inbound(self, connection: InboundConnection) -> None:
        """Start to read a connection. May be called from any thread."""
        connection.set_low_watermark(self._low_watermark())
        self._inbound[connection.fileno()] = connection
        self._register(self.inbound_epoll, connection, select.EPOLLIN)

    def add_outbound(self, connection: OutboundConnection, events: int) -> None:
        """Start to watch a connection that is sent on. May be called from any thread."""
        self._outbound[connection.fileno()] = connection
        self._register(self._main_epoll, connection, events)

    def _register(self, watcher: select.epoll, connection: InboundConnection | OutboundConnection, events: int) -> None:
        try:
            watcher.register(connection.fileno(), events)
        except ValueError:  # closed: the thread was stopped during the handshake
            connection.close_socket()

    def update_events(self, connection: OutboundConnection, events: int) -> None:
        """Change the events that a connection waits for. May be called from any thread."""
        # Not registered yet: it will be, with its events at that time. Closed: the thread was stopped.
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._main_epoll.modify(connection.fileno(), events)

    def set_computing(self, computing: bool) -> None:
        """While the worker computes, only amounts worth reading in advance are read at once. Called by the event
        loop."""
        self._computing = computing
        self._update_low_watermarks()

    @contextlib.contextmanager
    def reading_in_caller(self) -> Iterator[None]:
        """While this is open the event loop reads every byte itself, because the worker waits. Called by the event
        loop."""
        self._waiting_count += 1
        if self._waiting_count == 1:
            self._main_epoll.unregister(self.inbound_epoll.fileno())
            self._update_low_watermarks()
        try:
            yield
        finally:
            self._waiting_count -= 1
            if self._waiting_count == 0 and not self._main_epoll.closed:
                self._update_low_watermarks()
                self._main_epoll.register(self.inbound_epoll.fileno(), select.EPOLLIN)

    def _low_watermark(self) -> int:
        return _READ_AHEAD_BYTES if self._computing and not self._waiting_count else 1

    def _update_low_watermarks(self) -> None:
        for connection in list(self._inbound.values()):
            connection.set_low_watermark(self._low_watermark())

    def read_inbound(self) -> None:
        """Read all available data, in the calling thread."""
        for descriptor, connection in list(self._inbound.items()):
            if not connection.read_available():
                self._remove(descriptor)

    def _run(self) -> None:
        while True:
            events_by_descriptor = self._main_epoll.poll(_MAX_MESSAGE_DELAY_S)
            if not events_by_descriptor and self._computing:
                self.read_inbound()
            for descriptor, events in events_by_descriptor:
                if descriptor == self._stop_in.fileno():
                    return
                if descriptor == self.inbound_epoll.fileno():
                    self.read_inbound()
                elif descriptor == self._listener.fileno():
                    self._accept()
                elif (connection := self._outbound.get(descriptor)) is not None and not connection.handle_events(
                    events
                ):
                    self._remove(descriptor)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(True)
            self._on_accept(sock)

    def _remove(self, descriptor: int) -> None:
        for connections, watcher in ((self._inbound, self.inbound_epoll), (self._outbound, self._main_epoll)):
            connection = connections.pop(descriptor, None)
            if connection is not None:
                with contextlib.suppress(OSError):
                    watcher.unregister(descriptor)
                connection.close_socket()

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._stop_out.send(b"x")
        self._thread.join()
        for descriptor in [*self._inbound, *self._outbound]:
            self._remove(descriptor)
        self.inbound_epoll.close()
        self._main_epoll.close()
        for sock in (self._listener, self._stop_in, self._stop_out):
            sock.close()
