"""Frames between two processes of one machine through shared memory: the connection carries only the header.

The sender copies the tensors into a slab of its pool and sends the header, which names the slab. The receiver uses the
tensors where they lie. When it has dropped them it acknowledges the frame, and the slab is free.

The pool consists of chunks without a name in the file system (memfd), which live as long as a process has them mapped:
what was sent survives a sender that is killed, and nothing remains when both have ended. The sender announces a chunk
over the authenticated connection; the receiver opens it through /proc and confirms. Until then, and wherever that
fails (other users, other process namespaces), frames travel over the connection. A frame that arrived damaged is sent
again over the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from culm.device.slab_pool import ALIGNMENT, CHUNK_BYTES, SlabPool, layout_of, tensor_at
from culm.transport.frames.frame_codec import ChunkAnnouncement, SharedPlace

if TYPE_CHECKING:
    from torch import Tensor

    from culm.transport.interface import Address

_TOKEN_BYTES = 32
_HEAD_BYTES = 4096
"""Bytes at the beginning of a chunk: its token, and the rest of the page."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_IDLE_BYTES = 512 << 20
"""Memory that a sender keeps for frames to come."""
_SHARE_OF_MEMORY = 4
"""One part in so many of the memory may be used by one sender."""


class _LentFrame(NamedTuple):
    """A frame that was not acknowledged yet."""

    receiver: Address
    tensors: Sequence[Tensor | None]
    """They keep the slab lent."""
    address: int
    size: int


class SharedFrames:
    """The sending side of an endpoint: a pool of slabs, and the frames that were not acknowledged yet. Thread-safe."""

    def __init__(self, cap: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`cap`: bytes that may be lent; frames travel over their connection above it."""
        cap = usable_memory_bytes() // _SHARE_OF_MEMORY if cap is None else cap
        self.pool = SlabPool(self._allocate, cap, chunk_bytes)
        self._chunks: list[tuple[int, ChunkAnnouncement, mmap.mmap]] = []
        """With the address of each in this process."""
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

    def _allocate(self, size: int) -> memoryview:
        descriptor = os.memfd_create("culm-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _HEAD_BYTES + size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(descriptor, _HEAD_BYTES + size)
        token = os.urandom(_TOKEN_BYTES)
        mapped[:_TOKEN_BYTES] = token
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        announcement = ChunkAnnouncement(len(self._chunks), os.getpid(), descriptor, _HEAD_BYTES + size, token)
        self._chunks.append((address, announcement, mapped))
        return memoryview(mapped)[_HEAD_BYTES:]

    def put(
        self, receiver: Address, payload: Sequence[memoryview], confirmed: set[int]
    ) -> SharedPlace | ChunkAnnouncement | None:
        """Copy the tensors of a frame for a receiver. Returns their place; or the chunk to announce first, if it is not
        among the `confirmed` ones; or None: there is no memory."""
        self._release_of_ended_receivers()
        if self.pool.is_over_cap:
            return None
        parts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in payload]
        try:
            copies = self.pool.take(parts).tensors()
        except OSError:
            return None
        assert copies[0] is not None
        address = copies[0].data_ptr()
        base, chunk, _ = self._chunk_at(address)
        if chunk.chunk not in confirmed:
            return chunk
        for copy, part in zip(copies, parts, strict=True):
            assert copy is not None
            copy.copy_(part)
        number = next(self._numbers)
        self._idle.pop(address, None)
        self._lent[number] = _LentFrame(receiver, copies, address, sum(map(len, payload)))
        return SharedPlace(chunk.chunk, address - base, number)

    def _chunk_at(self, address: int) -> tuple[int, ChunkAnnouncement, mmap.mmap]:
        return next(each for each in self._chunks if 0 <= address - each[0] < each[1].size)

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
            if frame is not None:
                self._keep_or_return(frame)  # before its slab is free, which it is when `frame` is dropped
            del frame

    def _keep_or_return(self, frame: _LentFrame) -> None:
        """Keep the pages of a slab for the next frame, or return them to the system if many are idle already, as after
        layers were moved."""
        if sum(list(self._idle.values())) + frame.size <= MAX_IDLE_BYTES:
            self._idle[frame.address] = frame.size
            return
        with self._lock:
            if not self._chunks:  # closed
                return
            base, _, mapped = self._chunk_at(frame.address)
            first = -(-(frame.address - base) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (frame.address - base + frame.size) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > first:
                mapped.madvise(mmap.MADV_REMOVE, first, end - first)

    def handle_lost_connection(self, receiver: Address) -> None:
        """What was sent to this receiver may still be read: it is free when its process has ended."""
        with self._lock:
            if receiver in self._receivers:
                self._lost_receivers.add(receiver)

    def _release_of_ended_receivers(self) -> None:
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
            for descriptor in [*self._receivers.values(), *(chunk.descriptor for _, chunk, _ in self._chunks)]:
                os.close(descriptor)
            self._receivers.clear()
            self._chunks.clear()
            self._lost_receivers.clear()


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


class MappedChunks:
    """The receiving side of one connection: the sender's chunks that are mapped here."""

    def __init__(self, on_dropped: Callable[[int], None]) -> None:
        """`on_dropped` is called, in any thread, with the number of a frame when the last of its tensors is dropped."""
        self._on_dropped = on_dropped
        self._chunks: dict[int, mmap.mmap] = {}
        self._holds: dict[int, weakref.ref[Any]] = {}

    def map(self, announced: ChunkAnnouncement) -> bool:
        """Map a chunk; False: it cannot be opened here, or is another one."""
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(f"/proc/{announced.process}/fd/{announced.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                # Sealed: a sender that shrinks it could end this process.
                if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    return False
                mapped = mmap.mmap(descriptor, announced.size)
            finally:
                os.close(descriptor)
            if hmac.compare_digest(mapped[:_TOKEN_BYTES], announced.token):
                self._chunks[announced.chunk] = mapped
                return True
        return False

    def tensors(self, place: SharedPlace, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a frame where they lie. Raises ValueError if that is not within a mapped chunk."""
        mapped = self._chunks.get(place.chunk)
        layouts, size = layout_of(like)
        if mapped is None or place.offset % ALIGNMENT or not _HEAD_BYTES <= place.offset <= len(mapped) - size:
            raise ValueError("a frame in memory that is not shared")
        memory = (ctypes.c_uint8 * size).from_buffer(mapped, place.offset)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        found = [tensor_at(flat, layout) for layout in layouts if layout is not None]
        number, holds, on_dropped = place.frame, self._holds, self._on_dropped

        def dropped(hold: weakref.ref[Any]) -> None:
            del hold
            holds.pop(number, None)
            on_dropped(number)

        holds[number] = weakref.ref(memory, dropped)
        return found

    def close(self) -> None:
        """Forget the chunks when their connection has ended. Tensors keep their memory; nothing is acknowledged."""
        self._on_dropped = _ignore
        self._chunks.clear()
        self._holds.clear()


def _ignore(number: int) -> None:
    pass
