"""The simulated side: endpoints in one process, with the order of everything decided by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from culm.errors import EpochClosed, NodeLost
from culm.transport.base import Address, Key, Letter, Mailbox, Tensors
from culm.transport.wire import in_one_piece


class Parcel(NamedTuple):
    """Something on its way from one endpoint to another. A sum comes from each of the others; a loss is an end."""

    source: Address
    target: Address
    kind: Literal["frame", "letter", "sum", "loss"]
    size: int = 0
    """Bytes."""


class Passage(NamedTuple):
    """How a parcel travels."""

    seconds: float
    in_order: bool = True
    """Not before what was sent earlier over the same connection."""


Way: TypeAlias = Callable[[Parcel], Passage | None]
"""How a parcel travels; None: it never arrives, and nobody is told."""


class MemoryNetwork:
    """All endpoints of a simulated cluster, in virtual time. `latency` is the seconds that anything takes to arrive.

    What is sent first arrives first, over the whole network; where `way` says otherwise, at least over a connection.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        usual = Passage(latency)
        self.way: Way = lambda _: usual
        self.endpoints: dict[Address, MemoryTransport] = {}
        self._latest: dict[tuple[Address, Address], float] = {}
        self._silenced: set[Address] = set()
        self._sums: dict[tuple[Key, int], _Sum] = {}
        self._context = Context()  # what travels belongs to no node: it arrives though its sender may stand still

    def endpoint(self, address: Address) -> MemoryTransport:
        """A new endpoint; an address is used once."""
        assert address not in self.endpoints
        made = self.endpoints[address] = MemoryTransport(self, address)
        return made

    def drop(self, address: Address, *, silence: bool = False) -> None:
        """The endpoint is gone: everyone who knew it sees the connection break, and nothing of it is heard again.

        What it had sent still arrives, as the kernel of its machine sees to it; with `silence` the machine is gone too.
        """
        gone = self.endpoints.pop(address, None)
        if gone is None:
            return
        for known in sorted(gone.known):
            if known in self.endpoints:
                self.endpoints[known].lose(address)
        self._break_sums(address, lambda member: member != address)
        if silence:
            self._silenced.add(address)

    def sever(self, one: Address, other: Address) -> None:
        """The connection between two endpoints breaks: both see it, once. Whoever sends next makes a new one."""
        for here, there in ((one, other), (other, one)):
            if here in self.endpoints and there in self.endpoints[here].known:
                self.endpoints[here].lose(there)
            self._break_sums(there, here.__eq__)

    def reconnect(self, address: Address, members: Iterable[Address]) -> None:
        """A new connection to each of these that is there."""
        if address in self.endpoints:
            self.endpoints[address].lost.difference_update(member for member in members if member in self.endpoints)

    def _break_sums(self, gone: Address, concerned: Callable[[Address], bool]) -> None:
        for pending in self._sums.values():
            if gone in pending.members:
                for member in filter(concerned, pending.members):
                    self.carry(Parcel(gone, member, "loss"), pending.break_off, member, gone)

    def carry(self, parcel: Parcel, arrive: Callable[..., None], *arguments: Any) -> bool:
        """Do something when a parcel arrives; False: it never will."""
        passage = self.way(parcel)
        if passage is not None:
            self.depart(parcel, passage, arrive, *arguments)
        return passage is not None

    def depart(self, parcel: Parcel, passage: Passage, arrive: Callable[..., None], *arguments: Any) -> None:
        """Do something when a parcel with this passage arrives."""
        loop = asyncio.get_running_loop()
        when = loop.time() + passage.seconds
        if passage.in_order:
            link = (parcel.source, parcel.target)
            when = self._latest[link] = max(when, self._latest.get(link, when))
        loop.call_at(when, self._arrive, parcel, arrive, arguments, context=self._context)

    def _arrive(self, parcel: Parcel, arrive: Callable[..., None], arguments: Sequence[Any]) -> None:
        if parcel.kind == "loss" or parcel.source not in self._silenced:
            arrive(*arguments)

    def waits(self) -> list[str]:
        """What endpoints wait for, in words: frames that have not come, and sums that are not complete."""
        found = [
            f"{address} waits for {key.name} of step {key.step} in epoch {key.epoch}"
            for address, endpoint in sorted(self.endpoints.items())
            for key in endpoint.mailbox.awaited()
        ]
        for (key, turn), pending in sorted(self._sums.items(), key=lambda item: item[0]):
            here = [member for member in pending.parts if member not in pending.left]
            missing = [member for member in pending.members if member not in pending.parts]
            if here and missing:
                told = f"sum {turn} of {key.name} of step {key.step} in epoch {key.epoch}"
                found.append(f"{', '.join(here)} waits for {', '.join(missing)} in {told}")
        return found

    async def add(
        self, key: Key, turn: int, members: Sequence[Address], me: Address, tensors: Sequence[Tensor]
    ) -> None:
        """Contribute to sums, the first of which has this turn. Each is made in the order of the members when all have
        contributed, and each gets it in its own time: one may have it while another sees it break off."""
        names = [(key, turn + number) for number in range(len(tensors))]
        sums = [self._contribute(*each, members, me, tensor) for each, tensor in zip(names, tensors, strict=True)]
        try:
            for tensor, total in zip(tensors, await asyncio.gather(*(s.arrived[me] for s in sums)), strict=True):
                tensor.copy_(total)
        finally:
            for name, pending in zip(names, sums, strict=True):
                pending.left.add(me)
                if len(pending.left) == len(members):
                    self._sums.pop(name, None)

    def _contribute(self, key: Key, turn: int, members: Sequence[Address], me: Address, tensor: Tensor) -> _Sum:
        pending = self._sums.get((key, turn))
        if pending is None:
            pending = self._sums[key, turn] = _Sum(members)
        pending.parts[me] = tensor
        gone = [member for member in members if not self._hears(me, member)]
        if gone:
            pending.break_off(me, gone[0])
        elif len(pending.parts) == len(members):
            self._hand_out(pending)
        return pending

    def _hears(self, me: Address, member: Address) -> bool:
        return member in self.endpoints and (me not in self.endpoints or member not in self.endpoints[me].lost)

    def _hand_out(self, pending: _Sum) -> None:
        """A member has the sum when the slowest of the others has been heard, and never if one of them can not be."""
        total = pending.total()
        for member in pending.members:
            parcels = [Parcel(other, member, "sum", total.nbytes) for other in pending.members if other != member]
            passages = [(passage, parcel) for parcel in parcels if (passage := self.way(parcel)) is not None]
            if len(passages) == len(parcels):
                passage, parcel = max(passages)
                self.depart(parcel, passage, pending.arrive, member, total)


