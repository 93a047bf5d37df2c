"""A pool of slabs: host memory that tensors are copied to, sent from and kept in, without another copy.

The life of a slab:

1. `take` lends it to one writer, for the tensors of one frame, under a new generation.
2. Each reader and the keeper get tensors of their own in its memory (`Slab.tensors`). A reader acknowledges by dropping
   its tensors; the keeper drops its tensors when the step is committed, or when the slab is evicted.
3. When its last tensor is dropped, the slab is free. It cannot be used again earlier: each tensor holds the slab.

Tensors may be dropped by any thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Memory is requested in pieces of this size, or of one slab if that is larger: locking pages takes long."""
ALIGNMENT = 64
"""Alignment of each tensor in a slab, in bytes."""
_SMALLEST_SLAB = 4096


class TensorLayout(NamedTuple):
    """Place of a tensor in a slab, with its shape and type."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Slab:
    """A piece of host memory that holds the tensors of one frame."""

    def __init__(self, pool: SlabPool, memory: memoryview, size: int) -> None:
        self._pool, self._memory, self.size = pool, memory, size
        self.generation = 0
        """Grows by one each time that the slab is lent."""
        self.layouts: tuple[TensorLayout | None, ...] = ()
        self.readers = 0
        """Readers that have not acknowledged yet."""
        self._holds: dict[int, weakref.ref[Any]] = {}
        """One for the tensors of the writer, of the keeper and of each reader, by id of the reference."""

    def begin(self, layouts: Sequence[TensorLayout | None]) -> None:
        """Start a new generation."""
        self.generation += 1
        self.layouts = tuple(layouts)

    def tensors(self, *, reader: bool = False) -> tuple[Tensor | None, ...]:
        """The tensors in the slab. It becomes free when the caller and all other readers have dropped them.

        `reader`: they are about to be sent; a slab with readers is not evicted.
        """
        memory = (ctypes.c_uint8 * self.size).from_buffer(self._memory)  # an object of its own, to notice its end
        self._pool.hold(self, memory, reader=reader)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return tuple(None if layout is None else tensor_at(flat, layout) for layout in self.layouts)

    def add_hold(self, hold: weakref.ref[Any], *, reader: bool) -> None:
        self._holds[id(hold)] = hold
        self.readers += reader

    def drop_hold(self, hold: weakref.ref[Any], *, reader: bool) -> bool:
        """Whether the slab is free now."""
        self._holds.pop(id(hold), None)
        self.readers -= reader
        return not self._holds


def tensor_at(flat: Tensor, layout: TensorLayout) -> Tensor:
    """The tensor with this layout in the bytes of a slab."""
    shape, strides, dtype = layout.shape, layout.strides, layout.dtype
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype).requires_grad_(layout.requires_grad)
    count = 1
    for length in shape:
        count *= length
    part = flat[layout.offset : layout.offset + count * dtype.itemsize].view(dtype)
    return part.as_strided(shape, strides).requires_grad_(layout.requires_grad)


class SlabPool:
    """Lends slabs. Thread-safe.

    `cap` limits the bytes lent: `make_room` keeps to it as far as that is possible without waiting for a commit.
    """

    def __init__(self, allocate: Callable[[int], memoryview], cap: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._allocate, self.cap, self._chunk_bytes = allocate, cap, chunk_bytes
        self._lock = threading.RLock()  # garbage may be collected, and a slab freed, while this thread holds it
        self._free: dict[int, collections.deque[Slab]] = collections.defaultdict(collections.deque)
        """By size of the slab."""
        self._spare: memoryview = memoryview(b"")
        """The rest of the last chunk."""
        self.lent_bytes = self.peak_bytes = 0
        self._lent: set[Slab] = set()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def is_over_cap(self) -> bool:
        return self.lent_bytes > self.cap

    def take(self, tensors: Sequence[Tensor | None]) -> Slab:
        """A slab for copies of these tensors. Never waits, and may exceed the cap. The caller gets its tensors with
        `tensors()` at once: a slab without tensors is not lent."""
        layouts, size = layout_of(tensors)
        size = slab_size(size)
        with self._lock:
            free = self._free[size]
            slab = free.popleft() if free else Slab(self, self._carve(size), size)
            slab.begin(layouts)
            self._lent.add(slab)
            self.lent_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        return slab

    def missing_slabs(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of the slabs for which memory has to be allocated, if slabs of these sizes are taken now."""
        with self._lock:
            counts = collections.Counter(map(slab_size, sizes))
            return [size for size, count in counts.items() for _ in range(count - len(self._free[size]))]

    def add_slabs(self, sizes: Sequence[int]) -> None:
        """Allocate slabs. That takes long: called in a thread, it delays nobody who takes others."""
        for size in map(slab_size, sizes):
            slab = Slab(self, self._allocate(size)[:size], size)
            with self._lock:
                self._free[size].append(slab)

    def _carve(self, size: int) -> memoryview:
        if len(self._spare) < size:
            self._spare = self._allocate(max(size, self._chunk_bytes))
        memory, self._spare = self._spare[:size], self._spare[size:]
        return memory

    def hold(self, slab: Slab, memory: Any, *, reader: bool) -> None:
        """Keep a slab lent until `memory` is garbage."""
        pool = weakref.ref(self)

        def dropped(hold: weakref.ref[Any]) -> None:
            alive = pool()
            if alive is not None:
                alive._drop(slab, hold, reader=reader)

        with self._lock:
            slab.add_hold(weakref.ref(memory, dropped), reader=reader)

    def _drop(self, slab: Slab, hold: weakref.ref[Any], *, reader: bool) -> None:
        with self._lock:
            if slab.drop_hold(hold, reader=reader) and slab in self._lent:
                self._lent.remove(slab)
                self.lent_bytes -= slab.size
                self._free[slab.size].append(slab)
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_wake, waiter)

    @property
    def has_readers(self) -> bool:
        """Whether a lent slab waits for the acknowledgement of a reader."""
        with self._lock:
            return any(slab.readers for slab in list(self._lent))

    async def wait_for_readers(self) -> bool:
        """Wait until tensors of a slab are dropped. Returns False at once if no lent slab has readers."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:  # the last reader may drop its tensors in another thread
            if not self.has_readers:
                return False
            self._waiters.append((loop, waiter))
        await waiter
        return True


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def layout_of(tensors: Sequence[Tensor | None]) -> tuple[list[TensorLayout | None], int]:
    """Places of tensors in a slab, without gaps, and its size in bytes."""
    layouts: list[TensorLayout | None] = []
    end = 0
    for tensor in tensors:
        if tensor is None:
            layouts.append(None)
            continue
        layouts.append(
            TensorLayout(end, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)
        )
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return layouts, end


def slab_size(size: int) -> int:
    """The size of the slab for this many bytes: four sizes for each power of two, so that at most a fifth is unused."""
    size = max(size, _SMALLEST_SLAB)
    step = 1 << max(size - 1, 1).bit_length() - 3
    return -(-size // step) * step
