"""The allocator of long-lived processes. Its options are those of glibc; other allocators have none of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_ARENAS = 2
"""Heaps of a process. By default glibc creates eight per core, whenever a thread starts while others run: every loss
starts a few, so that a process that survives many would grow for hours."""
_RETURNED_BYTES = 256 << 10
"""Blocks of this size are returned to the kernel when they are freed, and so is free memory at the end of a heap. By
default glibc raises both thresholds with the largest block that was freed: a process that has read a large file once
would keep up to twice its size, and spread small blocks over it."""
_MAX_MMAP_THRESHOLD = 32 << 20
"""Largest M_MMAP_THRESHOLD that glibc accepts, in bytes."""


def return_freed_memory() -> None:
    """In a process that coordinates for weeks: keep little memory that is not used. Its workers, which are forked,
    inherit the number of heaps."""
    _set_malloc_options(
        {_M_ARENA_MAX: _MAX_ARENAS, _M_TRIM_THRESHOLD: _RETURNED_BYTES, _M_MMAP_THRESHOLD: _RETURNED_BYTES}
    )


def keep_freed_memory() -> None:
    """In a worker: keep freed memory for the next micro-batch instead of returning it to the kernel, which costs 5 to
    10 % of the time of a layer of width 256."""
    _set_malloc_options({_M_TRIM_THRESHOLD: -1, _M_MMAP_THRESHOLD: _MAX_MMAP_THRESHOLD})


def _set_malloc_options(options: Mapping[int, int]) -> None:
    """Set options of the allocator. Only glibc has them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
