"""Streams, slabs and launched actions on a real GPU. `pytest -m gpu tests/device tests/runtime/test_gpu.py`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.runtime.sample_jobs import everything, job_with, tiny_gpt

from culm.device.device_copies import DeviceCopies, open_device
from culm.device.shared_chunks import SharedChunks
from culm.runtime.compute.grad_accumulator import GradientAccumulator
from culm.runtime.executor import Executor
from culm.runtime.launched_actions import LaunchedAction, LaunchedActions
from culm.testing import Faults, simulate
from culm.transport.frames.frame_codec import SharedPlace, tensor_bytes
from culm.transport.frames.shared_memory import MappedChunks, SharedFrames

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda")
BUSY_CYCLES = 200_000_000
"""About 0.1 s of a GPU."""


@pytest.fixture(autouse=True)
def _usual_algorithms() -> Iterator[None]:
    """Exact runs in this process choose deterministic algorithms for all that follow."""
    yield
    torch.use_deterministic_algorithms(False)


def with_copies(test: Callable[[DeviceCopies], Any]) -> None:
    async def main() -> None:
        copies = open_device(GPU)
        try:
            async with asyncio.timeout(60):
                await test(copies)
        finally:
            copies.close()

    asyncio.run(main())


def test_no_stream_of_a_group_is_one_of_the_streams_for_copies() -> None:
    async def test(copies: DeviceCopies) -> None:
        streams = copies.streams
        own = {each.cuda for each in (streams.to_host, streams.to_host_later, streams.to_device)}  # type: ignore[attr-defined]
        assert len(own) == 3
        assert own.isdisjoint(torch.cuda.Stream(GPU) for _ in range(64))

    with_copies(test)


def test_slabs_are_page_locked() -> None:
    async def test(copies: DeviceCopies) -> None:
        copy = copies.to_host([torch.ones(1 << 20, device=GPU)])
        await copy.event.wait()
        (found,) = copy.tensors
        assert found is not None
        assert found.is_pinned()
        assert copies.shared_memory is not None
        assert copies.shared_memory.chunks.find(found.data_ptr(), found.nbytes), "other processes can map it"

    with_copies(test)


def test_memory_of_another_process_is_page_locked_until_it_is_not_needed() -> None:
    """Mapped a second time here, as another process would."""

    async def test(copies: DeviceCopies) -> None:
        chunks = SharedChunks()
        frames = SharedFrames(chunks=chunks)
        assert copies.shared_memory is not None
        mapped = MappedChunks(lambda number: None, copies.shared_memory.locker)
        sent = torch.frombuffer(chunks.allocate(1 << 22), dtype=torch.float32)
        sent.copy_(torch.arange(1 << 20))
        payload = [tensor_bytes(sent)]
        announced = frames.put("b", payload, set())
        assert isinstance(announced, list)
        assert mapped.map(announced[0])
        locked = threading.Event()
        mapped.lock(0, locked.set)
        assert await asyncio.to_thread(locked.wait, 30)
        assert mapped.is_locked(0)
        place = frames.put("b", payload, {0})
        assert isinstance(place, SharedPlace)
        (found,) = mapped.tensors(place, [sent.to("meta")])
        assert found.is_pinned()
        torch.cuda._sleep(BUSY_CYCLES)
        began = time.perf_counter()
        (moved,) = copies.to_device((found,))
        assert time.perf_counter() - began < 0.05, "the host does not wait for the copy"
        assert moved is not None
        assert torch.equal(moved.cpu(), sent)
        await copies.drain(60.0)
        mapped.close()
        del found, moved
        torch.ones(1, device=GPU).sum().item()
        frames.close()

    with_copies(test)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_go_to_the_host_and_back_unchanged(kind: torch.dtype) -> None:
    async def test(copies: DeviceCopies) -> None:
        value = (torch.randn(300, 500, device=GPU) * 100).to(kind).t()
        copy = copies.to_host([value, None])
        await copy.event.wait()
        moved = copies.to_device(copy.tensors)
        assert moved[0] is not None
        assert moved[0].is_cuda
        assert moved[0].stride() == value.stride()
        assert torch.equal(moved[0], value)

    with_copies(test)


def test_the_host_waits_for_nothing_while_the_device_is_busy() -> None:
    async def test(copies: DeviceCopies) -> None:
        value = torch.ones(1 << 20, device=GPU)
        await copies.to_host([value]).event.wait()  # the first slab is allocated here
        copies.to_device((torch.ones(16),))  # memory of the device is allocated here, which waits for it
        await copies.drain(60.0)
        torch.cuda._sleep(BUSY_CYCLES)
        value.add_(1)
        began = time.perf_counter()
        copy = copies.to_host([value])
        copies.to_device((torch.ones(16),))
        assert not copy.event.is_complete()
        launched = time.perf_counter() - began
        await copy.event.wait()
        assert time.perf_counter() - began > 5 * launched
        assert copy.tensors[0] is not None
        assert copy.tensors[0][0] == 2

    with_copies(test)


def test_the_event_loop_runs_while_an_event_is_awaited() -> None:
    async def test(copies: DeviceCopies) -> None:
        torch.cuda._sleep(BUSY_CYCLES)
        waiting = asyncio.ensure_future(copies.compute_event().wait())
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
        await waiting
        assert turns > 5

    with_copies(test)


def test_memory_of_the_device_is_not_used_again_too_early() -> None:
    """Outputs and inputs are dropped while copies of them are queued behind a busy device."""

    async def test(copies: DeviceCopies) -> None:
        for round_ in range(20):
            torch.cuda._sleep(BUSY_CYCLES // 50)
            copy = copies.to_host([torch.full((1 << 18,), float(round_), device=GPU)])
            torch.full((1 << 18,), -1.0, device=GPU)
            await copy.event.wait()
            (moved,) = copies.to_device(copy.tensors)
            del copy
            assert moved is not None
            torch.cuda._sleep(BUSY_CYCLES // 50)
            doubled = moved * 2
            del moved
            copies.to_device((torch.full((1 << 18,), -1.0),))
            assert bool((doubled == 2 * round_).all())
        await copies.drain(60.0)

    with_copies(test)


def test_closing_ends_the_threads() -> None:
    async def test(copies: DeviceCopies) -> None:
        torch.cuda._sleep(BUSY_CYCLES)
        await copies.drain(60.0)

    with_copies(test)
    assert not [thread for thread in threading.enumerate() if thread.name == "culm-device"]


def test_exact_sums_on_the_device_have_the_bits_of_those_on_the_cpu() -> None:
    gradients = [torch.randn(1000) * 10**exponent for exponent in range(-6, 4)]
    sums = []
    for device in (torch.device("cpu"), GPU):
        parameter = torch.nn.Parameter(torch.zeros(1000, device=device))
        accumulator = GradientAccumulator([parameter], exact=True)
        for gradient in gradients:
            parameter.grad = gradient.to(device)
            accumulator.add_micro_batch()
        if accumulator.deferred_checks is not None:
            accumulator.load_checks(accumulator.deferred_checks.cpu())
        sums.append((accumulator.total.cpu(), accumulator.bound, accumulator.is_finite))
    assert torch.equal(sums[0][0], sums[1][0])
    assert sums[0][1:] == sums[1][1:]


def test_no_action_of_a_step_synchronises_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises in every operation that waits for the device, from the second step on: the first one looks at how
    layers treat their inputs. Actions of other workers run in between, because they share a process here."""
    run_action = Executor.run_action

    async def checked(self: Executor, step: int, *rest: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if step > 0 else "default")
        try:
            await run_action(self, step, *rest)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Executor, "run_action", checked)
    job = job_with(tiny_gpt, device="cuda", steps=3)
    assert simulate(job, pipelines=2, stages=3).summary["steps"] == 3


def test_several_actions_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    add = LaunchedActions.add

    def counted(self: LaunchedActions, action: LaunchedAction) -> None:
        torch.cuda._sleep(BUSY_CYCLES // 20)  # the next action is not complete when the one after it is launched
        add(self, action)
        depths.append(len(self._launched))

    monkeypatch.setattr(LaunchedActions, "add", counted)
    simulate(job_with(everything, device="cuda", steps=2), pipelines=2, stages=3)
    assert max(depths) == 2


@pytest.mark.parametrize("at", ["launch 1F1", "launch 1B0"])
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_a_halt_with_kernels_under_way_changes_no_bit(strategy: str, at: str) -> None:
    job = job_with(everything, device="cuda", exact=True, steps=4)
    failure_free = simulate(job, pipelines=2, stages=3)
    faults = Faults().kill(node=1, step=1, at=at)
    disturbed = simulate(job, pipelines=2, stages=3, strategy=strategy, faults=faults)
    assert disturbed.faults_not_reached(faults) == []
    assert disturbed.state_sha256 == failure_free.state_sha256
