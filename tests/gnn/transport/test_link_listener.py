"""The listener: strangers on it delay no dialler that knows the token, and do not keep a process from exiting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests.gnn.silent_connections import open_files_allowed
from tests.transport.transport_variants import hello_bytes

from culm.errors import RunError
from culm.gnn.transport import link_listener
from culm.gnn.transport import tensor_link as links
from culm.gnn.transport.link_listener import LinkListener
from culm.transport.frames.handshake import FrameSocket

TOKEN = "the right one"
PROMPT_S = 3.0
"""Well below the handshake's 10 s, with room for a loaded machine."""
MANY = 1500


class Accepted:
    """A listener, and the names and sockets that it handed over."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sockets: list[FrameSocket] = []
        self.listener = LinkListener(TOKEN, self._handle_connection)

    def _handle_connection(self, name: str, sock: FrameSocket) -> None:
        self.names.append(name)
        self.sockets.append(sock)


@contextlib.contextmanager
def strangers(port: int, count: int, first_bytes: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send these bytes and then nothing."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            connections[-1].sendall(first_bytes)
        yield connections


async def dial(accepted: Accepted, name: str) -> None:
    """Connect with the token and wait until the listener has handed the connection over."""
    link = await links.connect_link(accepted.listener.address, TOKEN, name, lambda *_: None, lambda _: None)
    async with asyncio.timeout(PROMPT_S):
        while name not in accepted.names:
            await asyncio.sleep(0.005)
    link.close()


def run_within(seconds: float, main: Callable[[], Awaitable[None]]) -> None:
    """Run to the end, including the end of the event loop and of its default thread pool."""
    started_at = time.monotonic()

    async def run() -> None:
        await main()

    asyncio.run(run())
    assert time.monotonic() - started_at < seconds


async def wait_for_rejections(listener: LinkListener, count: int) -> None:
    async with asyncio.timeout(PROMPT_S):
        while listener.rejected_connections < count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("length", [0, 3, 16, 99, 1000])
def test_connections_that_stop_halfway_delay_neither_a_dialler_nor_the_exit(length: int) -> None:
    """After nothing, after a few bytes, within the names, and before the proof."""

    async def main() -> None:
        accepted = Accepted()
        with strangers(accepted.listener.port, 40, hello_bytes(accepted.listener.address, "me")[:length]):
            await dial(accepted, "me")
            assert not accepted.listener.rejected_connections
            accepted.listener.close()
        assert accepted.names == ["me"]

    run_within(PROMPT_S, main)


@pytest.mark.parametrize(
    "first_bytes",
    [b"\xff" * 4096, b"GET / HTTP/1.1\r\n" * 40, hello_bytes("127.0.0.1:1")],
    ids=["all ones", "http", "hello to another address"],
)
def test_garbage_is_rejected_and_counted_at_once(first_bytes: bytes) -> None:
    async def main() -> None:
        accepted = Accepted()
        with strangers(accepted.listener.port, 20, first_bytes):
            await wait_for_rejections(accepted.listener, 20)
            await dial(accepted, "me")
        assert accepted.listener.rejected_connections == 20
        accepted.listener.close()

    run_within(PROMPT_S, main)


def test_a_connection_that_ends_during_the_handshake_is_rejected_and_counted() -> None:
    async def main() -> None:
        accepted = Accepted()
        with strangers(accepted.listener.port, 3, b"half"):
            pass
        await wait_for_rejections(accepted.listener, 3)
        accepted.listener.close()
        assert not accepted.names

    run_within(PROMPT_S, main)


def test_a_silent_connection_is_dropped_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_listener, "HANDSHAKE_S", 0.05)

    async def main() -> None:
        accepted = Accepted()
        with strangers(accepted.listener.port, 5) as connections:
            await wait_for_rejections(accepted.listener, 5)
            assert connections[0].recv(1) == b""
        accepted.listener.close()

    run_within(PROMPT_S, main)


def test_silent_connections_in_any_number_delay_neither_a_dialler_nor_the_exit() -> None:
    async def main() -> None:
        accepted = Accepted()
        with strangers(accepted.listener.port, MANY):
            await dial(accepted, "me")
            await wait_for_rejections(accepted.listener, MANY - link_listener.MAX_PENDING_HANDSHAKES)
            await dial(accepted, "another")
            accepted.listener.close()

    with open_files_allowed(2 * MANY + 200):
        run_within(2 * PROMPT_S, main)


def test_beyond_the_cap_the_oldest_connection_that_has_sent_no_name_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_listener, "MAX_PENDING_HANDSHAKES", 3)

    async def main() -> None:
        accepted = Accepted()
        port = accepted.listener.port
        with (
            strangers(port, 1, hello_bytes(accepted.listener.address, "me")) as challenged,
            strangers(port, 2) as silent,
        ):
            while len(accepted.listener._pending) < 3 or not any(h.challenged for h in accepted.listener._pending):
                await asyncio.sleep(0.005)
            with strangers(port, 1) as newest:
                await wait_for_rejections(accepted.listener, 1)
                assert silent[0].recv(1) == b""
                for connection in (*silent[1:], *newest):
                    connection.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        connection.recv(1)
                assert len(challenged[0].recv(100)) == 96
                accepted.listener.close()
                assert accepted.listener.rejected_connections == 1

    run_within(PROMPT_S, main)


def test_a_dialler_that_was_dropped_during_the_handshake_dials_again() -> None:
    async def main() -> None:
        accepted = Accepted()
        start, dropped = accepted.listener._start_handshake, 0

        def drop_twice(sock: socket.socket) -> None:
            nonlocal dropped
            start(sock)
            if dropped < 2:
                dropped += 1
                accepted.listener._drop_oldest()

        accepted.listener._start_handshake = drop_twice  # type: ignore[method-assign]
        await dial(accepted, "me")
        assert dropped == accepted.listener.rejected_connections == 2
        accepted.listener.close()

    run_within(PROMPT_S, main)


def test_a_dialler_of_a_process_that_has_ended_fails_at_once() -> None:
    async def main() -> None:
        accepted = Accepted()
        accepted.listener.close()
        with pytest.raises(RunError, match="does not answer"):
            await links.connect_link(accepted.listener.address, TOKEN, "me", lambda *_: None, lambda _: None)

    run_within(PROMPT_S, main)


def test_the_listener_survives_a_lack_of_file_descriptors() -> None:
    class ListeningSocket:
        """Has no descriptor for the first connection that it accepts."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock, self.failures = sock, 0
            self.fileno, self.close = sock.fileno, sock.close

        def accept(self) -> tuple[socket.socket, object]:
            if not self.failures:
                self.failures += 1
                raise OSError(errno.EMFILE, "too many open files")
            return self._sock.accept()

    async def main() -> None:
        accepted = Accepted()
        with strangers(accepted.listener.port, 1):
            while not accepted.listener._pending:
                await asyncio.sleep(0.005)
            full = ListeningSocket(accepted.listener._sock)
            accepted.listener._sock = full  # type: ignore[assignment]
            await dial(accepted, "me")
            assert full.failures == accepted.listener.rejected_connections == 1
            accepted.listener.close()

    run_within(PROMPT_S, main)
