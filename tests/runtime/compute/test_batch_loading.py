"""Prefetched micro-batches: the same tensors, each loaded once, a few at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runtime.sample_jobs import plain
from torch import Tensor

from culm.errors import LayerFailed
from culm.job import Job
from culm.runtime.clock import RealClock
from culm.runtime.compute.batch_loading import MicroBatch, MicroBatchPrefetcher, load_micro_batch

CPU = torch.device("cpu")
ROOM = 1e9


class Watched:
    """A data set that records which items were read."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.broken = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        if self.broken:
            raise OSError("gone")
        return torch.full((4,), float(index)), torch.full((4,), float(index))


@pytest.fixture
def data() -> Watched:
    return Watched()


def described(data: Watched) -> Job:
    return replace(plain, data=data, steps=3, global_batch=12, micro_batch=2)


def supply(of: Job, wanted: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> MicroBatchPrefetcher:
    made = MicroBatchPrefetcher(of, CPU, RealClock(), wanted)
    made.start_step(0)
    return made


def same(one: MicroBatch, other: MicroBatch) -> bool:
    (a,), (b,) = one[0], other[0]
    return torch.equal(a, b) and torch.equal(one[1], other[1])


def test_nothing_is_prefetched_before_the_time_to_load_is_known(data: Watched) -> None:
    made = supply(described(data))
    assert not made.prefetch(ROOM)
    made.take(0, 0)
    assert made.prefetch(ROOM)
    assert not made.prefetch(0.0)


def test_a_prefetched_micro_batch_equals_one_that_is_loaded_on_demand(data: Watched) -> None:
    of = described(data)
    made = supply(of)
    made.take(0, 0)
    assert made.prefetch(ROOM) and made.prefetch(ROOM)
    for micro in range(1, 6):
        assert same(made.take(0, micro), load_micro_batch(of, 0, micro, CPU))


def test_few_micro_batches_are_prefetched_at_a_time_and_none_is_loaded_twice(
    data: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "culm.runtime.compute.batch_loading._MAX_PREFETCH_BYTES", 4 * 64
    )  # bytes: of four, with two items of two times 16 each
    made = supply(described(data))
    for step in range(3):
        made.start_step(step)
        for micro in range(6):
            made.take(step, micro)
            while made.prefetch(ROOM):
                pass
            assert len(made._prefetched) <= 4
    assert len(data.asked) == 3 * 12
    assert not made._prefetched


def test_the_next_step_is_prefetched_in_the_bubbles_of_this_one_but_none_after_the_last(data: Watched) -> None:
    made = supply(described(data))
    for micro in range(6):
        made.take(0, micro)
    while made.prefetch(ROOM):
        pass
    assert sorted(made._prefetched) == [(1, micro) for micro in range(6)]
    made.start_step(2)
    for micro in range(6):
        made.take(2, micro)
    made._prefetched.clear()
    assert not made.prefetch(ROOM)


def test_a_recovery_may_take_any_micro_batch(data: Watched) -> None:
    of = described(data)
    made = supply(of, (0, 2, 4))
    made.take(0, 0)
    assert made.prefetch(ROOM)
    for micro in (5, 4, 2, 2):
        assert same(made.take(0, micro), load_micro_batch(of, 0, micro, CPU))


def test_an_unreadable_item_fails_the_step_that_uses_it_and_no_earlier_one(data: Watched) -> None:
    made = supply(described(data))
    made.take(0, 0)
    data.broken = True
    while made.prefetch(ROOM):
        pass
    with pytest.raises(LayerFailed, match=r"Job\.data raised OSError"):
        made.take(0, 1)
