"""Links: raw tensors in both directions, and no connection without the token."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from culm.errors import RunError
from culm.gnn.launch.launcher import Ticket
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.link_listener import LinkListener
from culm.gnn.transport.tensor_link import TensorLink, connect_link
from culm.gnn.worker.worker_pool import WorkerPool
from culm.transport.frames.handshake import FrameSocket

TOKEN = "the right one"


class LinkPair:
    """A listener with one dialler, and the messages that both ends have received."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[messages.GnnMessage, list[Tensor]]] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.accepted: asyncio.Queue[TensorLink] = asyncio.Queue()
        self.listener = LinkListener(TOKEN, self._handle_connection)

    def _handle_connection(self, name: str, sock: FrameSocket) -> None:
        self.accepted.put_nowait(TensorLink(sock, name, self.handle_message, self.handle_lost))

    def handle_message(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        del link
        self.received.put_nowait((message, tensors))

    def handle_lost(self, link: TensorLink) -> None:
        self.lost.put_nowait(link.name)


def test_messages_and_tensors_of_any_size_arrive_in_order_and_unchanged() -> None:
    async def main() -> None:
        ends = LinkPair()
        link = await connect_link(ends.listener.address, TOKEN, "me", ends.handle_message, ends.handle_lost)
        other_end = await ends.accepted.get()
        sizes = [(0, 3), (1, 1), (7, 5), (300, 300), (1200, 900), (2, 2)]
        sent = [torch.randn(shape) for shape in sizes]
        for number, tensor in enumerate(sent):
            link.send(messages.ScatteredRows(number, 1, False, 2), [tensor, torch.arange(number)])
        for number, tensor in enumerate(sent):
            message, tensors = await ends.received.get()
            assert message == messages.ScatteredRows(number, 1, False, 2)
            assert torch.equal(tensors[0], tensor)
            assert torch.equal(tensors[1], torch.arange(number))
        other_end.send(messages.SlowestPass(4))
        assert (await ends.received.get())[0] == messages.SlowestPass(4)
        link.close()
        assert await ends.lost.get() == "me"
        ends.listener.close()

    asyncio.run(main())


def test_a_header_longer_than_the_receive_buffer_arrives() -> None:
    async def main() -> None:
        ends = LinkPair()
        link = await connect_link(ends.listener.address, TOKEN, "me", ends.handle_message, ends.handle_lost)
        await ends.accepted.get()
        long_message = messages.ServerGradient(1, 2, 3, 4, tuple(f"name-{i}" for i in range(20_000)))
        link.send(messages.SlowestPass(1))
        link.send(long_message)
        link.send(messages.SlowestPass(2))
        assert [(await ends.received.get())[0] for _ in range(3)] == [
            messages.SlowestPass(1),
            long_message,
            messages.SlowestPass(2),
        ]
        link.close()
        ends.listener.close()

    asyncio.run(main())


def test_a_dialler_without_the_token_is_rejected_and_counted() -> None:
    async def main() -> None:
        ends = LinkPair()
        with pytest.raises(RunError, match=r"does not answer|does not know"):
            await connect_link(ends.listener.address, "a wrong one", "me", ends.handle_message, ends.handle_lost)
        while not ends.listener.rejected_connections:
            await asyncio.sleep(0.01)
        assert ends.accepted.empty()
        ends.listener.close()

    asyncio.run(main())


def test_invalid_bytes_close_the_link() -> None:
    async def main() -> None:
        ends = LinkPair()
        link = await connect_link(ends.listener.address, TOKEN, "me", ends.handle_message, ends.handle_lost)
        await ends.accepted.get()
        link._sock.sendmsg([memoryview(b"\x05\x00\x00\x00hello")])
        assert await ends.lost.get() == "me"
        ends.listener.close()
        link.close()

    asyncio.run(main())


class NoLauncher:
    """Launches no workers and records the requests."""

    name = "none"

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.ticket: Ticket | None = None

    async def launch(self, ticket: Ticket, count: int) -> None:
        self.launched.append(count)
        self.ticket = ticket

    async def close(self) -> None:
        pass


def test_a_link_that_breaks_during_send_is_reported_afterwards() -> None:
    """So the caller may iterate over all links while it sends."""

    async def main() -> None:
        ends, links = LinkPair(), set[TensorLink]()
        with socket.create_server(("127.0.0.1", 0)) as server:
            for name in ("one", "another", "a third"):
                near_socket = socket.create_connection(server.getsockname())
                near_socket.setblocking(False)
                links.add(TensorLink(near_socket, name, ends.handle_message, links.discard))
                far_socket, _ = server.accept()
                far_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                far_socket.close()  # with a reset
        for link in links:
            link.send(messages.StopWorker())
            link.send(messages.StopWorker())
        assert len(links) == 3
        await asyncio.sleep(0)
        assert not links
        ends.listener.close()

    asyncio.run(main())


def test_the_pool_rejects_a_worker_of_another_run_and_replaces_lost_ones() -> None:
    async def main() -> None:
        launcher = NoLauncher()
        events: list[dict[str, Any]] = []
        pool = WorkerPool("run-2", TOKEN, launcher, 2, worker_seconds=9.0, on_event=lambda **e: events.append(e))
        maintaining = asyncio.create_task(pool.maintain_target_size())
        while launcher.ticket is None:
            await asyncio.sleep(0.01)
        assert launcher.launched == [2]
        address = f"{launcher.ticket.host}:{launcher.ticket.port}"
        ends = LinkPair()
        await connect_link(address, TOKEN, "worker w0 run-1", ends.handle_message, ends.handle_lost)
        assert await ends.lost.get() == address, "a worker of another run is disconnected"
        worker = await connect_link(address, TOKEN, "worker w1 run-2", ends.handle_message, ends.handle_lost)
        worker.send(messages.WorkerHeartbeat(123, "here"))
        while not events:
            await asyncio.sleep(0.01)
        assert len(pool) == 1
        assert pool.rejected_connections == 1
        assert events[0]["kind"] == "worker-up"
        worker.close()
        while len(launcher.launched) < 2:
            await asyncio.sleep(0.01)
        assert launcher.launched == [2, 1]
        assert pool.lost_count == 1
        maintaining.cancel()
        await pool.close()
        ends.listener.close()

    asyncio.run(main())
