"""Dropout: the same mask in every process, uniform, and correct values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from culm.gnn.model import dropout
from culm.gnn.model.dropout import _at_least_mask, dropout_rows

WORDS = st.one_of(st.sampled_from([-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 1]), st.integers(-(2**31), 2**31 - 1))


def kept(p: float, seed: int, epoch: int, layer: int, vertices: Tensor) -> Tensor:
    return dropout_rows(torch.ones(len(vertices), 300), p, seed, epoch, layer, vertices) != 0


def test_masks_keep_their_share_and_depend_on_every_part_of_the_key() -> None:
    vertices = torch.arange(400)
    mask = kept(0.3, 1, 2, 3, vertices)
    assert mask.float().mean().item() == pytest.approx(0.7, abs=0.01)
    assert mask.float().mean(0).std().item() < 0.04  # columns are uniform
    assert mask.float().mean(1).std().item() < 0.04
    for other in (kept(0.3, 9, 2, 3, vertices), kept(0.3, 1, 9, 3, vertices), kept(0.3, 1, 2, 9, vertices)):
        assert (mask == other).float().mean().item() == pytest.approx(0.58, abs=0.02)
    assert torch.equal(mask[100:200], kept(0.3, 1, 2, 3, vertices[100:200]))


@given(st.lists(WORDS, min_size=1, max_size=8), st.one_of(WORDS, st.just(2**31)))
def test_the_threshold_mask_equals_a_comparison(numbers: list[int], threshold: int) -> None:
    mask = _at_least_mask(torch.tensor(numbers, dtype=torch.int32), threshold).tolist()
    assert mask == [-1 if number >= threshold else 0 for number in numbers]


@pytest.mark.parametrize("p", [0.5, 0.3, 0.123])
def test_kept_values_are_scaled_and_dropped_ones_are_zero_even_for_nan(p: float) -> None:
    rows, vertices = torch.randn(60, 7), torch.arange(100, 160)
    rows[:, 3] = torch.nan
    mask = dropout_rows(torch.ones(60, 7), p, 1, 2, 3, vertices) != 0
    dropped = dropout_rows(rows, p, 1, 2, 3, vertices)
    assert torch.equal(dropped.nan_to_num(9.0), torch.where(mask, rows * (1 / (1 - p)), 0.0).nan_to_num(9.0))
    assert 0 < mask[:, 3].sum() < 60


def test_the_chunk_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vertices = torch.randn(50, 9), torch.arange(50)
    whole = dropout_rows(rows, 0.4, 1, 2, 3, vertices)
    monkeypatch.setattr(dropout, "_VALUES_PER_CHUNK", 30)
    assert torch.equal(dropout_rows(rows, 0.4, 1, 2, 3, vertices), whole)
    assert torch.equal(dropout_rows(rows.t().contiguous().t(), 0.4, 1, 2, 3, vertices), whole)
    assert dropout_rows(rows[:0], 0.4, 1, 2, 3, vertices[:0]).shape == (0, 9)


def test_the_masks_of_a_seed_never_change() -> None:
    mask = dropout_rows(torch.ones(3, 8), 0.5, 0, 1, 2, torch.tensor([0, 5, 70_000])) != 0
    assert ["".join("01"[int(bit)] for bit in row) for row in mask] == EXPECTED


EXPECTED = ["11010110", "01100111", "10001011"]
