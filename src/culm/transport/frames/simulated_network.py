"""The simulated network: endpoints in one process. The event loop decides the order of all deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from culm.transport.collectives.simulated_group import PendingReduce, SimulatedGroup
from culm.transport.frames.frame_codec import checksum, tensor_bytes, to_gapless_cpu
from culm.transport.frames.mailbox import Mailbox
from culm.transport.interface import (
    Address,
    ControlMessage,
    DamageHandler,
    FrameKey,
    FrameMemory,
    Tensors,
    ignore_damage,
)

if TYPE_CHECKING:
    from culm.device.device_sums import DeviceSums
    from culm.device.shared_chunks import SharedHostMemory


class Delivery(NamedTuple):
    """Something on its way from one endpoint to another. "sum": a contribution to a reduce; "loss": a lost
    connection."""

    source: Address
    target: Address
    kind: Literal["frame", "message", "sum", "loss"]
    size: int = 0
    """Bytes."""


class DeliveryTiming(NamedTuple):
    """When a delivery arrives."""

    seconds: float
    in_order: bool = True
    """Whether it arrives after everything that was sent earlier over the same connection."""


DeliveryRule: TypeAlias = Callable[[Delivery], DeliveryTiming | None]
"""When a delivery arrives; None: it never does, and neither end is notified."""


class SimulatedNetwork:
    """All endpoints of a simulated cluster, in virtual time. `latency`: seconds from sending to arrival.

    Deliveries arrive in the order of sending, over the whole network. Where `delivery_rule` gives other times, the
    order holds at least per connection.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        usual = DeliveryTiming(latency)
        self.delivery_rule: DeliveryRule = lambda _: usual
        self.damages_frame: Callable[[Delivery], bool] | None = None
        """Whether a bit of a frame flips on its way; None: never. Frames are checked only where this is set."""
        self.endpoints: dict[Address, SimulatedTransport] = {}
        self._last_arrival: dict[tuple[Address, Address], float] = {}
        self._silenced_addresses: set[Address] = set()
        self._pending_reduces: dict[tuple[FrameKey, int], PendingReduce] = {}
        self._context = Context()  # deliveries belong to no node: they arrive even if the sender is paused

    def endpoint(self, address: Address) -> SimulatedTransport:
        """A new endpoint. Its address must not be in use."""
        assert address not in self.endpoints
        endpoint = self.endpoints[address] = SimulatedTransport(self, address)
        return endpoint

    def remove_endpoint(self, address: Address, *, machine_lost: bool = False) -> None:
        """Remove an endpoint: all connected peers see the connection break.

        Deliveries it had sent still arrive, because the kernel of its machine sends them. `machine_lost`: the machine
        is lost, too, and they do not arrive.
        """
        lost = self.endpoints.pop(address, None)
        if lost is None:
            return
        for peer in sorted(lost.connected_peers):
            if peer in self.endpoints:
                self.endpoints[peer].report_lost(address)
        self._fail_reduces(address, lambda member: member != address)
        if machine_lost:
            self._silenced_addresses.add(address)

    def break_connection(self, one: Address, other: Address) -> None:
        """Break the connection between two endpoints. Both see it once; the next send opens a new connection."""
        for here, there in ((one, other), (other, one)):
            if here in self.endpoints and there in self.endpoints[here].connected_peers:
                self.endpoints[here].report_lost(there)
            self._fail_reduces(there, here.__eq__)

    def reconnect(self, address: Address, members: Iterable[Address]) -> None:
        """Open new connections to those members that exist."""
        if address in self.endpoints:
            self.endpoints[address].lost_peers.difference_update(
                member for member in members if member in self.endpoints
            )

    def _fail_reduces(self, lost: Address, is_affected: Callable[[Address], bool]) -> None:
        for pending in self._pending_reduces.values():
            if lost in pending.members:
                for member in filter(is_affected, pending.members):
                    self.deliver(Delivery(lost, member, "loss"), pending.fail, member, lost)

    def deliver(self, delivery: Delivery, arrive: Callable[..., None], *arguments: Any) -> bool:
        """Call `arrive` when a delivery arrives; False: it never will."""
        timing = self.delivery_rule(delivery)
        if timing is not None:
            self.schedule_delivery(delivery, timing, arrive, *arguments)
        return timing is not None

    def schedule_delivery(
        self, delivery: Delivery, timing: DeliveryTiming, arrive: Callable[..., None], *arguments: Any
    ) -> None:
        """Call `arrive` at the time that `timing` gives."""
        loop = asyncio.get_running_loop()
        when = loop.time() + timing.seconds
        if timing.in_order:
            link = (delivery.source, delivery.target)
            when = self._last_arrival[link] = max(when, self._last_arrival.get(link, when))
        loop.call_at(when, self._run_delivery, delivery, arrive, arguments, context=self._context)

    def _run_delivery(self, delivery: Delivery, arrive: Callable[..., None], arguments: Sequence[Any]) -> None:
        if delivery.kind == "loss" or delivery.source not in self._silenced_addresses:
            arrive(*arguments)

    def describe_waits(self) -> list[str]:
        """What endpoints wait for, as sentences: frames that have not arrived, and reduces that are not complete."""
        waits = [
            f"{address} waits for {key.name} of step {key.step} in epoch {key.epoch}"
            for address, endpoint in sorted(self.endpoints.items())
            for key in endpoint.mailbox.awaited_keys()
        ]
        for (key, sequence), pending in sorted(self._pending_reduces.items(), key=lambda item: item[0]):
            contributors = [member for member in pending.contributions if member not in pending.finished_members]
            missing = [member for member in pending.members if member not in pending.contributions]
            if contributors and missing:
                reduce = f"sum {sequence} of {key.name} of step {key.step} in epoch {key.epoch}"
                waits.append(f"{', '.join(contributors)} waits for {', '.join(missing)} in {reduce}")
        return waits

    async def all_reduce(
        self, key: FrameKey, sequence: int, members: Sequence[Address], own_address: Address, tensors: Sequence[Tensor]
    ) -> None:
        """Contribute tensors to consecutive reduces, of which the first has number `sequence`, and replace them by the
        sums.

        A sum is endpoint in the order of the members once all have contributed. Members get it at different times: one
        may have it while the reduce of another fails.
        """
        names = [(key, sequence + number) for number in range(len(tensors))]
        sums = [
            self._contribute(*each, members, own_address, tensor) for each, tensor in zip(names, tensors, strict=True)
        ]
        try:
            for tensor, total in zip(
                tensors, await asyncio.gather(*(s.results[own_address] for s in sums)), strict=True
            ):
                tensor.copy_(total)
        finally:
            for name, pending in zip(names, sums, strict=True):
                pending.finished_members.add(own_address)
                if len(pending.finished_members) == len(members):
                    self._pending_reduces.pop(name, None)

    def _contribute(
        self, key: FrameKey, sequence: int, members: Sequence[Address], own_address: Address, tensor: Tensor
    ) -> PendingReduce:
        pending = self._pending_reduces.get((key, sequence))
        if pending is None:
            pending = self._pending_reduces[key, sequence] = PendingReduce(members)
        pending.contributions[own_address] = tensor
        lost = [member for member in members if not self._is_connected(own_address, member)]
        if lost:
            pending.fail(own_address, lost[0])
        elif len(pending.contributions) == len(members):
            self._deliver_sum(pending)
        return pending

    def _is_connected(self, own_address: Address, member: Address) -> bool:
        return member in self.endpoints and (
            own_address not in self.endpoints or member not in self.endpoints[own_address].lost_peers
        )

    def _deliver_sum(self, pending: PendingReduce) -> None:
        """Deliver the sum to each member when the slowest contribution reaches it; never, if one does not reach it."""
        total = pending.total()
        for member in pending.members:
            deliveries = [Delivery(other, member, "sum", total.nbytes) for other in pending.members if other != member]
            timings = [
                (timing, delivery) for delivery in deliveries if (timing := self.delivery_rule(delivery)) is not None
            ]
            if len(timings) == len(deliveries):
                timing, delivery = max(timings)
                self.schedule_delivery(delivery, timing, pending.set_result, member, total)


