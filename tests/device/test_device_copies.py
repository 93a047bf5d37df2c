"""Copies between a device and slabs: complete only when the device says so, and never over memory that is in use."""

from __future__ import annotations

import asyncio

import pytest
import torch

from culm.device.device_copies import DeviceCopies, open_device
from culm.device.simulated_streams import SimulatedDeviceFault, SimulatedStreams, SimulatedTimes
from culm.errors import DeviceFailed
from culm.testing.virtual_time import run_virtual

SLOW = SimulatedTimes(compute=(1.0, 1.0), copy=(1.0, 1.0))
ONE_SLAB = 4096


def simulated(cap: int = 1 << 30, fault: SimulatedDeviceFault | None = None) -> DeviceCopies:
    return DeviceCopies(SimulatedStreams(0, SLOW, fault), cap, 1 << 16)


def test_on_a_cpu_nothing_is_copied() -> None:
    async def main() -> None:
        copies = open_device(torch.device("cpu"))
        values = (torch.ones(2), None)
        assert copies.to_host(values).tensors == values
        assert copies.to_device(values) is values
        assert await copies.read([values[0]]) == [values[0]]
        assert copies.compute_event().is_complete()
        await copies.drain(0.0)
        assert copies.pool.peak_bytes == 0

    asyncio.run(main())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_to_the_host_is_garbage_until_it_is_complete(kind: torch.dtype) -> None:
    async def main() -> None:
        copies, value = simulated(), torch.arange(6).to(kind).reshape(2, 3)
        copy = copies.to_host((value,))
        (found,) = copy.tensors
        assert found is not None
        assert not copy.event.is_complete()
        assert not torch.equal(found, value)
        await copy.event.wait()
        assert torch.equal(found, value)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)  # the computation, then the copy

    run_virtual(main())


def test_a_slab_that_is_being_written_is_not_lent_again() -> None:
    async def main() -> None:
        copies = simulated()
        first = copies.to_host((torch.ones(4),))
        slab, event = first.slab, first.event
        del first
        assert copies.to_host((torch.ones(4),)).slab is not slab
        await event.wait()
        assert copies.to_host((torch.ones(4),)).slab is slab

    run_virtual(main())


def test_a_copy_to_the_device_holds_its_source() -> None:
    async def main() -> None:
        copies = simulated()
        output = copies.to_host((torch.ones(4),))
        await output.event.wait()
        slab = output.slab
        (moved,) = copies.to_device(output.tensors)
        del output
        assert copies.to_host((torch.zeros(4),)).slab is not slab
        assert torch.equal(moved, torch.ones(4))  # type: ignore[arg-type]
        await copies.drain(60.0)

    run_virtual(main())


def test_a_source_that_changes_during_a_copy_to_the_device_is_found() -> None:
    async def main() -> None:
        copies, source = simulated(), torch.ones(4)
        copies.to_device((source,))
        source.zero_()
        with pytest.raises(AssertionError, match="overwritten during a copy"):
            await copies.drain(60.0)

    run_virtual(main())


def test_at_the_cap_kept_outputs_are_evicted_and_a_commit_is_not_waited_for() -> None:
    async def main() -> None:
        copies = simulated(cap=ONE_SLAB)
        kept = [copies.to_host((torch.ones(4),)) for _ in range(3)]
        await copies.drain(60.0)
        released: list[bool] = []

        def evict() -> bool:
            if len(kept) > 2:
                kept.pop(0)
                return True
            return False

        await copies.make_room(evict, lambda: released.append(True))
        assert released
        assert len(kept) == 2, "what cannot be evicted stays, above the cap"
        assert copies.pool.lent_bytes == 2 * ONE_SLAB

    run_virtual(main())


def test_at_the_cap_the_acknowledgement_of_a_reader_is_waited_for() -> None:
    async def main() -> None:
        copies = simulated(cap=ONE_SLAB)
        kept = [copies.to_host((torch.ones(4),)) for _ in range(2)]
        await copies.drain(60.0)
        sent = [copy.reader_tensors() for copy in kept]

        def evict() -> bool:
            found = next((number for number, copy in enumerate(kept) if not copy.has_readers), None)
            if found is not None:
                kept.pop(found)
            return found is not None

        making_room = asyncio.create_task(copies.make_room(evict, lambda: None))
        await asyncio.sleep(1.0)
        assert not making_room.done()
        sent.pop()
        await making_room
        assert len(kept) == 1

    run_virtual(main())


def test_a_reader_that_keeps_what_it_got_is_waited_for_once() -> None:
    async def main() -> None:
        copies = simulated(cap=ONE_SLAB)
        kept = [copies.to_host((torch.ones(4),)) for _ in range(2)]
        await copies.drain(60.0)
        sent = [copy.reader_tensors() for copy in kept]
        loop = asyncio.get_running_loop()

        async def seconds_for_room() -> float:
            began = loop.time()
            await copies.make_room(lambda: False, lambda: None)
            return loop.time() - began

        assert [await seconds_for_room() > 0 for _ in range(3)] == [True, False, False]
        kept.pop()
        sent.pop()
        assert await seconds_for_room() == 0, "there is room"
        kept.append(copies.to_host((torch.ones(4),)))
        await copies.drain(60.0)
        assert await seconds_for_room() > 0

    run_virtual(main())


def test_a_device_that_does_not_finish_in_time_fails() -> None:
    async def main() -> None:
        copies = simulated(fault=SimulatedDeviceFault(at=0.5, hangs=True))
        copies.to_host((torch.ones(4),))
        with pytest.raises(DeviceFailed, match="has not finished within 5 s"):
            await copies.drain(5.0)

    run_virtual(main())


def test_a_failed_device_is_reported_by_the_next_event() -> None:
    async def main() -> None:
        copies = simulated(fault=SimulatedDeviceFault(at=0.5))
        copy = copies.to_host((torch.ones(4),))
        with pytest.raises(DeviceFailed):
            await copy.event.wait()

    run_virtual(main())


def test_workers_that_share_a_device_share_its_room() -> None:
    def room(workers: int, size: int) -> bool:
        return DeviceCopies(SimulatedStreams(0, free_bytes=100), workers=workers).has_room(size)

    assert room(1, 100)
    assert room(4, 25)
    assert not room(4, 26)
