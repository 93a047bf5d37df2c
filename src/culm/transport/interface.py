"""The interface between workers: frames of tensors, control messages, and groups that sum tensors.

A frame is addressed by a key (epoch, step, name). It is received in the background and waits in the receiver's mailbox
until the executor asks for it. A control message is a byte string; messages of one sender arrive in order. Nothing here
blocks a thread: sending queues, waiting is awaiting, and closing an epoch wakes every coroutine that waits for a frame
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.device_sums import DeviceSums
    from culm.device.shared_chunks import SharedHostMemory

Address: TypeAlias = str
Tensors: TypeAlias = "tuple[Tensor | None, ...]"
DamageHandler: TypeAlias = "Callable[[Address, FrameKey | None], None]"
"""Called on the event loop when a frame of this sender arrived damaged. It has been requested again; None: the damage
was outside of a payload, and the connection breaks."""


FrameMemory: TypeAlias = "Callable[[list[Tensor]], list[Tensor] | None]"
"""Called in any thread with tensors without data (on the device "meta"). Returns uninitialised tensors like them in
host memory, or None if ordinary memory is good enough."""


class FrameKey(NamedTuple):
    """Identifies a frame; unique for its receiver."""

    epoch: int
    step: int
    name: str


class ControlMessage(NamedTuple):
    """A control message. `body` None: the connection from `sender` was lost, which is a suspicion and no proof."""

    sender: Address
    body: bytes | None


def ignore_damage(sender: Address, key: FrameKey | None) -> None:
    """The damage handler of an endpoint that reports nothing."""


class Group(Protocol):
    """Workers that sum tensors together. All members call `all_reduce` in the same order."""

    @property
    def library(self) -> str:
        """What makes the sums, such as gloo. Known when the group was joined, like the two properties below."""

    @property
    def on_device(self) -> bool:
        """Whether tensors are summed on the devices of the members; otherwise in host memory."""

    @property
    def fallback_reason(self) -> str:
        """Why they are not summed on the devices, although that was asked for; empty: they are, or it was not."""

    @property
    def is_connecting(self) -> bool:
        """Whether something slow of bounded duration is under way in `join`: the worker does not hang."""

    async def join(self) -> None:
        """Connect to the other members; returns when all have joined."""

    async def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor (a copy made for this) by the sum over the group. All of them are reduced at once.

        After a failure their contents are undefined. Raises NodeLost when the reduce broke off (a suspicion: a member
        may be lost), and EpochClosed when this member has closed the group itself.
        """

    def close(self) -> None:
        """Leave the group. Reduces under way are abandoned."""


class FrameSource(Protocol):
    """Where frames are received from: a transport or, while a node leaves, a hand-off (culm.runtime.handoff)."""

    def try_receive(self, key: FrameKey) -> Tensors | None:
        """Take a frame that has arrived; None: it has not. Never waits."""

    async def receive(self, key: FrameKey) -> Tensors:
        """Wait for a frame and take it. Raises EpochClosed when its epoch is closed first."""


class Transport(FrameSource, Protocol):
    """One endpoint: over sockets, or simulated in memory. Data on a connection that breaks is lost. The loss is
    reported once, and the next send opens a new connection."""

    address: Address

    def send(self, to: Address, key: FrameKey, tensors: Sequence[Tensor | None]) -> None:
        """Queue a frame. The tensors must not change until it has arrived (senders keep what they send)."""

    def send_message(self, to: Address, body: bytes) -> None:
        """Queue a control message."""

    def set_computing(self, computing: bool) -> None:
        """Between set_computing(True) and set_computing(False) the worker computes and calls `try_receive` often: no
        other thread needs to read small frames for it. Has no effect after `set_frame_memory`."""

    def set_frame_memory(self, allocate: FrameMemory, shared: SharedHostMemory | None = None) -> None:
        """Receive frames in memory that `allocate` returns, which a device can reach quickly. From then on `receive`
        does not poll: what a device has completed is sent by the event loop. `shared`: the memory of the device that
        processes of this machine can map, so that nothing is copied on the way to them."""

    def release_sent_frames(self) -> None:
        """Drop the sent frames that are kept in case that they arrived damaged: their memory is needed."""

    def set_damage_handler(self, handler: DamageHandler) -> None:
        """Call this when a frame arrived damaged."""

    async def receive_message(self) -> ControlMessage:
        """Wait for the next control message."""

    def close_epochs(self, below: int) -> dict[FrameKey, Tensors]:
        """Close every epoch below a number: waiting coroutines get EpochClosed, and no frame of it is delivered any
        more. Returns the frames that had arrived and were not taken."""

    def group(self, key: FrameKey, members: Sequence[Address], sums: DeviceSums | None = None) -> Group:
        """The group of these members, of which this endpoint is one. `sums`: what the device of this worker offers, to
        sum on the devices where all members can; None: sum in host memory. All members pass the same of the two."""

    async def close(self) -> None:
        """Send what is queued, then close every connection."""
