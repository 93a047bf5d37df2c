"""How events of a GPU are awaited, with the objects of torch.cuda emulated: this machine may have no GPU."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from culm.device.cuda_streams import CudaStreams
from culm.device.device_copies import DeviceCopies
from culm.errors import DeviceFailed
from culm.testing.virtual_time import run_virtual


class EmulatedStream:
    """Work on it is done when a test says so."""

    def __init__(self, device: object = None) -> None:
        self.done = threading.Event()
        self.error: RuntimeError | None = None
        self.waited_for: list[EmulatedEvent] = []

    def wait_event(self, event: EmulatedEvent) -> None:
        self.waited_for.append(event)


class EmulatedEvent:
    def __init__(self, *, blocking: bool, enable_timing: bool) -> None:
        assert blocking, "a thread that waits must not spin"
        self.is_timed = enable_timing

    def record(self, stream: EmulatedStream) -> None:
        self._stream = stream

    def query(self) -> bool:
        if self._stream.error is not None:
            raise self._stream.error
        return self._stream.done.is_set()

    def synchronize(self) -> None:
        assert self._stream.done.wait(30)
        if self._stream.error is not None:
            raise self._stream.error

    def elapsed_time(self, later: EmulatedEvent) -> float:
        assert self.is_timed
        assert later.is_timed
        return 250.0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatedStream]]:
    """The emulated streams that were created: compute, to the host, to the device."""
    created: list[EmulatedStream] = []

    def create(device: object = None, priority: int = 0) -> EmulatedStream:
        del priority
        created.append(EmulatedStream(device))
        return created[-1]

    for name, value in {
        "Event": EmulatedEvent,
        "Stream": create,
        "default_stream": create,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield created
    for stream in created:
        stream.done.set()


def copies_of_a_gpu(**options: Any) -> DeviceCopies:
    copies = DeviceCopies(CudaStreams(torch.device("cuda"), **options), chunk_bytes=1 << 16)
    assert copies.device == torch.device("cuda", 0)
    return copies


def test_an_event_is_awaited_while_the_event_loop_runs(streams: list[EmulatedStream]) -> None:
    async def main() -> None:
        copies = copies_of_a_gpu()
        copy = copies.to_host([torch.ones(3)])
        compute, to_host, *_ = streams
        assert len(to_host.waited_for) == 1, "the copy waits for what computes its source"
        waiting = asyncio.ensure_future(copy.event.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        to_host.done.set()
        await asyncio.wait_for(waiting, 30)
        assert copy.event.is_complete()
        assert copy.tensors[0] is not None
        assert copy.tensors[0].tolist() == [1, 1, 1]
        compute.done.set()
        copies.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "culm-device"]

    asyncio.run(main())


def test_a_wait_that_was_cancelled_disturbs_no_later_one(streams: list[EmulatedStream]) -> None:
    async def main() -> None:
        copies = copies_of_a_gpu()
        first = asyncio.ensure_future(copies.compute_event().wait())
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.ensure_future(copies.compute_event().wait())
        await asyncio.sleep(0)
        streams[0].done.set()
        await asyncio.wait_for(second, 30)
        copies.close()

    asyncio.run(main())


def test_an_error_of_the_device_is_a_failed_device(streams: list[EmulatedStream]) -> None:
    async def main() -> None:
        copies = copies_of_a_gpu()
        waiting = asyncio.ensure_future(copies.compute_event().wait())
        await asyncio.sleep(0)
        streams[0].error = RuntimeError("CUDA error: an illegal memory access was encountered")
        streams[0].done.set()
        with pytest.raises(DeviceFailed, match="cuda:0 reported an error: CUDA error: an illegal memory access"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(DeviceFailed):
            copies.compute_event().is_complete()
        copies.close()

    asyncio.run(main())


def test_in_virtual_time_events_are_polled(streams: list[EmulatedStream]) -> None:
    async def main() -> None:
        copies = copies_of_a_gpu(polls=True)
        waiting = asyncio.ensure_future(copies.compute_event().wait())
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        streams[0].done.set()
        await waiting
        copies.close()

    run_virtual(main())


def test_the_time_between_two_events_is_that_of_the_device(streams: list[EmulatedStream]) -> None:
    gpu = CudaStreams(torch.device("cuda"))
    began, ended = gpu.compute.record(timed=True), gpu.compute.record(timed=True)
    streams[0].done.set()
    assert ended.seconds_since(began) == 0.25
    streams[0].error = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(DeviceFailed, match="unspecified launch failure"):
        ended.seconds_since(began)
    gpu.close()
