"""What a device offers for sums with other devices, and whether some workers can use it together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from culm.errors import DeviceFailed

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
    kept: tuple[int, int] = (0, 0)
    """Of its communicator from an earlier epoch: the epoch in which it was created, and the number of sums since.
    Zeros: it has none."""


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


class KeptCommunicator(NamedTuple):
    """A communicator whose group was left while no sum was under way."""

    communicator: DeviceCommunicator
    identity: tuple[int, int]
    """See NcclSupport.kept. Members whose communicators have the same identity can go on using them."""


class KeptCommunicators:
    """The communicators of one worker that wait for the next epoch, by name and members of their group: to connect
    takes up to a second."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], KeptCommunicator] = {}

    def keep(self, group: tuple[object, ...], kept: KeptCommunicator) -> None:
        """Keep a communicator for the next epoch."""
        before = self._kept.pop(group, None)
        self._kept[group] = kept
        if before is not None:
            abort_in_thread(before.communicator)

    def take(self, group: tuple[object, ...]) -> KeptCommunicator | None:
        """Take the communicator of a group; None: there is none."""
        return self._kept.pop(group, None)

    def abort_rest(self) -> None:
        """Leave the groups that the epoch has not asked for."""
        while self._kept:
            abort_in_thread(self._kept.popitem()[1].communicator)


_aborting: list[threading.Thread] = []
"""Threads in which groups are left. A new group is created after them."""


def abort_in_thread(communicator: DeviceCommunicator, written: Sequence[Sequence[Tensor]] = ()) -> None:
    """Leave a group in a thread. `written`: what it may write into until then."""
    held = list(written)

    def abort() -> None:
        with contextlib.suppress(RuntimeError, DeviceFailed):  # the device reports it when it is drained
            communicator.abort()
        held.clear()  # only now nobody writes into them
        _aborting.remove(thread)

    thread = threading.Thread(target=abort, name="culm-nccl-end", daemon=True)
    _aborting.append(thread)
    thread.start()


def wait_for_aborts(seconds: float) -> None:
    """Wait until all groups are left that are being left, for up to `seconds` each."""
    for thread in list(_aborting):
        thread.join(seconds)


class DeviceSums(Protocol):
    """The sums that a device can make together with others."""

    @property
    def kept(self) -> KeptCommunicators:
        """Communicators of the epoch before."""

    def support(self) -> NcclSupport:
        """What this worker tells the others."""

    def connect(self, rendezvous: Rendezvous) -> DeviceCommunicator:
        """A communicator with the other members. Called in a thread. Raises RuntimeError."""


class NoDeviceSums:
    """Of a worker that computes on a CPU, beside others that may not."""

    def __init__(self) -> None:
        self.kept = KeptCommunicators()

    def support(self) -> NcclSupport:
        return NcclSupport(_ON_CPU)

    def connect(self, rendezvous: Rendezvous) -> DeviceCommunicator:
        del rendezvous
        raise RuntimeError("there is no GPU")
