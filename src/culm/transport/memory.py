"""The simulated side: endpoints in one process, with the order of everything decided by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from culm.transport.base import Address, Key, Letter, Mailbox, Tensors


class MemoryNetwork:
    """All endpoints of a simulated cluster. `latency` is the virtual seconds that a frame takes."""

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.endpoints: dict[Address, MemoryTransport] = {}
        self._sums: dict[tuple[Key, int], _Sum] = {}

    def endpoint(self, address: Address) -> MemoryTransport:
        """A new endpoint; an address is used once."""
        assert address not in self.endpoints
        made = self.endpoints[address] = MemoryTransport(self, address)
        return made

    def drop(self, address: Address) -> None:
        """The endpoint is gone: everyone who knew it sees the connection break."""
        gone = self.endpoints.pop(address, None)
        if gone is None:
            return
        for known in sorted(gone.known):
            peer = self.endpoints.get(known)
            if peer is not None:
                self._later(peer.letters.put_nowait, Letter(address, None))

    def deliver_frame(self, to: Address, key: Key, tensors: Tensors) -> None:
        target = self.endpoints.get(to)
        if target is not None:
            self._later(target.mailbox.put, key, tensors)

    def deliver_letter(self, to: Address, letter: Letter) -> None:
        target = self.endpoints.get(to)
        if target is not None:
            self._later(target.letters.put_nowait, letter)

    def _later(self, action: object, *arguments: object) -> None:
        asyncio.get_running_loop().call_later(self.latency, action, *arguments)  # type: ignore[arg-type]

    async def add(self, key: Key, turn: int, members: Sequence[Address], me: Address, tensor: Tensor) -> None:
        """Contribute to a sum; it is made in the order of the members when all have contributed."""
        pending = self._sums.setdefault((key, turn), _Sum(asyncio.get_running_loop().create_future()))
        pending.parts[me] = tensor
        if len(pending.parts) == len(members):
            del self._sums[key, turn]
            total = sum((pending.parts[m] for m in members[1:]), start=pending.parts[members[0]].clone())
            self._later(_finish, pending.done, total)
        tensor.copy_(await asyncio.shield(pending.done))


def _finish(done: asyncio.Future[Tensor], total: Tensor) -> None:
    if not done.done():
        done.set_result(total)


class _Sum:
    def __init__(self, done: asyncio.Future[Tensor]) -> None:
        self.done = done
        self.parts: dict[Address, Tensor] = {}


class MemoryTransport:
    """One endpoint of a MemoryNetwork. Tensors are cloned: what a receiver does to them, the sender does not see."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self.network = network
        self.address = address
        self.mailbox = Mailbox()
        self.letters: asyncio.Queue[Letter] = asyncio.Queue()
        self.known: set[Address] = set()

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        self._meet(to)
        copies = tuple(_copied(t) for t in tensors)
        self.network.deliver_frame(to, key, copies)

    def post(self, to: Address, body: bytes) -> None:
        self._meet(to)
        self.network.deliver_letter(to, Letter(self.address, body))

    def _meet(self, to: Address) -> None:
        self.known.add(to)
        peer = self.network.endpoints.get(to)
        if peer is not None:
            peer.known.add(self.address)

    def arrived(self, key: Key) -> Tensors | None:
        return self.mailbox.take(key)

    async def receive(self, key: Key) -> Tensors:
        return await self.mailbox.get(key)

    async def letter(self) -> Letter:
        return await self.letters.get()

    def close_epochs(self, below: int) -> None:
        self.mailbox.close_epochs(below)

    def group(self, key: Key, members: Sequence[Address]) -> MemoryGroup:
        return MemoryGroup(self.network, key, tuple(members), self.address)

    async def close(self) -> None:
        self.network.drop(self.address)


class MemoryGroup:
    """Adds in the order of the members."""

    def __init__(self, network: MemoryNetwork, key: Key, members: tuple[Address, ...], me: Address) -> None:
        self._network, self._key, self._members, self._me = network, key, members, me
        self._turn = 0

    async def join(self) -> None:
        await asyncio.sleep(0)

    async def all_reduce(self, tensor: Tensor) -> None:
        turn, self._turn = self._turn, self._turn + 1
        await self._network.add(self._key, turn, self._members, self._me, tensor)

    def close(self) -> None:
        pass


def _copied(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    with torch.no_grad():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
