"""Frames between two processes of one machine through shared memory: the connection carries only the header.

Tensors that lie in memory that other processes can map, as outputs of a device do, are sent from where they lie. Others
are copied into a slab of the sender's pool. The receiver uses the tensors where they lie. When it has dropped them it
acknowledges the frame, and the slab is free.

All of this memory consists of chunks (`SharedChunks`). The sender announces a chunk over the authenticated connection;
the receiver opens it through /proc, page-locks it if it has a device, and confirms. Until then, and wherever that fails
(other users, other process namespaces), frames travel over the connection. A frame that arrived damaged is sent again
over the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hmac
import itertools
import mmap
import os
import select
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from culm.device.host_memory import usable_memory_bytes
from culm.device.shared_chunks import HEAD_BYTES, SEALS, TOKEN_BYTES, SharedChunk, SharedChunks
from culm.device.slab_pool import ALIGNMENT, CHUNK_BYTES, SlabPool, layout_of, tensor_at
from culm.transport.frames.frame_codec import ChunkAnnouncement, SharedPlace

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.shared_chunks import PageLocker
    from culm.transport.interface import Address

MAX_IDLE_BYTES = 512 << 20
"""Memory that a sender keeps for frames to come."""
_SHARE_OF_MEMORY = 4
"""One part in so many of the memory may be used by one sender."""


class _LentFrame(NamedTuple):
    """A frame that was not acknowledged yet."""

    receiver: Address
    tensors: Sequence[Tensor | None]
    """They keep their slabs lent."""
    address: int
    """Of what was copied into the pool; 0: nothing."""
    size: int
    """The bytes that were copied."""


class SharedFrames:
    """The sending side of an endpoint: a pool of slabs, and the frames that were not acknowledged yet. Thread-safe."""

    def __init__(
        self, cap: int | None = None, chunk_bytes: int = CHUNK_BYTES, chunks: SharedChunks | None = None
    ) -> None:
        """`cap`: bytes that may be lent; frames travel over their connection above it. `chunks`: where tensors may lie
        that are sent; they are closed with this object."""
        cap = usable_memory_bytes() // _SHARE_OF_MEMORY if cap is None else cap
        self._chunks = chunks or SharedChunks()
        allocate = functools.partial(self._chunks.allocate, keeps_pages=False)  # see _keep_or_return
        self.pool = SlabPool(allocate, cap, chunk_bytes)
        self._idle: dict[int, int] = {}
        """By address: bytes of free slabs whose pages the system still keeps."""
        self._numbers = itertools.count()
        self._lent: dict[int, _LentFrame] = {}
        """By number of the frame."""
        self._receivers: dict[Address, int] = {}
        """A descriptor of the process of each receiver."""
        self._lost_receivers: set[Address] = set()
        """Receivers whose connection broke: their slabs are free only when the process has ended."""
        self._lock = threading.RLock()

    def put(
        self, receiver: Address, payload: Sequence[memoryview], confirmed: set[int]
    ) -> SharedPlace | list[ChunkAnnouncement] | None:
        """Lend the tensors of a frame to a receiver; those that cannot be mapped are copied. Returns their place; or
        the chunks to announce first, if they are not among the `confirmed` ones; or None: there is no memory."""
        self.release_of_ended_receivers()
        parts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in payload]
        homes = [self._chunks.find(part.data_ptr(), part.numel()) for part in parts]
        outside = [part for part, home in zip(parts, homes, strict=True) if home is None]
        copies: Sequence[Tensor | None] = ()
        if outside:
            if self.pool.is_over_cap:
                return None
            try:
                copies = self.pool.take(outside).tensors()
            except OSError:
                return None
        fill = iter(copies)
        lent = [part if home is not None else next(fill) for part, home in zip(parts, homes, strict=True)]
        spots: list[tuple[SharedChunk, int]] = []
        for tensor in lent:
            assert tensor is not None
            chunk = self._chunks.find(tensor.data_ptr(), tensor.numel())
            assert chunk is not None
            spots.append((chunk, tensor.data_ptr() - chunk.address))
        unknown = {chunk.number: chunk for chunk, _ in spots if chunk.number not in confirmed}
        if unknown:
            return [_announcement(chunk) for chunk in unknown.values()]
        for copy, part in zip(copies, outside, strict=True):
            assert copy is not None
            copy.copy_(part)
        number, address = next(self._numbers), 0 if not copies or copies[0] is None else copies[0].data_ptr()
        self._idle.pop(address, None)
        self._lent[number] = _LentFrame(receiver, lent, address, sum(part.numel() for part in outside))
        chunk, offset = spots[0]
        if len(outside) == len(parts):
            return SharedPlace(chunk.number, offset, number)
        return SharedPlace(chunk.number, offset, number, tuple((each.number, at) for each, at in spots))

    def add_receiver(self, receiver: Address, process: int) -> bool:
        """Remember the process of a receiver; False: it cannot be watched."""
        with self._lock:
            if receiver in self._receivers and _has_ended(self._receivers[receiver]):
                self._release(receiver)  # another process has its address now
            if receiver not in self._receivers:
                try:
                    self._receivers[receiver] = os.pidfd_open(process)
                except OSError:
                    return False
            self._lost_receivers.discard(receiver)
        return True

    def acknowledge(self, numbers: Sequence[int]) -> None:
        """The receiver has dropped these frames."""
        for number in numbers:
            frame = self._lent.pop(number, None)
            if frame is not None and frame.address:
                self._keep_or_return(frame)  # before its slab is free, which it is when `frame` is dropped
            del frame

    def _keep_or_return(self, frame: _LentFrame) -> None:
        """Keep the pages of a slab for the next frame, or return them to the system if many are idle already, as after
        layers were moved."""
        if sum(list(self._idle.values())) + frame.size <= MAX_IDLE_BYTES:
            self._idle[frame.address] = frame.size
            return
        with self._lock:
            chunk = self._chunks.find(frame.address)
            if chunk is None:  # closed
                return
            first = -(-(frame.address - chunk.address) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (frame.address - chunk.address + frame.size) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > first:
                chunk.mapped.madvise(mmap.MADV_REMOVE, first, end - first)

    def handle_lost_connection(self, receiver: Address) -> None:
        """What was sent to this receiver may still be read: it is free when its process has ended."""
        with self._lock:
            if receiver in self._receivers:
                self._lost_receivers.add(receiver)

    def release_of_ended_receivers(self) -> None:
        """Free what was sent to processes that have ended."""
        if not self._lost_receivers:
            return
        with self._lock:
            for receiver in [each for each in self._lost_receivers if _has_ended(self._receivers[each])]:
                self._release(receiver)

    def _release(self, receiver: Address) -> None:
        self._lost_receivers.discard(receiver)
        os.close(self._receivers.pop(receiver))
        self.acknowledge([number for number, frame in list(self._lent.items()) if frame.receiver == receiver])

    def close(self) -> None:
        """Close the descriptors. Receivers keep what they have mapped."""
        with self._lock:
            for descriptor in self._receivers.values():
                os.close(descriptor)
            self._chunks.close()
            self._receivers.clear()
            self._lost_receivers.clear()


def _announcement(chunk: SharedChunk) -> ChunkAnnouncement:
    return ChunkAnnouncement(
        chunk.number, os.getpid(), chunk.descriptor, chunk.size, chunk.token, keeps_pages=chunk.keeps_pages
    )


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


class _MappedChunk:
    """A chunk of another process, mapped here.

    A page-lock belongs to the memory, not to the connection that it arrived over: it ends when the last tensor in the
    chunk has been dropped, and always before the memory is unmapped. The driver would go on using the locked pages for
    whatever is mapped at this address next.
    """

    def __init__(self, mapped: mmap.mmap, *, keeps_pages: bool) -> None:
        self.size, self.keeps_pages = len(mapped), keeps_pages
        self.is_locked = False
        self._mapped = mapped
        self.memory = (ctypes.c_uint8 * len(mapped)).from_buffer(mapped)
        """All tensors in the chunk refer to it."""

    def lock(self, locker: PageLocker, done: Callable[[], None]) -> None:
        """Page-lock the memory, then call `done`, in a thread."""
        memory = self.memory

        def locked(success: bool) -> None:
            if success:
                weakref.finalize(memory, locker.unlock, self._mapped).atexit = False
            self.is_locked = success
            done()

        locker.lock(self._mapped, locked)


class MappedChunks:
    """The receiving side of one connection: the sender's chunks that are mapped here. Thread-safe."""

    def __init__(self, on_dropped: Callable[[int], None], locker: PageLocker | None = None) -> None:
        """`on_dropped` is called, in any thread, with the number of a frame when the last of its tensors is dropped.
        `locker`: page-locks chunks; None: there is no device."""
        self._on_dropped, self._locker = on_dropped, locker
        self._is_closed = False
        self._chunks: dict[int, _MappedChunk] = {}
        self._holds: dict[int, weakref.ref[Any]] = {}
        """One for each piece of memory in use, by id of the reference."""
        self._lock = threading.RLock()  # garbage may be collected, and a tensor freed, while this thread holds it

    def map(self, announced: ChunkAnnouncement) -> bool:
        """Map a chunk; False: it cannot be opened here, or is another one."""
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(f"/proc/{announced.process}/fd/{announced.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                # Sealed: a sender that shrinks it could end this process.
                if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                    return False
                mapped = mmap.mmap(descriptor, announced.size)
            finally:
                os.close(descriptor)
            if hmac.compare_digest(mapped[:TOKEN_BYTES], announced.token):
                self._chunks[announced.chunk] = _MappedChunk(mapped, keeps_pages=announced.keeps_pages)
                return True
        return False

    def lock(self, chunk: int, done: Callable[[], None]) -> None:
        """Page-lock a chunk that was mapped, then call `done`, in another thread. At once without a device, and for a
        chunk that must not be locked."""
        found = self._chunks[chunk]
        if self._locker is None or not found.keeps_pages:
            done()
            return

        def locked() -> None:
            if not self._is_closed:
                done()

        found.lock(self._locker, locked)

    def is_locked(self, chunk: int) -> bool:
        """Whether a chunk is page-locked."""
        return chunk in self._chunks and self._chunks[chunk].is_locked

    def is_of_device(self, chunk: int) -> bool:
        """Whether a chunk is memory that the sender's device has written, and the sender keeps: nobody may change
        it."""
        return chunk in self._chunks and self._chunks[chunk].keeps_pages

    def tensors(self, place: SharedPlace, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a frame where they lie. Raises ValueError if that is not within a mapped chunk."""
        layouts, size = layout_of(like)
        if place.spots:
            return self._tensors_at(place, like)
        (memory,) = self._hold(place.frame, [(place.chunk, place.offset, size, ALIGNMENT)])
        return [tensor_at(memory, layout) for layout in layouts if layout is not None]

    def _tensors_at(self, place: SharedPlace, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of which each has a place of its own; those without elements have none."""
        filled = [tensor for tensor in like if tensor.numel()]
        pieces = [
            (chunk, offset, tensor.nbytes, tensor.itemsize)
            for (chunk, offset), tensor in zip(place.spots, filled, strict=True)
        ]
        memories = iter(self._hold(place.frame, pieces))
        layouts = [layout_of([tensor])[0][0] for tensor in like]
        nothing = torch.empty(0, dtype=torch.uint8)
        return [
            tensor_at(next(memories) if tensor.numel() else nothing, layout)
            for tensor, layout in zip(like, layouts, strict=True)
            if layout is not None
        ]

    def _hold(self, number: int, pieces: Sequence[tuple[int, int, int, int]]) -> list[Tensor]:
        """Memory of a frame, given as (chunk, offset, size, alignment), as flat tensors. `on_dropped` is called when
        all of it is garbage. Raises ValueError."""
        for chunk, offset, size, alignment in pieces:
            known = self._chunks.get(chunk)
            if known is None or offset % alignment or not HEAD_BYTES <= offset <= known.size - size:
                raise ValueError("a frame in memory that is not shared")
        waiting = len(pieces)

        def dropped(hold: weakref.ref[Any]) -> None:
            nonlocal waiting
            with self._lock:
                self._holds.pop(id(hold), None)
                waiting -= 1
                is_last = waiting == 0
            if is_last:
                self._on_dropped(number)

        found = []
        for chunk, offset, size, _ in pieces:
            memory = (ctypes.c_uint8 * size).from_buffer(self._chunks[chunk].memory, offset)
            hold = weakref.ref(memory, dropped)
            with self._lock:
                self._holds[id(hold)] = hold
            found.append(torch.frombuffer(memory, dtype=torch.uint8))
        return found

    def close(self) -> None:
        """Forget the chunks when their connection has ended. Tensors keep their memory; nothing is acknowledged."""
        self._on_dropped, self._is_closed = _ignore, True
        self._chunks.clear()


def _ignore(number: int) -> None:
    pass
