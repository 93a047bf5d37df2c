"""The listener of servers and of the worker pool: authenticates diallers before they get a TensorLink.

Handshakes run in the event loop without blocking it and without a thread. An unauthenticated connection costs one file
descriptor: at most `MAX_PENDING_HANDSHAKES` are open, an old one is dropped for a new one, and each is dropped after
`HANDSHAKE_S`. So strangers can neither delay a run nor keep its process from exiting.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from culm.errors import RunError
from culm.transport.frames.connections import HANDSHAKE_S
from culm.transport.frames.encryption_policy import encrypts_socket
from culm.transport.frames.handshake import FrameSocket, HandshakeResult, listener_steps

MAX_PENDING_HANDSHAKES = 256
"""More connections than a run's processes open at the same time, fewer than a process may have open files."""
_BACKLOG = 4096
"""Connections that wait in the kernel while the event loop computes. The kernel caps it at net.core.somaxconn."""
_ACCEPTS_PER_CALL = 64
"""Connections accepted before the event loop handles other sockets again."""
_ACCEPT_PAUSE_S = 0.1
"""Pause after the process has run out of file descriptors."""


class LinkListener:
    """Accepts connections. `on_connection` gets the dialler's name and socket after the dialler has proved the token;
    other connections are closed and counted. It is called from the event loop, never after `close`."""

    def __init__(self, token: str, on_connection: Callable[[str, FrameSocket], None], host: str = "127.0.0.1") -> None:
        self._secret, self._on_connection = token.encode(), on_connection
        # The machine may be reachable under an address that none of its interfaces has.
        bound = host if host.startswith("127.") else ""
        self._sock = socket.create_server((bound, 0), backlog=_BACKLOG)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self.rejected_connections = 0
        """Number of diallers that could not prove the token."""
        self._pending: dict[_PendingHandshake, asyncio.TimerHandle] = {}
        """Unauthenticated connections, oldest first."""
        self._resume_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._start_accepting()

    def close(self) -> None:
        """Close the listening socket and all unauthenticated connections at once."""
        if self._sock.fileno() < 0:
            return
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for handshake in list(self._pending):
            self._remove(handshake)
            handshake.close()

    def _start_accepting(self) -> None:
        self._resume_timer = None
        self._loop.add_reader(self._sock.fileno(), self._accept_connections)

    def _accept_connections(self) -> None:
        for _ in range(_ACCEPTS_PER_CALL):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # closed by the dialler before it was accepted
                continue
            except OSError:  # out of file descriptors or memory
                self._pause_accepting()
                return
            self._start_handshake(sock)

    def _pause_accepting(self) -> None:
        """Free the descriptor of the oldest unauthenticated connection and accept again a little later. The listening
        socket stays readable, so accepting at once would keep the event loop busy."""
        self._drop_oldest()
        self._loop.remove_reader(self._sock.fileno())
        self._resume_timer = self._loop.call_later(_ACCEPT_PAUSE_S, self._start_accepting)

    def _start_handshake(self, sock: socket.socket) -> None:
        if len(self._pending) >= MAX_PENDING_HANDSHAKES:
            self._drop_oldest()
        sock.setblocking(False)
        try:
            handshake = _PendingHandshake(sock, self._secret, self.address)
        except OSError:  # closed by the dialler already
            sock.close()
            return
        self._pending[handshake] = self._loop.call_later(HANDSHAKE_S, self._reject, handshake)
        self._loop.add_reader(sock.fileno(), self._advance, handshake)

    def _drop_oldest(self) -> None:
        """Reject the oldest unauthenticated connection, preferably one that has not sent a name yet: a dialler that has
        got its challenge may already use the connection."""
        oldest = next((h for h in self._pending if not h.challenged), next(iter(self._pending), None))
        if oldest is not None:
            self._reject(oldest)

    def _advance(self, handshake: _PendingHandshake) -> None:
        """Read from an unauthenticated connection, and hand it over or reject it once its handshake has ended."""
        try:
            result = handshake.advance()
        except (OSError, RunError, ValueError):
            self._reject(handshake)
            return
        if result is not None:
            self._remove(handshake)
            self._on_connection(result.peer, result.wrap(handshake.sock))

    def _reject(self, handshake: _PendingHandshake) -> None:
        self.rejected_connections += 1
        self._remove(handshake)
        handshake.close()

    def _remove(self, handshake: _PendingHandshake) -> None:
        self._pending.pop(handshake).cancel()
        self._loop.remove_reader(handshake.sock.fileno())


class _PendingHandshake:
    """The listening end of one handshake, without blocking."""

    def __init__(self, sock: socket.socket, secret: bytes, own_address: str) -> None:
        self.sock = sock
        self.challenged = False
        """Whether the dialler has sent its name and got a challenge."""
        self._received = b""
        self._steps = listener_steps(self._send, secret, own_address, encrypt=encrypts_socket("auto", sock))
        self._expected_bytes = next(self._steps)

    def close(self) -> None:
        self._steps.close()
        self.sock.close()

    def advance(self) -> HandshakeResult | None:
        """Read what has arrived. Returns the result after the dialler has proved the secret, None before.

        Reads no byte beyond the handshake: those that follow belong to the link. Raises RunError for a wrong proof,
        OSError for a lost connection, and ValueError for a name that is not UTF-8.
        """
        try:
            while True:
                if len(self._received) < self._expected_bytes:
                    more = self.sock.recv(self._expected_bytes - len(self._received))
                    if not more:
                        raise ConnectionError("closed during the handshake")
                    self._received += more
                    continue
                received, self._received = self._received, b""
                self._expected_bytes = self._steps.send(received)
        except BlockingIOError:
            return None
        except StopIteration as end:
            result: HandshakeResult = end.value
            return result

    def _send(self, data: bytes) -> None:
        """Send a few bytes. They always fit into the send buffer of a new connection."""
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            raise ConnectionError("the connection accepts no bytes")
        self.challenged = True
