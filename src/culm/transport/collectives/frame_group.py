"""Sums over a group of workers through frames of the transport, and therefore over encrypted connections.

A large tensor is cut into one share per member. Each member gets its share from all others, adds it up and sends the
sum back: every byte crosses the network twice, as in a ring. Small tensors are sent to all members at once, which takes
one trip instead of two. Terms are added in the order of the members, so that all members have the same bits in every
run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from culm.errors import EpochClosed, NodeLost
from culm.transport.collectives.member_store import retrieve_exception
from culm.transport.interface import Address, FrameKey

if TYPE_CHECKING:
    from culm.transport.interface import Tensors, Transport

_PIECE_BYTES = 1 << 20
"""Large tensors are summed in pieces of this size, so that the network and the additions overlap."""
_SMALL_BYTES = 64 << 10
"""A piece up to this size is sent to all members as a whole."""


class FrameGroup:
    """A group whose members exchange frames. `handle_lost_connection` makes it fail."""

    library = "frames"
    on_device = False
    is_connecting = False

    def __init__(
        self,
        transport: Transport,
        key: FrameKey,
        members: Sequence[Address],
        receive: Callable[[FrameKey], Awaitable[Tensors]],
        *,
        fallback_reason: str = "",
    ) -> None:
        """`receive` waits for a frame without polling: reduces run beside the computing."""
        self.fallback_reason = fallback_reason
        self._transport, self._key, self._members, self._receive = transport, key, tuple(members), receive
        self._rank = self._members.index(transport.address)
        self._others = [rank for rank in range(len(self._members)) if rank != self._rank]
        self._numbers = itertools.count()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def join(self) -> None:
        """Exchange a frame with each other member."""
        if self._others:
            await self._unless_failed(self._greet())

    async def _greet(self) -> None:
        self._send_to_others("joined", ())
        for rank in self._others:
            await self._receive_from(rank, "joined")

    async def all_reduce(self, *tensors: Tensor) -> None:
        if not self._others:
            return
        pieces = list(_pieces([tensor.view(-1) for tensor in tensors]))
        numbered = [(next(self._numbers), piece) for piece in pieces]
        await self._unless_failed(self._reduce_all(numbered))

    async def _reduce_all(self, numbered: Sequence[tuple[int, list[Tensor]]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, piece in numbered:
                tasks.create_task(self._reduce(number, piece))

    async def _reduce(self, number: int, piece: Sequence[Tensor]) -> None:
        """Sum the tensors of a piece in place."""
        terms = [part.cpu() for part in piece]
        if sum(part.nbytes for part in piece) <= _SMALL_BYTES:
            await self._sum_at_all(number, terms)
        else:
            await self._sum_shares(number, terms)
        for part, term in zip(piece, terms, strict=True):
            if part is not term:
                part.copy_(term)

    async def _sum_at_all(self, number: int, terms: Sequence[Tensor]) -> None:
        own = [term.clone() for term in terms]  # sent tensors must not change, and these will
        self._send_to_others(f"{number}", own)
        _copy_all(terms, await self._add_in_order(f"{number}", own))

    async def _sum_shares(self, number: int, terms: Sequence[Tensor]) -> None:
        """Add up the own share, and get the sums of the others. A share that was sent is overwritten when its sum
        arrives, so that its owner has had it."""
        shares = list(zip(*(term.tensor_split(len(self._members)) for term in terms), strict=True))
        for rank in self._others:
            self._send(rank, f"{number} share", shares[rank])
        totals = await self._add_in_order(f"{number} share", shares[self._rank])
        self._send_to_others(f"{number} sum", totals)
        _copy_all(shares[self._rank], totals)
        for rank in self._others:
            _copy_all(shares[rank], await self._receive_from(rank, f"{number} sum"))

    async def _add_in_order(self, name: str, own: Sequence[Tensor]) -> list[Tensor]:
        """The sums of the own tensors and those that each other member sends, in the order of the members."""
        totals: list[Tensor] = []
        for rank in range(len(self._members)):
            terms = own if rank == self._rank else await self._receive_from(rank, name)
            if rank == 0:
                totals = [term.clone() for term in own] if rank == self._rank else list(terms)
            else:
                for total, term in zip(totals, terms, strict=True):
                    total.add_(term)
        return totals

    def _send_to_others(self, name: str, tensors: Sequence[Tensor]) -> None:
        for rank in self._others:
            self._send(rank, name, tensors)

    def _send(self, rank: int, name: str, tensors: Sequence[Tensor]) -> None:
        self._transport.send(self._members[rank], self._frame_key(self._rank, name), tensors)

    async def _receive_from(self, rank: int, name: str) -> list[Tensor]:
        frame = await self._receive(self._frame_key(rank, name))
        return [tensor for tensor in frame if tensor is not None]

    def _frame_key(self, sender: int, name: str) -> FrameKey:
        return self._key._replace(name=f"{self._key.name} from {sender} {name}")

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it ends or the group fails."""
        if self._failure.done():
            work.close()
            self._failure.result()
        task = asyncio.ensure_future(work)
        task.add_done_callback(retrieve_exception)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failure.result()
            task.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            task.cancel()

    def handle_lost_connection(self, peer: Address) -> None:
        """Fail if the connection to a member was lost: frames may be lost with it. Called on the event loop."""
        if peer in self._members:
            self._fail(NodeLost(f"a sum over {len(self._members)} workers broke off: the connection to {peer} broke"))

    def close(self) -> None:
        self._fail(EpochClosed("the group was left"))

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # a group that is not used any more never reads it: mark it as retrieved


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in pieces of up to _PIECE_BYTES: cut if they are larger, together if they are small."""
    piece: list[Tensor] = []
    for tensor in tensors:
        for part in tensor.split(max(1, _PIECE_BYTES // tensor.element_size())):
            if piece and sum(t.nbytes for t in piece) + part.nbytes > _PIECE_BYTES:
                yield piece
                piece = []
            piece.append(part)
    if piece:
        yield piece


def _copy_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
