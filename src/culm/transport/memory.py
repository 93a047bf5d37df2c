"""The simulated side: endpoints in one process, with the order of everything decided by the event loop."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from culm.errors import EpochClosed, NodeLost
from culm.transport.base import Address, Key, Letter, Mailbox, Tensors
from culm.transport.wire import in_one_piece


class MemoryNetwork:
    """All endpoints of a simulated cluster. `latency` is the virtual seconds that anything takes to arrive.

    What is sent first arrives first, over the whole network.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.endpoints: dict[Address, MemoryTransport] = {}
        self._way: collections.deque[Callable[[], None]] = collections.deque()
        self._sums: dict[tuple[Key, int], _Sum] = {}

    def endpoint(self, address: Address) -> MemoryTransport:
        """A new endpoint; an address is used once."""
        assert address not in self.endpoints
        made = self.endpoints[address] = MemoryTransport(self, address)
        return made

    def drop(self, address: Address) -> None:
        """The endpoint is gone: everyone who knew it sees the connection break, and nothing of it is heard again."""
        gone = self.endpoints.pop(address, None)
        if gone is None:
            return
        for known in sorted(gone.known):
            if known in self.endpoints:
                self.endpoints[known].lose(address)
        for pending in self._sums.values():
            if address in pending.members:
                self.later(pending.break_off, address)

    def later(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something after the latency. Timers of one moment have no order of their own: the queue gives them one."""
        self._way.append(lambda: action(*arguments))
        asyncio.get_running_loop().call_later(self.latency, self._arrive)

    def _arrive(self) -> None:
        self._way.popleft()()

    async def add(self, key: Key, turn: int, members: Sequence[Address], me: Address, tensor: Tensor) -> None:
        """Contribute to a sum; it is made in the order of the members when all have contributed."""
        pending = self._sums.setdefault((key, turn), _Sum(members))
        pending.parts[me] = tensor
        gone = [member for member in members if member not in self.endpoints]
        if gone:
            pending.break_off(gone[0])
        elif len(pending.parts) == len(members):
            del self._sums[key, turn]
            self.later(pending.finish)
        tensor.copy_(await asyncio.shield(pending.done))


class _Sum:
    """One collective under way."""

    def __init__(self, members: Sequence[Address]) -> None:
        self.members = members
        self.parts: dict[Address, Tensor] = {}
        self.done: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        if not self.done.done():
            first, *others = (self.parts[member] for member in self.members)
            self.done.set_result(sum(others, start=first.clone()))

    def break_off(self, gone: Address) -> None:
        if not self.done.done():
            self.done.set_exception(NodeLost(f"a sum over {len(self.members)} workers broke off: {gone} is gone"))
            self.done.exception()  # members that were cancelled do not ask any more


class MemoryTransport:
    """One endpoint of a MemoryNetwork. Tensors are cloned: what a receiver does to them, the sender does not see."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self.network = network
        self.address = address
        self.mailbox = Mailbox()
        self.letters: asyncio.Queue[Letter] = asyncio.Queue()
        self.known: set[Address] = set()
        self._lost: set[Address] = set()

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        copies = tuple(_copied(t) for t in tensors)
        peer = self._meet(to)
        if peer is not None:
            self.network.later(peer.mailbox.put, key, copies)

    def post(self, to: Address, body: bytes) -> None:
        peer = self._meet(to)
        if peer is not None:
            self.network.later(peer.letters.put_nowait, Letter(self.address, body))

    def _meet(self, to: Address) -> MemoryTransport | None:
        """The other end; None where one of the two is gone."""
        if self.network.endpoints.get(self.address) is not self:
            return None
        peer = self.network.endpoints.get(to)
        if peer is None or to in self._lost:
            self.lose(to)
            return None
        self.known.add(to)
        peer.known.add(self.address)
        return peer

    def lose(self, peer: Address) -> None:
        """The connection broke: said once."""
        if peer not in self._lost:
            self._lost.add(peer)
            self.network.later(self.letters.put_nowait, Letter(peer, None))

    def busy(self, computing: bool) -> None:
        pass

    def arrived(self, key: Key) -> Tensors | None:
        return self.mailbox.take(key)

    async def receive(self, key: Key) -> Tensors:
        return await self.mailbox.get(key)

    async def letter(self) -> Letter:
        return await self.letters.get()

    def close_epochs(self, below: int) -> dict[Key, Tensors]:
        return self.mailbox.close_epochs(below)

    def group(self, key: Key, members: Sequence[Address]) -> MemoryGroup:
        return MemoryGroup(self.network, key, tuple(members), self.address)

    async def close(self) -> None:
        self.network.drop(self.address)


class MemoryGroup:
    """Adds in the order of the members."""

    def __init__(self, network: MemoryNetwork, key: Key, members: tuple[Address, ...], me: Address) -> None:
        self._network, self._key, self._members, self._me = network, key, members, me
        self._turn = 0
        self._left = False

    async def join(self) -> None:
        await asyncio.sleep(0)

    async def all_reduce(self, tensor: Tensor) -> None:
        if self._left:
            raise EpochClosed("the group was left")
        turn, self._turn = self._turn, self._turn + 1
        await self._network.add(self._key, turn, self._members, self._me, tensor)

    def close(self) -> None:
        self._left = True


def _copied(tensor: Tensor | None) -> Tensor | None:
    """What would come out of a socket."""
    if tensor is None:
        return None
    with torch.no_grad():
        return in_one_piece(tensor).clone().requires_grad_(tensor.requires_grad)
