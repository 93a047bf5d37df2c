"""What a device offers for sums with other devices, and whether some workers can use it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.streams import DeviceEvent
    from culm.transport.collectives.member_store import Rendezvous

REFUSED_NCCL = (2, 28, 3), (2, 28, 8)
"""First and last version that may hang or fail after a group was aborted."""
_ON_CPU = "a worker computes on the CPU"
NO_GPUS = "all workers compute on the CPU"


class NcclSupport(msgspec.Struct, frozen=True):
    """What a worker tells the others of a group before they use NCCL."""

    unavailable: str = ""
    """Why it cannot use NCCL; empty: it can."""
    version: tuple[int, ...] = ()
    gpu: str = ""
    """Identifies its GPU among those of all machines."""
    host_id: str = ""
    """Its own NCCL_HOSTID. NCCL refuses two workers on one GPU unless they seem to be on different hosts."""


def find_obstacle(members: Sequence[NcclSupport]) -> str:
    """Why these workers cannot use NCCL together; empty: they can."""
    if all(member.unavailable == _ON_CPU for member in members):
        return NO_GPUS
    for rank, member in enumerate(members):
        if member.unavailable:
            return member.unavailable
        if REFUSED_NCCL[0] <= member.version[:3] <= REFUSED_NCCL[1]:
            return f"NCCL {_dotted(member.version)} may hang after a loss: install 2.28.9 or newer"
        for other in members[:rank]:
            if other.version != member.version:
                return f"workers have NCCL {_dotted(other.version)} and {_dotted(member.version)}"
            if other.gpu == member.gpu and (other.host_id == member.host_id or not member.host_id):
                return "two workers use one GPU: give each its own NCCL_HOSTID"
    return ""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


class DeviceCommunicator(Protocol):
    """A group of devices."""

    def make_first_sum(self, size: int) -> None:
        """Connect to the `size` members, and check a sum with them. Called in a thread. Raises RuntimeError."""

    def launch(self, tensors: Sequence[Tensor]) -> DeviceEvent:
        """Queue the sums, in place, behind what is queued on the compute stream. Returns an event after them, in a
        stream that nothing else waits for. Raises RuntimeError."""

    def find_error(self) -> str:
        """What is wrong with the group; empty: nothing is known. Never waits."""

    def abort(self) -> None:
        """Break off all sums and leave the group. Takes a while; called in a thread."""


class DeviceSums(Protocol):
    """The sums that a device can make together with others."""

    def support(self) -> NcclSupport:
        """What this worker tells the others."""

    def connect(self, rendezvous: Rendezvous) -> DeviceCommunicator:
        """A communicator with the other members. Called in a thread. Raises RuntimeError."""


class NoDeviceSums:
    """Of a worker that computes on a CPU, beside others that may not."""

    def support(self) -> NcclSupport:
        return NcclSupport(_ON_CPU)

    def connect(self, rendezvous: Rendezvous) -> DeviceCommunicator:
        del rendezvous
        raise RuntimeError("there is no GPU")
