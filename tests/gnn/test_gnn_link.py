"""Links: raw tensors both ways, and nobody without the token."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from culm.errors import RunError
from culm.gnn import messages as say
from culm.gnn.desk import Desk
from culm.gnn.launch.base import Ticket
from culm.gnn.link import Link, Listener, dial

TOKEN = "the right one"


class Ends:
    """A listener with one caller, and what each end has heard."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[say.Message, list[Tensor]]] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.there: asyncio.Queue[Link] = asyncio.Queue()
        self.listener = Listener(TOKEN, self._accepted)

    def _accepted(self, name: str, sock: socket.socket) -> None:
        self.there.put_nowait(Link(sock, name, self.hear, self.lose))

    def hear(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        del link
        self.heard.put_nowait((message, tensors))

    def lose(self, link: Link) -> None:
        self.lost.put_nowait(link.name)


def test_messages_and_tensors_of_any_size_arrive_in_order_and_unchanged() -> None:
    async def main() -> None:
        ends = Ends()
        link = await dial(ends.listener.address, TOKEN, "me", ends.hear, ends.lose)
        far = await ends.there.get()
        sizes = [(0, 3), (1, 1), (7, 5), (300, 300), (1200, 900), (2, 2)]
        sent = [torch.randn(shape) for shape in sizes]
        for number, tensor in enumerate(sent):
            link.send(say.Rows(number, 1, False, 2), [tensor, torch.arange(number)])
        for number, tensor in enumerate(sent):
            message, tensors = await ends.heard.get()
            assert message == say.Rows(number, 1, False, 2)
            assert torch.equal(tensors[0], tensor)
            assert torch.equal(tensors[1], torch.arange(number))
        far.send(say.Slow(4))
        assert (await ends.heard.get())[0] == say.Slow(4)
        link.close()
        assert await ends.lost.get() == "me"
        ends.listener.close()

    asyncio.run(main())


def test_a_header_longer_than_the_stage_arrives() -> None:
    async def main() -> None:
        ends = Ends()
        link = await dial(ends.listener.address, TOKEN, "me", ends.hear, ends.lose)
        await ends.there.get()
        long = say.Gradient(1, 2, 3, 4, tuple(f"name-{i}" for i in range(20_000)))
        link.send(say.Slow(1))
        link.send(long)
        link.send(say.Slow(2))
        assert [(await ends.heard.get())[0] for _ in range(3)] == [say.Slow(1), long, say.Slow(2)]
        link.close()
        ends.listener.close()

    asyncio.run(main())


def test_a_caller_without_the_token_is_refused_and_counted() -> None:
    async def main() -> None:
        ends = Ends()
        with pytest.raises(RunError, match=r"does not answer|does not know"):
            await dial(ends.listener.address, "a wrong one", "me", ends.hear, ends.lose)
        while not ends.listener.refused:
            await asyncio.sleep(0.01)
        assert ends.there.empty()
        ends.listener.close()

    asyncio.run(main())


def test_bytes_that_are_no_message_end_the_link() -> None:
    async def main() -> None:
        ends = Ends()
        link = await dial(ends.listener.address, TOKEN, "me", ends.hear, ends.lose)
        await ends.there.get()
        link._sock.send(b"\x05\x00\x00\x00hello")
        assert await ends.lost.get() == "me"
        ends.listener.close()
        link.close()

    asyncio.run(main())


class NoLauncher:
    """Starts nobody, and remembers what was asked."""

    name = "none"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ticket: Ticket | None = None

    async def launch(self, ticket: Ticket, count: int) -> None:
        self.asked.append(count)
        self.ticket = ticket

    async def close(self) -> None:
        pass


def test_a_link_that_breaks_while_something_is_sent_is_lost_after_that() -> None:
    """Whoever sends to all that are there may so go through them."""

    async def main() -> None:
        ends, links = Ends(), set[Link]()
        with socket.create_server(("127.0.0.1", 0)) as server:
            for name in ("one", "another", "a third"):
                ours = socket.create_connection(server.getsockname())
                ours.setblocking(False)
                links.add(Link(ours, name, ends.hear, links.discard))
                theirs, _ = server.accept()
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                theirs.close()  # with a reset
        for link in links:
            link.send(say.Stop())
            link.send(say.Stop())
        assert len(links) == 3
        await asyncio.sleep(0)
        assert not links
        ends.listener.close()

    asyncio.run(main())


def test_the_desk_refuses_a_worker_of_another_run_and_replaces_those_that_are_lost() -> None:
    async def main() -> None:
        launcher = NoLauncher()
        events: list[dict[str, Any]] = []
        desk = Desk("run-2", TOKEN, launcher, 2, seconds=9.0, told=lambda **e: events.append(e))
        supplying = asyncio.create_task(desk.supply())
        while launcher.ticket is None:
            await asyncio.sleep(0.01)
        assert launcher.asked == [2]
        address = f"{launcher.ticket.host}:{launcher.ticket.port}"
        ends = Ends()
        await dial(address, TOKEN, "worker w0 run-1", ends.hear, ends.lose)
        assert await ends.lost.get() == address, "a worker of an old run is hung up on"
        good = await dial(address, TOKEN, "worker w1 run-2", ends.hear, ends.lose)
        good.send(say.Hello(123, "here"))
        while not events:
            await asyncio.sleep(0.01)
        assert len(desk) == 1
        assert desk.refused == 1
        assert events[0]["kind"] == "worker-up"
        good.close()
        while len(launcher.asked) < 2:
            await asyncio.sleep(0.01)
        assert launcher.asked == [2, 1]
        assert desk.lost == 1
        supplying.cancel()
        await desk.close()
        ends.listener.close()

    asyncio.run(main())
