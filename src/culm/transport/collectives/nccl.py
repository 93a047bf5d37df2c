"""Sums over a group of workers on their GPUs, with NCCL.

The members first tell each other what they have. If one of them cannot use NCCL with the others, all of them use Gloo,
on copies in host memory, and the group says why.

Whether a sum is complete is decided by an event in the stream of the group alone, and only as long as the group was not
aborted: torch's `Work.is_completed` is true after an error, too, and an abort completes the event of a sum that was
never made. No other stream waits for such an event, so that a member that has died blocks nothing but the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from culm.device.device_sums import (
    NO_GPUS,
    DeviceCommunicator,
    DeviceSums,
    KeptCommunicator,
    NcclSupport,
    abort_in_thread,
    find_obstacle,
    wait_for_aborts,
)
from culm.errors import DeviceFailed, EpochClosed, NodeLost
from culm.transport.collectives.gloo import GlooGroup, reduce_failed
from culm.transport.collectives.member_store import Rendezvous, retrieve_exception, run_in_daemon_thread
from culm.transport.interface import Address, FrameKey

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.streams import DeviceEvent
    from culm.transport.interface import Transport

_CONNECT_S = 60.0
"""A member has this long to connect: the first time, NCCL and its kernels are loaded."""
_LOOK_S = 0.5
"""Time between two looks for an error of the group, while a sum is awaited."""
_ABORT_S = 20.0
"""How long a new group waits for the end of those before it."""


class NcclGroup:
    """A group that sums on the GPUs of its members or, if one of them cannot, with Gloo."""

    def __init__(self, transport: Transport, key: FrameKey, members: Sequence[Address], sums: DeviceSums) -> None:
        self._transport, self._key, self._members, self._sums = transport, key, tuple(members), sums
        self._communicator: DeviceCommunicator | None = None
        self._gloo: GlooGroup | None = None
        self._under_way: list[tuple[DeviceEvent, tuple[Tensor, ...]]] = []
        """Sums that were launched, with the tensors that they write."""
        self._half_launched: list[tuple[Tensor, ...]] = []
        """Tensors of sums whose launch failed: those of some may be under way, others were not launched."""
        self._closed = False
        self._has_joined = False
        self._created_in, self._sum_count = key.epoch, 0
        """The epoch in which the communicator was created, and how many sums were launched on it since."""
        self.is_connecting = False
        self.fallback_reason = ""
        """Why Gloo is used; empty where no member has a GPU."""
        self.broken_off = 0
        """Sums that were not complete when the group was closed."""

    @property
    def on_device(self) -> bool:
        return self._gloo is None

    @property
    def library(self) -> str:
        return "nccl" if self._gloo is None else "gloo"

    async def join(self) -> None:
        if len(self._members) == 1:
            return
        rendezvous = Rendezvous(self._transport, self._key, self._members)
        obstacle = await rendezvous.run(self._connect(rendezvous))
        if obstacle:
            self.fallback_reason = "" if obstacle == NO_GPUS else obstacle
            key = self._key._replace(name=f"{self._key.name} gloo")
            self._gloo = GlooGroup(self._transport, key, self._members)
            await self._gloo.join()

    async def _connect(self, rendezvous: Rendezvous) -> str:
        """Connect, if all members can. Returns why Gloo has to be used, which is the same at all members."""
        kept = self._sums.kept.take(self._group_name)
        try:
            own = self._sums.support() if kept is None else replace(self._sums.support(), kept=kept.identity)
            answers = await rendezvous.exchange("support", msgspec.msgpack.encode(own))
            supports = [msgspec.msgpack.decode(each, type=NcclSupport) for each in answers]
            obstacle = find_obstacle(supports)
            if kept is not None and not obstacle and all(each.kept == kept.identity for each in supports):
                self._communicator, (self._created_in, self._sum_count) = kept.communicator, kept.identity
                self._has_joined, kept = True, None
                return ""
        finally:
            if kept is not None:
                abort_in_thread(kept.communicator)
        if obstacle:
            return obstacle
        failure = await self._try_to_connect(rendezvous)
        failures = [each.decode() for each in await rendezvous.exchange("failure", failure.encode())]
        failure = next(filter(None, failures), "")
        if failure:
            self._leave()
        self._has_joined = not failure
        return failure

    @property
    def _group_name(self) -> tuple[object, ...]:
        """What the same group has in common in all epochs."""
        return self._key.name, self._members

    async def _try_to_connect(self, rendezvous: Rendezvous) -> str:
        """Connect. Returns what went wrong, or an empty text."""
        self.is_connecting = True
        try:
            async with asyncio.timeout(_CONNECT_S):
                await run_in_daemon_thread(self._connect_in_thread, rendezvous)
        except TimeoutError:
            self._closed = True  # a thread that connects after all aborts at once
            return f"NCCL did not connect within {_CONNECT_S:g} s"
        except Exception as error:  # whatever it is, Gloo may work: other versions of torch raise other errors
            return f"NCCL did not connect: {error}"
        finally:
            self.is_connecting = False
        return ""

    def _connect_in_thread(self, rendezvous: Rendezvous) -> None:
        wait_for_aborts(_ABORT_S)
        communicator = self._sums.connect(rendezvous)
        if self._closed:
            communicator.abort()
            return
        self._communicator = communicator  # from now on `close` aborts it, also while it connects
        communicator.make_first_sum(rendezvous.size)

    async def all_reduce(self, *tensors: Tensor) -> None:
        if len(self._members) == 1:
            return
        if self._gloo is not None:
            await self._gloo.all_reduce(*tensors)
            return
        communicator = self._communicator
        if communicator is None or self._closed:
            raise EpochClosed("the group was left")
        try:
            event = communicator.launch(tensors)
        except RuntimeError as error:
            self._half_launched.append(tensors)
            raise reduce_failed(len(self._members), error) from None
        self._sum_count += 1
        entry = event, tensors
        self._under_way.append(entry)
        await self._wait_for(event, communicator)
        self._under_way.remove(entry)

    async def _wait_for(self, event: DeviceEvent, communicator: DeviceCommunicator) -> None:
        """Wait for the event of a sum. Raises EpochClosed if the group was left before, NodeLost after an error."""
        waiting = asyncio.ensure_future(event.wait())
        waiting.add_done_callback(retrieve_exception)
        try:
            done: set[asyncio.Future[None]] = set()
            while not done:
                done, _ = await asyncio.wait((waiting,), timeout=_LOOK_S)
                if self._closed:  # the abort may have completed the event
                    raise EpochClosed("the group was left")
                error = communicator.find_error()
                if error:
                    raise NodeLost(f"a sum over {len(self._members)} workers broke off: {error}")
            waiting.result()
        finally:
            waiting.cancel()

    def close(self) -> None:
        """Leave the group. If no sum is under way, its communicator is kept for the next epoch, which uses it if all
        members have kept theirs after the same sums. Otherwise events are read before the abort, which completes them
        all."""
        if self._gloo is not None:
            self._gloo.close()
        if self._closed:
            return
        communicator, is_idle = self._communicator, not self._under_way and not self._half_launched
        if communicator is not None and self._has_joined and is_idle and not communicator.find_error():
            self._closed, self._communicator = True, None
            kept = KeptCommunicator(communicator, (self._created_in, self._sum_count))
            self._sums.kept.keep(self._group_name, kept)
        else:
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        communicator, self._communicator = self._communicator, None
        written = [tensors for event, tensors in self._under_way if not _is_complete(event)]
        self.broken_off = len(written)
        written += self._half_launched
        self._under_way.clear()
        self._half_launched.clear()
        if communicator is not None:
            abort_in_thread(communicator, written)


def _is_complete(event: DeviceEvent) -> bool:
    try:
        return event.is_complete()
    except DeviceFailed:
        return False
