"""Micro-batches made ahead: the same ones, each made once, a few at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from culm.errors import LayerFailed
from culm.job import Job
from culm.runtime.clock import RealClock
from culm.runtime.data import Supply, Values, micro_batch

from .jobs import plain

CPU = torch.device("cpu")
ROOM = 1e9


class Watched:
    """A data set that writes down which items were asked for."""

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


def supply(of: Job, wanted: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> Supply:
    made = Supply(of, CPU, RealClock(), wanted)
    made.begin(0)
    return made


def same(one: tuple[Values, Any], other: tuple[Values, Any]) -> bool:
    (a,), (b,) = one[0], other[0]
    return torch.equal(a, b) and torch.equal(one[1], other[1])


def test_nothing_is_made_ahead_before_it_is_known_how_long_it_takes(data: Watched) -> None:
    made = supply(described(data))
    assert not made.ahead(ROOM)
    made.take(0, 0)
    assert made.ahead(ROOM)
    assert not made.ahead(0.0)


def test_what_was_made_ahead_is_what_would_have_been_made(data: Watched) -> None:
    of = described(data)
    made = supply(of)
    made.take(0, 0)
    assert made.ahead(ROOM) and made.ahead(ROOM)
    for micro in range(1, 6):
        assert same(made.take(0, micro), micro_batch(of, 0, micro, CPU))


def test_few_lie_ready_at_a_time_and_none_is_made_twice(data: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culm.runtime.data._READY", 4 * 64)  # bytes: of four, with two items of two times 16 each
    made = supply(described(data))
    for step in range(3):
        made.begin(step)
        for micro in range(6):
            made.take(step, micro)
            while made.ahead(ROOM):
                pass
            assert len(made._ready) <= 4
    assert len(data.asked) == 3 * 12
    assert not made._ready


def test_the_first_of_the_next_step_are_made_in_the_bubble_of_this_one_but_none_after_the_last(data: Watched) -> None:
    made = supply(described(data))
    for micro in range(6):
        made.take(0, micro)
    while made.ahead(ROOM):
        pass
    assert sorted(made._ready) == [(1, micro) for micro in range(6)]
    made.begin(2)
    for micro in range(6):
        made.take(2, micro)
    made._ready.clear()
    assert not made.ahead(ROOM)


def test_a_recovery_may_ask_for_any_of_them(data: Watched) -> None:
    of = described(data)
    made = supply(of, (0, 2, 4))
    made.take(0, 0)
    assert made.ahead(ROOM)
    for micro in (5, 4, 2, 2):
        assert same(made.take(0, micro), micro_batch(of, 0, micro, CPU))


def test_an_item_that_can_not_be_read_fails_the_step_that_takes_it_and_none_before(data: Watched) -> None:
    made = supply(described(data))
    made.take(0, 0)
    data.broken = True
    while made.ahead(ROOM):
        pass
    with pytest.raises(LayerFailed, match=r"Job\.data raised OSError"):
        made.take(0, 1)