class _Sum:
    """One collective under way."""

    def __init__(self, members: Sequence[Address]) -> None:
        self.members = members
        self.parts: dict[Address, Tensor] = {}
        self.left: set[Address] = set()
        self.arrived = {member: asyncio.get_running_loop().create_future() for member in members}

    def total(self) -> Tensor:
        first, *others = (self.parts[member] for member in self.members)
        return sum(others, start=first.clone())

    def arrive(self, member: Address, total: Tensor) -> None:
        if not self.arrived[member].done():
            self.arrived[member].set_result(total)

    def break_off(self, member: Address, gone: Address) -> None:
        done = self.arrived[member]
        if not done.done():
            done.set_exception(NodeLost(f"a sum over {len(self.members)} workers broke off: {gone} is gone"))
            done.exception()  # members that were cancelled do not ask any more


class MemoryTransport:
    """One endpoint of a MemoryNetwork. Tensors are cloned: what a receiver does to them, the sender does not see."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self.network = network
        self.address = address
        self.mailbox = Mailbox()
        self.letters: asyncio.Queue[Letter] = asyncio.Queue()
        self.known: set[Address] = set()
        self.lost: set[Address] = set()

    def send(self, to: Address, key: Key, tensors: Sequence[Tensor | None]) -> None:
        copies = tuple(_copied(t) for t in tensors)
        peer = self._meet(to)
        if peer is not None:
            size = sum(t.nbytes for t in copies if t is not None)
            self.network.carry(Parcel(self.address, to, "frame", size), peer.mailbox.put, key, copies)

    def post(self, to: Address, body: bytes) -> None:
        peer = self._meet(to)
        if peer is not None:
            letter = Letter(self.address, body)
            self.network.carry(Parcel(self.address, to, "letter", len(body)), peer.letters.put_nowait, letter)

    def _meet(self, to: Address) -> MemoryTransport | None:
        """The other end, over a new connection if the last one broke; None where one of the two is gone."""
        if self.network.endpoints.get(self.address) is not self:
            return None
        peer = self.network.endpoints.get(to)
        if peer is None:
            self.lose(to)
            return None
        self.lost.discard(to)
        self.known.add(to)
        peer.known.add(self.address)
        return peer

    def lose(self, peer: Address) -> None:
        """The connection broke: said once, if the news gets through at all."""
        if peer not in self.lost and self.network.carry(
            Parcel(peer, self.address, "loss"), self.letters.put_nowait, Letter(peer, None)
        ):
            self.lost.add(peer)

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
        """Over connections of its own: one that broke before is no obstacle."""
        self._network.reconnect(self._me, self._members)
        await asyncio.sleep(0)

    async def all_reduce(self, *tensors: Tensor) -> None:
        if self._left:
            raise EpochClosed("the group was left")
        turn, self._turn = self._turn, self._turn + len(tensors)
        if len(self._members) > 1:
            await self._network.add(self._key, turn, self._members, self._me, tensors)

    def close(self) -> None:
        self._left = True


def _copied(tensor: Tensor | None) -> Tensor | None:
    """What would come out of a socket."""
    if tensor is None:
        return None
    return in_one_piece(tensor).clone().requires_grad_(tensor.requires_grad)
