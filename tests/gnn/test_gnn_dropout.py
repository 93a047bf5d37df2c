"""Dropout: the same whoever computes it, as even as chance makes it, and nothing but what it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from culm.gnn import dropout
from culm.gnn.dropout import _at_least, drop

WORDS = st.one_of(st.sampled_from([-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 1]), st.integers(-(2**31), 2**31 - 1))


def kept(p: float, seed: int, epoch: int, layer: int, vertices: Tensor) -> Tensor:
    return drop(torch.ones(len(vertices), 300), p, seed, epoch, layer, vertices) != 0


def test_masks_keep_their_share_and_differ_by_every_part_of_their_key() -> None:
    vertices = torch.arange(400)
    mask = kept(0.3, 1, 2, 3, vertices)
    assert mask.float().mean().item() == pytest.approx(0.7, abs=0.01)
    assert mask.float().mean(0).std().item() < 0.04  # columns as even as chance makes them
    assert mask.float().mean(1).std().item() < 0.04
    for other in (kept(0.3, 9, 2, 3, vertices), kept(0.3, 1, 9, 3, vertices), kept(0.3, 1, 2, 9, vertices)):
        assert (mask == other).float().mean().item() == pytest.approx(0.58, abs=0.02)
    assert torch.equal(mask[100:200], kept(0.3, 1, 2, 3, vertices[100:200]))


@given(st.lists(WORDS, min_size=1, max_size=8), st.one_of(WORDS, st.just(2**31)))
def test_a_number_is_at_least_another_one_without_a_comparison(numbers: list[int], threshold: int) -> None:
    found = _at_least(torch.tensor(numbers, dtype=torch.int32), threshold).tolist()
    assert found == [-1 if number >= threshold else 0 for number in numbers]


@pytest.mark.parametrize("p", [0.5, 0.3, 0.123])
def test_what_is_kept_grows_and_what_is_dropped_is_zero_even_where_it_was_no_number(p: float) -> None:
    rows, vertices = torch.randn(60, 7), torch.arange(100, 160)
    rows[:, 3] = torch.nan
    mask = drop(torch.ones(60, 7), p, 1, 2, 3, vertices) != 0
    found = drop(rows, p, 1, 2, 3, vertices)
    assert torch.equal(found.nan_to_num(9.0), torch.where(mask, rows * (1 / (1 - p)), 0.0).nan_to_num(9.0))
    assert 0 < mask[:, 3].sum() < 60


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vertices = torch.randn(50, 9), torch.arange(50)
    whole = drop(rows, 0.4, 1, 2, 3, vertices)
    monkeypatch.setattr(dropout, "_PIECE", 30)
    assert torch.equal(drop(rows, 0.4, 1, 2, 3, vertices), whole)
    assert torch.equal(drop(rows.t().contiguous().t(), 0.4, 1, 2, 3, vertices), whole)
    assert drop(rows[:0], 0.4, 1, 2, 3, vertices[:0]).shape == (0, 9)


def test_the_masks_of_a_seed_stay_what_they_are() -> None:
    mask = drop(torch.ones(3, 8), 0.5, 0, 1, 2, torch.tensor([0, 5, 70_000])) != 0
    assert ["".join("01"[int(bit)] for bit in row) for row in mask] == EXPECTED


EXPECTED = ["11010110", "01100111", "10001011"]
