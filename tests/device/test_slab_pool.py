"""A slab is lent to one writer, kept and read at the same time, and free again when nobody has a tensor of it."""

from __future__ import annotations

import asyncio
import threading

import torch

from culm.device.slab_pool import SlabPool, layout_of


def pool(cap: int = 1 << 30) -> SlabPool:
    return SlabPool(lambda size: memoryview(bytearray(size)), cap, chunk_bytes=1 << 16)


def frame(fill: float = 0.0, size: int = 8) -> tuple[torch.Tensor, ...]:
    return (torch.full((size,), fill),)


def test_tensors_in_a_slab_look_like_those_it_was_taken_for() -> None:
    given = (
        torch.randn(3, 5).t(),
        None,
        torch.zeros(0, 4),
        torch.randn(2, dtype=torch.float64).requires_grad_(),
        torch.arange(7, dtype=torch.int16),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    )
    found = pool().take(given).tensors()
    for mine, original in zip(found, given, strict=True):
        assert (mine is None) == (original is None)
        if mine is not None and original is not None:
            assert (mine.shape, mine.dtype, mine.requires_grad) == (
                original.shape,
                original.dtype,
                original.requires_grad,
            )
            assert mine.stride() == original.stride()
            mine.detach().copy_(original)
            assert torch.equal(mine, original)


def test_tensors_of_one_frame_do_not_overlap() -> None:
    given = tuple(torch.zeros(size, dtype=torch.uint8) for size in (1, 63, 64, 65))
    found = [each for each in pool().take(given).tensors() if each is not None]
    for value, tensor in enumerate(found):
        tensor.fill_(value)
    assert [set(tensor.tolist()) for tensor in found] == [{0}, {1}, {2}, {3}]


def test_a_slab_is_used_again_when_keeper_and_readers_have_dropped_their_tensors() -> None:
    slabs = pool()
    slab = slabs.take(frame())
    kept, sent = slab.tensors(), slab.tensors(reader=True)
    view = sent[0][2:4]  # type: ignore[index]
    assert (slab.generation, slab.readers) == (1, 1)
    del sent
    assert slab.readers == 1, "a view of a reader's tensor holds the slab as well"
    del view
    assert slab.readers == 0
    other = slabs.take(frame())
    assert other is not slab
    assert slabs.lent_bytes == 2 * slab.size
    del kept
    again = slabs.take(frame())
    assert again is slab
    assert again.generation == 2


def test_slabs_of_other_sizes_are_not_mixed_and_little_is_unused() -> None:
    slabs = pool()
    for size in (1 << 12, 5000, 10_000, 100_000, 1_000_000, (1 << 20) + 1):
        slab = slabs.take((torch.empty(size, dtype=torch.uint8),))
        assert size <= slab.size <= max(1.25 * size + 64, 4096)


def test_tensors_may_be_dropped_by_another_thread_and_wake_a_waiter() -> None:
    async def main() -> None:
        slabs = pool()
        sent = [slabs.take(frame()).tensors(reader=True)]
        waiting = asyncio.create_task(slabs.wait_for_readers())
        await asyncio.sleep(0)
        assert slabs.has_readers
        thread = threading.Thread(target=sent.clear)
        thread.start()
        assert await asyncio.wait_for(waiting, 10)
        thread.join()
        assert not slabs.has_readers
        assert not await slabs.wait_for_readers(), "a drop that came before the wait is not waited for"
        assert slabs.lent_bytes == 0

    asyncio.run(main())


def test_layouts_are_aligned() -> None:
    layouts, size = layout_of((torch.zeros(1), torch.zeros(17), None))
    assert [layout and layout.offset for layout in layouts] == [0, 64, None]
    assert size == 64 + 128
