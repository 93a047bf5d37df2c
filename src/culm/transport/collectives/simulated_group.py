"""Simulated collectives: sums over members in one process, delivered in virtual time by the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from culm.device.simulated_streams import SimulatedSums
from culm.errors import EpochClosed, NodeLost
from culm.transport.interface import Address, FrameKey

if TYPE_CHECKING:
    from culm.device.device_sums import DeviceSums
    from culm.transport.frames.simulated_network import SimulatedNetwork


class PendingReduce:
    """One all-reduce under way: the tensors contributed so far, and a future per member for the result."""

    def __init__(self, members: Sequence[Address]) -> None:
        self.members = members
        self.contributions: dict[Address, Tensor] = {}
        self.finished_members: set[Address] = set()
        """Members that have got the result, or given up."""
        self.results = {member: asyncio.get_running_loop().create_future() for member in members}

    def total(self) -> Tensor:
        """The sum of all contributions, in the order of the members."""
        first, *others = (self.contributions[member] for member in self.members)
        return sum(others, start=first.clone())

    def set_result(self, member: Address, total: Tensor) -> None:
        """Deliver the sum to a member, unless its reduce has failed."""
        if not self.results[member].done():
            self.results[member].set_result(total)

    def fail(self, member: Address, lost: Address) -> None:
        """Let the reduce of one member fail with NodeLost."""
        result = self.results[member]
        if not result.done():
            result.set_exception(NodeLost(f"a sum over {len(self.members)} workers broke off: {lost} is gone"))
            result.exception()  # a cancelled member never reads it: mark it as retrieved


class SimulatedGroup:
    """A group whose sums are made in the order of the members."""

    library = "simulated"
    fallback_reason = ""
    is_connecting = False

    def __init__(
        self,
        network: SimulatedNetwork,
        key: FrameKey,
        members: tuple[Address, ...],
        own_address: Address,
        sums: DeviceSums | None = None,
    ) -> None:
        """`sums`: of a simulated device, on which the sums are made."""
        self._network, self._key, self._members, self._own_address = network, key, members, own_address
        self._compute = sums.compute if isinstance(sums, SimulatedSums) else None
        self.on_device = self._compute is not None
        self._sequence = 0
        self._closed = False

    async def join(self) -> None:
        """Connect to the members over new connections: one that broke before does not matter."""
        self._network.reconnect(self._own_address, self._members)
        await asyncio.sleep(0)

    async def all_reduce(self, *tensors: Tensor) -> None:
        if self._closed:
            raise EpochClosed("the group was left")
        sequence, self._sequence = self._sequence, self._sequence + len(tensors)
        if len(self._members) > 1:
            if self._compute is not None:  # a sum begins when the device has computed its terms
                await self._compute.record().wait()
            await self._network.all_reduce(self._key, sequence, self._members, self._own_address, tensors)

    def close(self) -> None:
        self._closed = True