class SimulatedTransport:
    """One endpoint of a SimulatedNetwork. Tensors are cloned: a receiver cannot change those of the sender."""

    def __init__(self, network: SimulatedNetwork, address: Address) -> None:
        self.network = network
        self.address = address
        self.mailbox = Mailbox()
        self.messages: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self._damage_handler: DamageHandler = ignore_damage
        self.connected_peers: set[Address] = set()
        self.lost_peers: set[Address] = set()

    def send(self, to: Address, key: FrameKey, tensors: Sequence[Tensor | None]) -> None:
        copies = tuple([_copy_as_received(t) for t in tensors])
        peer = self._connect(to)
        if peer is not None:
            size = sum([t.nbytes for t in copies if t is not None])
            delivery = Delivery(self.address, to, "frame", size)
            if self.network.damages_frame is None:
                self.network.deliver(delivery, peer.mailbox.put, key, copies)
            else:
                arriving = _flip_bit(copies) if self.network.damages_frame(delivery) else copies
                self.network.deliver(delivery, peer.receive_checked, self, key, copies, arriving)

    def receive_checked(self, sender: SimulatedTransport, key: FrameKey, sent: Tensors, arrived: Tensors) -> None:
        """Deliver a frame that arrived, or report the damage and get it again."""
        if _checksum(arrived) == _checksum(sent):
            self.mailbox.put(key, arrived)
        else:
            self._damage_handler(sender.address, key)
            sender.send(self.address, key, sent)

    def set_frame_memory(self, allocate: FrameMemory, shared: SharedHostMemory | None = None) -> None:
        """Frames are copied in memory: they arrive in ordinary memory."""

    def release_sent_frames(self) -> None:
        pass

    def set_damage_handler(self, handler: DamageHandler) -> None:
        self._damage_handler = handler

    def send_message(self, to: Address, body: bytes) -> None:
        peer = self._connect(to)
        if peer is not None:
            message = ControlMessage(self.address, body)
            self.network.deliver(Delivery(self.address, to, "message", len(body)), peer.messages.put_nowait, message)

    def _connect(self, to: Address) -> SimulatedTransport | None:
        """The peer endpoint, over a new connection if the last one broke; None if either endpoint was removed."""
        if self.network.endpoints.get(self.address) is not self:
            return None
        peer = self.network.endpoints.get(to)
        if peer is None:
            self.report_lost(to)
            return None
        if to in self.lost_peers or to not in self.connected_peers or self.address not in peer.connected_peers:
            self.lost_peers.discard(to)
            self.connected_peers.add(to)
            peer.connected_peers.add(self.address)
        return peer

    def report_lost(self, peer: Address) -> None:
        """Report a lost connection to the worker, once, unless the delivery rule drops the report."""
        if peer not in self.lost_peers and self.network.deliver(
            Delivery(peer, self.address, "loss"), self.messages.put_nowait, ControlMessage(peer, None)
        ):
            self.lost_peers.add(peer)

    def set_computing(self, computing: bool) -> None:
        pass

    def try_receive(self, key: FrameKey) -> Tensors | None:
        return self.mailbox.take(key)

    async def receive(self, key: FrameKey) -> Tensors:
        return await self.mailbox.get(key)

    async def receive_message(self) -> ControlMessage:
        return await self.messages.get()

    def close_epochs(self, below: int) -> dict[FrameKey, Tensors]:
        return self.mailbox.close_epochs(below)

    def group(self, key: FrameKey, members: Sequence[Address], sums: DeviceSums | None = None) -> SimulatedGroup:
        return SimulatedGroup(self.network, key, tuple(members), self.address, sums)

    async def close(self) -> None:
        self.network.remove_endpoint(self.address)


def _copy_as_received(tensor: Tensor | None) -> Tensor | None:
    """A copy as a socket transport would deliver it."""
    if tensor is None:
        return None
    return to_gapless_cpu(tensor).clone().requires_grad_(tensor.requires_grad)


def _checksum(tensors: Tensors) -> int:
    return checksum(tensor_bytes(t.detach()) for t in tensors if t is not None and t.numel())


def _flip_bit(tensors: Tensors) -> Tensors:
    """Copies with one bit of the first tensor flipped; a frame without bytes stays as it is."""
    copies = tuple(_copy_as_received(t) for t in tensors)
    for tensor in copies:
        if tensor is not None and tensor.numel():
            data = tensor_bytes(tensor.detach())
            data[len(data) // 2] ^= 1
            break
    return copies
