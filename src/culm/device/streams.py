"""The seam between the runtime and a compute device: streams of queued work, events in them, and memory.

A caller queues work and continues; the device does it later, in the order of its stream. On a CPU everything is done
when the call returns (`HostStreams`). `CudaStreams` is a GPU. `SimulatedStreams` computes on the CPU and completes
work at virtual times, so that a test can halt a worker between the launch of an action and its completion.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from culm.device.device_sums import NoDeviceSums

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

    from torch import Tensor

    from culm.device.device_sums import DeviceSums
    from culm.device.shared_chunks import SharedHostMemory


class DeviceEvent(Protocol):
    """A point in a stream. It is complete when everything that was queued before it is done."""

    def is_complete(self) -> bool:
        """Never waits. Raises DeviceFailed if the device reports an error."""

    async def wait(self) -> None:
        """Wait until it is complete, without blocking the event loop. Raises DeviceFailed."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Seconds that passed on the device between two timed events of one stream. Blocks the caller until this event
        is complete. Raises DeviceFailed."""


class DeviceStream(Protocol):
    """Work that a device does in order."""

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """An event after everything that is queued now. `timed`: it is used for `seconds_since`."""

    def wait_event(self, event: DeviceEvent) -> None:
        """What is queued from now on begins after the event. Does not block the caller."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device. The caller keeps both tensors until it is complete."""

    def reads(self, tensor: Tensor) -> None:
        """The memory of a tensor of the device is not used again before what is queued on this stream is done."""

    def active(self) -> AbstractContextManager[Any]:
        """While this is open, what the calling thread queues on the device is queued on this stream."""


class DeviceStreams(Protocol):
    """The streams of one device.

    `compute` is the stream that user code runs on. `to_host` and `to_device` carry copies beside it, `to_host_later`
    large ones that nobody waits for: what is queued behind them on `to_host` would wait, too.
    """

    device: torch.device
    compute: DeviceStream
    to_host: DeviceStream
    to_host_later: DeviceStream
    to_device: DeviceStream
    is_synchronous: bool
    """Whether work is done when the call that queues it returns. Then no copies are made at all."""
    shared_memory: SharedHostMemory | None
    """Where `host_memory` comes from, if other processes can map it."""

    @property
    def sums(self) -> DeviceSums:
        """Sums over this device and others."""

    @property
    def peak_bytes(self) -> int:
        """The most memory of the device that tensors of this process took at a time; 0: it is host memory."""

    @property
    def free_bytes(self) -> int:
        """How much more memory of the device than at its peak tensors of this process could take now."""

    def host_memory(self, size: int) -> memoryview:
        """Host memory that copies reach at full speed. It is never freed: callers keep it in a pool."""

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the device. Opened inside `to_device.active()`, it belongs to that stream."""

    def close(self) -> None:
        """End the threads that wait for events."""


class _CompleteEvent:
    """An event of a device that has done everything when a call returns."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at

    def is_complete(self) -> bool:
        return True

    async def wait(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _CompleteEvent)
        return self._at - earlier._at


COMPLETE = _CompleteEvent()


class _HostStream:
    def record(self, *, timed: bool = False) -> DeviceEvent:
        return _CompleteEvent(time.perf_counter()) if timed else COMPLETE

    def wait_event(self, event: DeviceEvent) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def reads(self, tensor: Tensor) -> None:
        pass

    def active(self) -> AbstractContextManager[Any]:
        from contextlib import nullcontext

        return nullcontext()


class HostStreams:
    """The streams of a CPU: every event is complete at once, and a tensor is its own copy in host memory."""

    is_synchronous = True
    peak_bytes = free_bytes = 0
    shared_memory: SharedHostMemory | None = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute: DeviceStream = _HostStream()
        self.to_host: DeviceStream = self.compute
        self.to_host_later: DeviceStream = self.compute
        self.to_device: DeviceStream = self.compute
        self.sums: DeviceSums = NoDeviceSums()

    def host_memory(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)

    def close(self) -> None:
        pass


def open_streams(device: torch.device, *, in_virtual_time: bool = False) -> DeviceStreams:
    """The streams of a device. `in_virtual_time`: for an event loop with virtual time."""
    if device.type == "cuda":
        from culm.device.cuda_streams import CudaStreams  # nothing of CUDA is touched on a machine without a GPU

        return CudaStreams(device, polls=in_virtual_time)
    return HostStreams()
