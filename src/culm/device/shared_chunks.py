"""Host memory that other processes of this machine can map, and page-locking of what they have mapped.

A chunk has no name in the file system (memfd). It lives as long as a process has it mapped, so that what it contains
survives a process that is killed, and nothing remains when all have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

TOKEN_BYTES = 32
HEAD_BYTES = 4096
"""Bytes at the beginning of a chunk: its token, and the rest of the page."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedChunk(NamedTuple):
    """A chunk of this process."""

    number: int
    descriptor: int
    size: int
    token: bytes
    """Its first bytes."""
    address: int
    """In this process."""
    mapped: mmap.mmap
    keeps_pages: bool
    """Whether its pages are never returned to the system. Only then may others page-lock it: a device would go on
    reading pages that were returned, while processors read the new ones."""


class SharedChunks:
    """The chunks of this process. Thread-safe."""

    def __init__(self) -> None:
        self._chunks: list[SharedChunk] = []
        self._lock = threading.Lock()

    def allocate(self, size: int, *, keeps_pages: bool = True) -> memoryview:
        """Memory in a new chunk. Raises OSError."""
        whole, token = HEAD_BYTES + size, os.urandom(TOKEN_BYTES)
        descriptor = os.memfd_create("culm-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, whole)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            mapped = mmap.mmap(descriptor, whole)
        except BaseException:
            os.close(descriptor)
            raise
        mapped[:TOKEN_BYTES] = token
        with self._lock:
            chunk = SharedChunk(len(self._chunks), descriptor, whole, token, address_of(mapped), mapped, keeps_pages)
            self._chunks.append(chunk)
        return memoryview(mapped)[HEAD_BYTES:]

    def find(self, address: int, size: int = 1) -> SharedChunk | None:
        """The chunk that contains these bytes; None: they are other memory."""
        for chunk in self._chunks:
            if HEAD_BYTES <= address - chunk.address <= chunk.size - size:
                return chunk
        return None

    def close(self) -> None:
        """Close the descriptors: nobody can map the chunks any more."""
        with self._lock:
            for chunk in self._chunks:
                os.close(chunk.descriptor)
            self._chunks = []


def address_of(memory: Any) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class PageLocker:
    """Page-locks memory that other processes have allocated, one piece after the other in a thread, because that takes
    long: 20 to 40 ms for 64 MiB."""

    def __init__(self, lock: Callable[[int, int], bool], unlock: Callable[[int], object]) -> None:
        """`lock(address, size)` says whether it succeeded. Both are called in the thread."""
        self._lock_pages, self._unlock_pages = lock, unlock
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._lock = threading.RLock()  # garbage may be collected, and memory unlocked, while this thread holds it

    def lock(self, memory: mmap.mmap, done: Callable[[bool], None]) -> None:
        """Lock all of a mapping; `done` is called in the thread. Its owner calls `unlock` before it is unmapped."""
        self._submit(lambda: done(self._lock_pages(address_of(memory), len(memory))))

    def unlock(self, memory: mmap.mmap) -> None:
        """Unlock a mapping, which stays mapped until that is done. May be called wherever an object may be freed."""
        self._submit(lambda: self._unlock_pages(address_of(memory)))

    def _submit(self, work: Callable[[], object]) -> None:
        with self._lock:
            if not self._is_closed:
                self._work.put(work)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="culm-page-locks", daemon=True)
                    with contextlib.suppress(RuntimeError):  # the interpreter ends
                        self._thread.start()
                return
        work()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work

    def close(self) -> None:
        """End the thread after what was asked for, without waiting for it. What is asked for later is done at once."""
        with self._lock:
            self._is_closed = True
            self._work.put(None)


class SharedHostMemory(NamedTuple):
    """What a device offers a transport: its own host memory, which other processes can map, and how to lock theirs."""

    chunks: SharedChunks
    locker: PageLocker
