"""Simulated streams: computed on the CPU when they are launched, complete at virtual times drawn from a seed.

They are stricter than a GPU. Until a copy to the host is complete its target holds garbage, and the source is read as
it is at that time, so that code which reads too early or overwrites too early computes other bits. A copy to the device
fails if its source changes before it is complete.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from culm.device.device_copies import DeviceCopies
from culm.device.device_sums import KeptCommunicators, NcclSupport
from culm.errors import DeviceFailed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from culm.device.device_sums import DeviceCommunicator, DeviceSums
    from culm.device.shared_chunks import SharedHostMemory
    from culm.device.streams import DeviceEvent, DeviceStream
    from culm.transport.collectives.member_store import Rendezvous


_CHUNK_BYTES = 1 << 16


class SimulatedTimes(NamedTuple):
    """The ranges that virtual seconds are drawn from."""

    compute: tuple[float, float] = (0.005, 0.05)
    """Least and greatest duration of the work between two events of the compute stream."""
    copy: tuple[float, float] = (0.001, 0.02)
    """Least and greatest duration of one copy."""


class SimulatedEvent:
    """A point in a simulated stream."""

    def __init__(self, stream: SimulatedStream, number: int, at: float) -> None:
        self._stream, self._number, self._at = stream, number, at

    def is_complete(self) -> bool:
        self._stream.fault.check()
        return self._stream.completed_until() >= self._number

    async def wait(self) -> None:
        while not self.is_complete():
            await asyncio.sleep(max(0.0, self._stream.completes_at(self._number) - _now()))
        await self._stream.fault.wait_while_hanging()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, SimulatedEvent)
        return self._at - earlier._at

    def complete_at(self) -> float:
        """The virtual time at which it is complete."""
        return self._stream.completes_at(self._number)


@dataclass(frozen=True)
class SimulatedDeviceFault:
    """From a virtual time on a device reports an error for everything, nothing completes any more, or it is slow."""

    at: float = math.inf
    hangs: bool = False
    slowdown: float | None = None
    """How many times as long everything takes; None: the device hangs or reports an error instead."""

    def check(self) -> None:
        """Raises DeviceFailed if the device has failed."""
        if _now() >= self.at and not self.hangs and self.slowdown is None:
            raise DeviceFailed("the simulated device reported an error: its node leaves the run")

    @property
    def time_factor(self) -> float:
        """How many times as long work takes that is queued now."""
        return self.slowdown if self.slowdown is not None and _now() >= self.at else 1.0

    async def wait_while_hanging(self) -> None:
        """Never returns if the device hangs."""
        if _now() >= self.at and self.hangs:
            await asyncio.get_running_loop().create_future()


class SimulatedStream:
    """One stream. Its operations are applied when the stream is queried after their time has come."""

    def __init__(
        self,
        draw_compute: Callable[[], float],
        draw_copy: Callable[[], float],
        fault: SimulatedDeviceFault,
        *,
        computes: bool,
    ) -> None:
        """`computes`: kernels run on it, which take time between two events."""
        self.fault = fault
        self._draw_compute, self._draw_copy, self._computes = draw_compute, draw_copy, computes
        self._pending: collections.deque[tuple[float, int, Callable[[], None]]] = collections.deque()
        self._launched = self._completed = 0
        self._busy_until = 0.0

    def record(self, *, timed: bool = False) -> DeviceEvent:
        del timed  # all are
        self._append(self._draw_compute() if self._computes else 0.0, _nothing)
        return SimulatedEvent(self, self._launched, self._busy_until)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, SimulatedEvent)
        self._busy_until = max(self._busy_until, event.complete_at())

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._computes:
            target.copy_(source)
            return
        self._append(self._draw_copy(), _CopyToHost(target, source))

    def copy_to_device(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy whose result the computation, which runs ahead, needs at once."""
        target.copy_(source)
        self._append(self._draw_copy(), _SourceCheck(source))

    def reads(self, tensor: Tensor) -> None:
        pass

    def active(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _append(self, seconds: float, apply: Callable[[], None]) -> None:
        self._busy_until = max(self._busy_until, _now()) + seconds * self.fault.time_factor
        self._launched += 1
        self._pending.append((self._busy_until, self._launched, apply))

    def completed_until(self) -> int:
        """The number of the last complete operation. Applies those whose time has come."""
        while self._pending and self._pending[0][0] <= _now():
            _, self._completed, apply = self._pending.popleft()
            apply()
        return self._completed

    @property
    def is_idle(self) -> bool:
        """Whether everything that was queued is complete."""
        return self.completed_until() == self._launched

    def completes_at(self, number: int) -> float:
        """The virtual time at which an operation is complete."""
        return next((at for at, each, _ in self._pending if each == number), _now())


class _ToDeviceStream(SimulatedStream):
    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copy_to_device(target, source)


class _CopyToHost:
    """A copy that is made when it is complete. Until then its target is garbage."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source
        _bytes_of(target).fill_(0xFF)  # NaN in every floating type

    def __call__(self) -> None:
        self._target.copy_(self._source)


class _SourceCheck:
    """Raises if the source of a copy to the device has changed before the copy was complete."""

    def __init__(self, source: Tensor) -> None:
        self._source, self._expected = source, source.clone()

    def __call__(self) -> None:
        assert torch.equal(_bytes_of(self._source), _bytes_of(self._expected)), "a slab was overwritten during a copy"


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _nothing() -> None:
    pass


def _now() -> float:
    return asyncio.get_running_loop().time()


class SimulatedSums:
    """Marks a simulated device that sums with others; the simulated network makes the sums (`SimulatedGroup`)."""

    def __init__(self, compute: DeviceStream) -> None:
        self.compute = compute
        self.kept = KeptCommunicators()

    def support(self) -> NcclSupport:
        return NcclSupport()

    def connect(self, rendezvous: Rendezvous) -> DeviceCommunicator:
        del rendezvous
        raise RuntimeError("a simulated device has no communicator")


class SimulatedStreams:
    """The streams of a simulated device, whose memory is that of the CPU."""

    is_synchronous = False
    peak_bytes = 0

    def __init__(
        self,
        seed: int,
        times: SimulatedTimes | None = None,
        fault: SimulatedDeviceFault | None = None,
        *,
        shared_memory: SharedHostMemory | None = None,
        free_bytes: int = 0,
    ) -> None:
        """`shared_memory`: where its host memory comes from; None: ordinary memory."""
        self.shared_memory, self.free_bytes = shared_memory, free_bytes
        times, rng = times or SimulatedTimes(), random.Random(f"device {seed}")
        self.device = torch.device("cpu")
        draw_compute, draw_copy = (lambda: rng.uniform(*times.compute)), (lambda: rng.uniform(*times.copy))
        common = draw_compute, draw_copy, fault or SimulatedDeviceFault()
        streams = (
            SimulatedStream(*common, computes=True),
            SimulatedStream(*common, computes=False),
            _ToDeviceStream(*common, computes=False),
            SimulatedStream(*common, computes=False),
        )
        self._streams = streams
        self.compute: DeviceStream = streams[0]
        self.to_host: DeviceStream = streams[1]
        self.to_device: DeviceStream = streams[2]
        self.to_host_later: DeviceStream = streams[3]
        self.sums: DeviceSums = SimulatedSums(self.compute)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was queued on the device is complete."""
        return all(stream.is_idle for stream in self._streams)

    def host_memory(self, size: int) -> memoryview:
        if self.shared_memory is not None:
            return self.shared_memory.chunks.allocate(size)
        return memoryview(bytearray(size))

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SimulatedDevice:
    """The simulated devices of a cluster."""

    seed: int = 0
    times: SimulatedTimes | None = None
    faults: Mapping[int, SimulatedDeviceFault] = field(default_factory=dict)
    """By worker."""
    slab_bytes: int = 1 << 40
    """The cap of each worker's pool of slabs."""
    free_bytes: int | None = None
    """Memory that each device has to spare; None: none at the workers with odd numbers, as much as they want at the
    others, so that both ways of keeping sums are used."""
    min_off_loaded_bytes: int = 1
    """What shadows keep leaves the device from this size on."""
    opened: list[DeviceCopies] = field(default_factory=list)
    """One for each worker, in the order of their start."""

    def open_for(self, worker: int) -> Callable[[torch.device, int], DeviceCopies]:
        """What opens the device of a worker."""

        def open_simulated(device: torch.device, workers_per_node: int) -> DeviceCopies:
            del device, workers_per_node
            free = (0 if worker % 2 else 1 << 40) if self.free_bytes is None else self.free_bytes
            fault = self.faults.get(worker)
            streams = SimulatedStreams(1000 * self.seed + worker, self.times, fault, free_bytes=free)
            self.opened.append(DeviceCopies(streams, self.slab_bytes, _CHUNK_BYTES, self.min_off_loaded_bytes))
            return self.opened[-1]

        return open_simulated
