"""Samples and draws are functions of (seed, step, micro-batch, layer): every pass visits every item once."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from culm.runtime.call import call_layer
from culm.runtime.data import micro_batch
from culm.runtime.keys import key, knows_outside, permute, sample_indices, seed_layer
from culm.runtime.state import HeldLayer

from . import quiet
from .jobs import JOBS, but, plain
from .layers import Dense
from .samples import Points, mean


@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_a_keyed_order_is_a_permutation(count: int, secret: int) -> None:
    assert sorted(permute(position, count, secret) for position in range(count)) == list(range(count))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_every_pass_over_the_data_visits_every_item_once(count: int, size: int, per_step: int, seed: int) -> None:
    job = but(data=Points(count=count), micro_batch=size, global_batch=size * per_step, seed=seed)
    steps = -(-2 * count // job.global_batch)
    order = [i for step in range(steps) for micro in range(per_step) for i in sample_indices(job, step, micro)]
    assert Counter(order[:count]) == Counter(order[count : 2 * count]) == Counter(range(count))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(sample_indices(but(data=Points(count=20), global_batch=20, micro_batch=20, seed=seed), step, 0))
        for seed in range(3)
        for step in range(3)
    }
    assert len(orders) == 9


def test_the_order_looks_random() -> None:
    """Where items of the first quarter go: spread evenly over the quarters, within five standard deviations."""
    quarters = Counter(permute(position, 4000, 7) // 1000 for position in range(1000))
    assert all(abs(quarters[q] - 250) < 5 * 14 for q in range(4))


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    assert len({key(1, 2, 3), key(1, 3, 2), key(12, 3), key(1, 23), key(1, 2, 3, 0), key("1", "init", 2)}) == 6
    assert 0 <= key("anything") < 2**63


def test_a_layer_draws_the_same_from_every_generator_whoever_runs_it() -> None:
    def draws(*where: int) -> tuple[float, float, float]:
        seed_layer(key(3, *where))
        return float(torch.rand(())), random.random(), float(np.random.uniform())

    first = draws(0, 1, 2)
    others = [draws(1, 1, 2), draws(0, 0, 2), draws(0, 1, 1)]
    assert draws(0, 1, 2) == first
    assert all(a != b for other in others for a, b in zip(first, other, strict=True))


def test_code_is_believed_to_draw_where_its_file_could_and_watched_where_not() -> None:
    assert knows_outside(nn.Sequential(Dense()))
    assert knows_outside(partial(mean))
    assert not knows_outside(nn.Sequential(nn.Linear(1, 1), quiet.Steady(1, 1)))
    assert not knows_outside(quiet.loss)


@pytest.mark.parametrize(("layer", "draws"), [(quiet.Chance, True), (quiet.Steady, False)])
def test_what_a_layer_draws_from_is_learned_when_it_first_trains(layer: Any, draws: bool) -> None:
    held = HeldLayer(plain, 0, layer(2, 2), {})
    held.module.eval()
    call_layer(held, (torch.ones(1, 2),), 0)
    assert held.manner.draws is None
    held.module.train()
    call_layer(held, (torch.ones(1, 2),), 0)
    assert held.manner.draws is draws


def test_a_micro_batch_is_the_same_whatever_was_drawn_before() -> None:
    job, device = JOBS["random data"], torch.device("cpu")
    (first,), _ = micro_batch(job, 1, 2, device)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    (again,), _ = micro_batch(job, 1, 2, device)
    (other,), _ = micro_batch(job, 1, 3, device)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
