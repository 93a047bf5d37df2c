"""The streams of a CUDA device.

The compute stream is the default stream of the device: user code, autograd and optimizers use it without knowing of
this module. The copy streams are streams of torch, which do not synchronise with the default stream by themselves.

Events are awaited by one thread per stream, in the order of the stream: `torch.cuda.Event.synchronize` releases the
interpreter while it waits, and an event created with `blocking=True` does not spin.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from culm.device.shared_chunks import PageLocker, SharedChunks, SharedHostMemory, address_of
from culm.errors import DeviceFailed, message_suffix

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from culm.device.device_sums import DeviceSums
    from culm.device.streams import DeviceEvent, DeviceStream

_POLL_S = 0.0005
"""Real time between two looks at an event, where waits poll. Virtual time is twice as fast."""
_COPY_PRIORITY = -1
"""torch has 32 streams of each priority, and gives them out in turn. Each group of NCCL takes two of priority 0: after
some losses a copy would be queued behind a sum that waits for another worker, which may wait for that copy."""
_Waiting = tuple[torch.cuda.Event, asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class CudaEvent:
    """An event of a CUDA stream, recorded when it is created."""

    def __init__(self, stream: CudaStream, *, timed: bool = False) -> None:
        self._stream = stream
        self.recorded = torch.cuda.Event(blocking=True, enable_timing=timed)
        with reporting_device_errors(stream.device):
            self.recorded.record(stream.cuda)

    def is_complete(self) -> bool:
        with reporting_device_errors(self._stream.device):
            return bool(self.recorded.query())

    async def wait(self) -> None:
        if self._stream.polls:
            while not self.is_complete():
                time.sleep(_POLL_S)
                await asyncio.sleep(2 * _POLL_S)
        elif not self.is_complete():
            await self._stream.wait_in_thread(self.recorded)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        with reporting_device_errors(self._stream.device):
            self.recorded.synchronize()
            return float(earlier.recorded.elapsed_time(self.recorded)) / 1e3


class CudaStream:
    """One CUDA stream, and the thread that waits for its events."""

    def __init__(self, device: torch.device, cuda: torch.cuda.Stream, *, polls: bool) -> None:
        self.device, self.cuda, self.polls = device, cuda, polls
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def record(self, *, timed: bool = False) -> DeviceEvent:
        return CudaEvent(self, timed=timed)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        with reporting_device_errors(self.device):
            self.cuda.wait_event(event.recorded)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with reporting_device_errors(self.device), torch.cuda.stream(self.cuda):
            target.copy_(source, non_blocking=True)

    def reads(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self.cuda)

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.cuda)

    async def wait_in_thread(self, event: torch.cuda.Event) -> None:
        """Wait for an event. Events of one stream complete in order, so that one thread is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_events, name="culm-device", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.put((event, loop, future))
        await future

    def _wait_for_events(self) -> None:
        torch.cuda.set_device(self.device)  # of this thread
        while (waiting := self._waiting.get()) is not None:
            event, loop, future = waiting
            error = None
            try:
                event.synchronize()
            except RuntimeError as reason:
                error = device_failed(self.device, reason)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker ends
                loop.call_soon_threadsafe(_resolve, future, error)

    def close(self) -> None:
        """End the thread once the events before are complete; a device that hangs is not waited for."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)


def _resolve(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class CudaStreams:
    """The streams of one GPU."""

    is_synchronous = False

    def __init__(self, device: torch.device, *, polls: bool = False) -> None:
        """`polls`: waits poll instead of using a thread. In an event loop with virtual time a thread would have no
        effect: the time would jump to the next timer meanwhile."""
        index = torch.cuda.current_device() if device.index is None else device.index
        device = self.device = torch.device("cuda", index)
        copying = (torch.cuda.Stream(device, priority=_COPY_PRIORITY) for _ in range(3))
        streams = [torch.cuda.default_stream(device), *copying]
        self._streams = [CudaStream(device, stream, polls=polls) for stream in streams]
        self.compute: DeviceStream = self._streams[0]
        self.to_host: DeviceStream = self._streams[1]
        self.to_device: DeviceStream = self._streams[2]
        self.to_host_later: DeviceStream = self._streams[3]
        self._polls, self._can_share = polls, True
        self.shared_memory: SharedHostMemory | None = SharedHostMemory(SharedChunks(), cuda_page_locker(device))

    @functools.cached_property
    def sums(self) -> DeviceSums:
        from culm.device.nccl_communicator import NcclSums  # uses this module

        return NcclSums(self.device, self.compute, polls=self._polls)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - self.peak_bytes

    def host_memory(self, size: int) -> memoryview:
        """Page-locked memory that other processes can map, or else only page-locked. Where the system allows no more
        of it (a limit on locked memory, a container) ordinary memory is returned: copies are correct then, but slow,
        and the host waits for them."""
        if self._can_share and self.shared_memory is not None:
            with contextlib.suppress(OSError):
                memory = self.shared_memory.chunks.allocate(size)
                if _lock_in_thread(self.device, memory):
                    return _unlocked_when_dropped(self.device, memory)
            self._can_share = False
        try:
            return memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]
        except RuntimeError:
            return memoryview(bytearray(size))

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=self.device)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        if self.shared_memory is not None:
            self.shared_memory.locker.close()
        if "sums" in vars(self):
            self.sums.kept.abort_rest()


def cuda_page_locker(device: torch.device) -> PageLocker:
    """Page-locks memory of other processes for this device."""
    return PageLocker(functools.partial(_lock_pages, device), functools.partial(_unlock_pages, device))


def _lock_pages(device: torch.device, address: int, size: int) -> bool:
    """Page-lock memory; False: the driver refuses. Not for threads that launch kernels: torch would report the error of
    a refusal at their next launch."""
    try:
        torch.cuda.set_device(device)  # of this thread
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0
    except Exception:  # whatever it is, the memory can be used without a lock; a failed device shows elsewhere
        return False


def _unlock_pages(device: torch.device, address: int) -> None:
    with contextlib.suppress(Exception):
        torch.cuda.set_device(device)
        torch.cuda.cudart().cudaHostUnregister(address)


def _lock_in_thread(device: torch.device, memory: memoryview) -> bool:
    """Page-lock memory of this process and wait until that is done."""
    locked: list[bool] = []

    def lock() -> None:
        locked.append(_lock_pages(device, address_of(memory), len(memory)))

    thread = threading.Thread(target=lock, name="culm-page-lock")
    thread.start()
    thread.join()
    return locked == [True]


def _unlocked_when_dropped(device: torch.device, memory: memoryview) -> memoryview:
    """The same memory. When the last user has dropped it, it is unlocked before it is unmapped: the driver would go on
    using its pages for whatever is mapped at its address next."""
    block = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
    weakref.finalize(block, _unlock_memory, device, memory).atexit = False
    return memoryview(block).cast("B")


def _unlock_memory(device: torch.device, memory: memoryview) -> None:
    _unlock_pages(device, address_of(memory))


@contextlib.contextmanager
def reporting_device_errors(device: torch.device) -> Iterator[None]:
    """Raise DeviceFailed instead of an error of the driver, after which the context cannot be used any more. Being out
    of memory is no such error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch.AcceleratorError is one, too
        raise device_failed(device, error) from None


def device_failed(device: torch.device, error: BaseException) -> DeviceFailed:
    """The error of a device whose context cannot be used any more."""
    return DeviceFailed(f"the device {device} reported an error{message_suffix(error)}: its node leaves the run")
