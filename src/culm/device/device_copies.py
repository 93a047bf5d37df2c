"""Copies of tensors between a device and slabs in host memory, beside the computation."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from culm.device.host_memory import usable_memory_bytes
from culm.device.slab_pool import CHUNK_BYTES, SlabPool, layout_of, slab_size
from culm.device.streams import COMPLETE, DeviceEvent, DeviceStream, DeviceStreams, HostStreams, open_streams
from culm.errors import DeviceFailed

if TYPE_CHECKING:
    from culm.device.device_sums import DeviceSums
    from culm.device.shared_chunks import SharedHostMemory
    from culm.device.slab_pool import Slab

Tensors: TypeAlias = tuple[Tensor | None, ...]
_NO_CAP = 1 << 62
_MAX_READER_S = 2.0
_OFF_LOADED_SHARE = 0.75
"""What is off-loaded may fill the slabs up to this part of their cap: what is sent and kept goes first."""
MIN_OFF_LOADED_BYTES = 64 << 10
"""Smaller tensors stay on the device: a copy of them costs more than their memory is worth."""


class HostCopy(NamedTuple):
    """A copy of tensors in host memory. It may be read once `event` is complete."""

    tensors: Tensors
    event: DeviceEvent
    computed: DeviceEvent = COMPLETE
    """Complete when the device has computed them."""
    slab: Slab | None = None
    """None: the tensors were in host memory already."""

    def reader_tensors(self) -> Tensors:
        """The same tensors for a reader, who acknowledges by dropping them."""
        return self.tensors if self.slab is None else self.slab.tensors(reader=True)

    @property
    def has_readers(self) -> bool:
        return self.slab is not None and self.slab.readers > 0


class DeviceCopies:
    """Copies tensors to the host and to the device. On a CPU it returns the tensors themselves.

    A copy holds its source and its target until it is complete, whatever its caller does.
    """

    def __init__(
        self,
        streams: DeviceStreams | None = None,
        cap: int = _NO_CAP,
        chunk_bytes: int = CHUNK_BYTES,
        min_off_loaded_bytes: int | None = None,
        workers: int = 1,
    ) -> None:
        """`cap`: bytes of host memory for slabs, see SlabPool, which asks for `chunk_bytes` at a time.
        `min_off_loaded_bytes`: smaller tensors stay on the device; default: MIN_OFF_LOADED_BYTES. `workers`: how many
        share the device."""
        self._workers = workers
        self.min_off_loaded_bytes = MIN_OFF_LOADED_BYTES if min_off_loaded_bytes is None else min_off_loaded_bytes
        self.streams = streams or HostStreams()
        self.is_synchronous, self.device = self.streams.is_synchronous, self.streams.device
        self.pool = SlabPool(self.streams.host_memory, cap, chunk_bytes)
        self._under_way: collections.deque[tuple[DeviceEvent, Any]] = collections.deque()
        """Copies with what they read and write, in the order of their launch."""
        self._waits_for_readers = True

    def to_host(self, tensors: Sequence[Tensor | None], *, later: bool = False) -> HostCopy:
        """Queue a copy of tensors of the device into a slab, after what is queued on the compute stream now. `later`:
        it is large, and other copies are more urgent."""
        if self.is_synchronous:
            return HostCopy(tuple(tensors), COMPLETE)
        self._release_completed()
        sources = tuple(None if each is None else _without_gaps(each) for each in tensors)
        return self._copy_to_slab(sources, self.streams.to_host_later if later else self.streams.to_host)

    def _copy_to_slab(self, sources: Tensors, stream: DeviceStream) -> HostCopy:
        slab = self.pool.take(sources)
        copies = slab.tensors()
        computed = self.streams.compute.record(timed=True)
        stream.wait_event(computed)
        for target, source in zip(copies, sources, strict=True):
            if target is not None and source is not None and source.numel():
                stream.copy(target.detach(), source)
        event = stream.record(timed=True)
        self._under_way.append((event, (copies, sources)))
        return HostCopy(copies, event, computed, slab)

    def off_load(self, tensors: Sequence[Tensor]) -> list[HostCopy]:
        """Queue copies to the host of tensors without gaps that are to leave the device, several to a slab. The caller
        drops the tensors at once; they are held until they are copied. See `missing_slabs`."""
        self._release_completed()
        groups = _groups(tensors)
        return [self._copy_to_slab(tuple(group), self.streams.to_host_later) for group in groups]

    def missing_slabs(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """The sizes of the slabs to allocate (`add_slabs`) before these tensors are off-loaded; None: the
        slabs are too close to their cap for that. A part of the slabs stays for outputs and sums."""
        sizes = [slab_size(layout_of(group)[1]) for group in _groups(tensors)]
        self._release_completed()
        if self.pool.lent_bytes + sum(sizes) > _OFF_LOADED_SHARE * self.pool.cap:
            return None
        return self.pool.missing_slabs(sizes)

    def add_slabs(self, sizes: Sequence[int]) -> None:
        """Allocate slabs that are missing. May be called from any thread."""
        self.pool.add_slabs(sizes)

    async def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors of the device to the host in one copy, and wait for it. On a CPU: the tensors themselves."""
        if self.is_synchronous or not tensors:
            return list(tensors)
        copy = self.to_host(tensors)
        await copy.event.wait()
        return [tensor for tensor in copy.tensors if tensor is not None]

    def to_device(self, tensors: Tensors) -> Tensors:
        """Queue a copy of host tensors to the device. What is queued on the compute stream from now on finds them."""
        if self.is_synchronous:
            return tensors
        self._release_completed()
        stream, compute = self.streams.to_device, self.streams.compute
        with stream.active():
            copies = tuple(None if each is None else self._copy_to_device(each) for each in tensors)
        event = stream.record()
        compute.wait_event(event)
        for copy in copies:
            if copy is not None:
                compute.reads(copy)
        self._under_way.append((event, (copies, tensors)))
        return copies

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        copy = self.streams.empty(source.shape, source.stride(), source.dtype)
        self.streams.to_device.copy(copy, source)
        return copy.requires_grad_(tensor.requires_grad)

    def load(self, move: Callable[[], Any], found: Callable[[Any], Sequence[Tensor]]) -> Any:
        """Call a function that moves data to the device, on the stream for such copies. `found` returns the tensors in
        its result."""
        if self.is_synchronous:
            return move()
        stream, compute = self.streams.to_device, self.streams.compute
        with stream.active():
            moved = move()
        event = stream.record()
        compute.wait_event(event)
        for tensor in found(moved):
            compute.reads(tensor)
        return moved

    @property
    def sums(self) -> DeviceSums:
        """What the device offers for sums with others."""
        return self.streams.sums

    @property
    def shared_memory(self) -> SharedHostMemory | None:
        """The host memory of the slabs, if other processes can map it."""
        return self.streams.shared_memory

    def has_room(self, size: int) -> bool:
        """Whether the device has memory for this many bytes, from each of its workers, beside everything that this one
        has held at a time so far."""
        return self.streams.free_bytes >= size * self._workers

    @property
    def peak_device_bytes(self) -> int:
        """The most memory of the device that tensors took at a time; 0 on a CPU."""
        return self.streams.peak_bytes

    @property
    def peak_slab_bytes(self) -> int:
        """The most host memory that slabs took at a time; 0 on a CPU."""
        return self.pool.peak_bytes

    def compute_event(self) -> DeviceEvent:
        """A timed event after what is queued on the compute stream now."""
        return COMPLETE if self.is_synchronous else self.streams.compute.record(timed=True)

    def copy_event(self) -> DeviceEvent:
        """A timed event after what is queued to be copied to the host now."""
        return COMPLETE if self.is_synchronous else self.streams.to_host.record(timed=True)

    def frame_memory(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """Tensors like these in a slab, for a transport to receive a frame in (`FrameMemory`). None on a CPU, and when
        the slabs are at their cap. May be called from any thread."""
        if self.is_synchronous or self.pool.is_over_cap:
            return None
        return [tensor for tensor in self.pool.take(tensors).tensors() if tensor is not None]

    async def make_room(self, evict: Callable[[], bool], release_sent: Callable[[], None]) -> None:
        """Keep the slabs below their cap, before the next ones are taken.

        In this order: release what transports keep for a repetition (`release_sent`), evict kept tensors (`evict`,
        which returns False if there are none to evict), wait for copies and readers. Never waits for a commit: if
        everything that is lent is needed, the cap is exceeded.
        """
        self._release_completed()
        if not self.pool.is_over_cap:
            self._waits_for_readers = True
            return
        release_sent()
        while self.pool.is_over_cap:
            if evict():
                continue
            if self._under_way:
                await self._under_way[0][0].wait()
                self._release_completed()
            elif not self._waits_for_readers or not await self._wait_for_readers():
                return

    async def _wait_for_readers(self) -> bool:
        """Wait until tensors are dropped that were sent. False: there are none, or they are not dropped, because their
        reader was lost or keeps them: then the cap is exceeded, without a further wait until there is room again."""
        try:
            async with asyncio.timeout(_MAX_READER_S):
                return await self.pool.wait_for_readers()
        except TimeoutError:
            self._waits_for_readers = False
            return False

    def find_failure(self) -> DeviceFailed | None:
        """What the device reports, if it cannot be used any more. Does not wait."""
        if self.is_synchronous:
            return None
        try:
            self.streams.compute.record().is_complete()
        except DeviceFailed as failure:
            return failure
        return None

    async def drain(self, seconds: float) -> None:
        """Wait until everything that was queued on the device is done. Raises DeviceFailed if it reports an error or
        takes longer than `seconds`."""
        if self.is_synchronous:
            return
        streams = self.streams
        try:
            async with asyncio.timeout(seconds):
                for stream in (streams.compute, streams.to_device, streams.to_host, streams.to_host_later):
                    await stream.record().wait()
        except TimeoutError:
            raise DeviceFailed(
                f"the device {streams.device} has not finished within {seconds:g} s what was queued on it: its node "
                "leaves the run"
            ) from None
        self._release_completed()

    def _release_completed(self) -> None:
        """Drop what complete copies hold. Copies of one stream complete in order; those of the others may wait a little
        longer."""
        while self._under_way and self._under_way[0][0].is_complete():
            self._under_way.popleft()

    def close(self) -> None:
        """End the threads of the device."""
        self.streams.close()


def _groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups of up to the size of a chunk. Equal sequences are grouped alike, so that slabs fit again."""
    groups: list[list[Tensor]] = []
    size = CHUNK_BYTES
    for tensor in tensors:
        size += tensor.nbytes
        if size > CHUNK_BYTES:
            groups.append([])
            size = tensor.nbytes
        groups[-1].append(tensor)
    return groups


def _without_gaps(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on its device, with every byte between the first and the last belonging to it."""
    source = tensor.detach()
    if source.is_complex() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    order = sorted(range(source.dim()), key=source.stride, reverse=True)
    gapless = source.is_contiguous() or source.permute(order).is_contiguous()
    return (source if gapless else source.contiguous()).requires_grad_(tensor.requires_grad)


_SHARE_OF_MEMORY = 4
"""One part in this many of a machine's memory may be used for slabs."""


def open_device(device: torch.device, workers_on_host: int = 1, *, in_virtual_time: bool = False) -> DeviceCopies:
    """The copies of a worker's device. All workers of a machine together use a quarter of its memory for slabs.

    `in_virtual_time`: for an event loop with virtual time, see `culm.testing.simulate`.
    """
    streams = open_streams(device, in_virtual_time=in_virtual_time)
    if streams.is_synchronous:
        return DeviceCopies(streams)  # uses no slabs
    cap = usable_memory_bytes() // _SHARE_OF_MEMORY // workers_on_host
    return DeviceCopies(streams, cap, workers=-(-workers_on_host // max(1, torch.cuda.device_count())))
