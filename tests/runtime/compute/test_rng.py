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
from tests.runtime import hidden_rng_layers
from tests.runtime.sample_data import Points, mean
from tests.runtime.sample_jobs import JOBS, job_with, plain
from tests.runtime.sample_layers import Dense
from torch import nn

from culm.runtime.compute.batch_loading import load_micro_batch
from culm.runtime.compute.model_state import LayerReplica
from culm.runtime.compute.rng import derive_seed, may_use_python_rng, permute, sample_indices, seed_layer
from culm.runtime.compute.user_code import call_layer


@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_a_keyed_order_is_a_permutation(count: int, secret: int) -> None:
    assert sorted(permute(position, count, secret) for position in range(count)) == list(range(count))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_every_pass_over_the_data_visits_every_item_once(count: int, size: int, per_step: int, seed: int) -> None:
    job = job_with(data=Points(count=count), micro_batch=size, global_batch=size * per_step, seed=seed)
    steps = -(-2 * count // job.global_batch)
    order = [i for step in range(steps) for micro in range(per_step) for i in sample_indices(job, step, micro)]
    assert Counter(order[:count]) == Counter(order[count : 2 * count]) == Counter(range(count))


def test_different_passes_and_seeds_have_different_orders() -> None:
    orders = {
        tuple(sample_indices(job_with(data=Points(count=20), global_batch=20, micro_batch=20, seed=seed), step, 0))
        for seed in range(3)
        for step in range(3)
    }
    assert len(orders) == 9


def test_the_order_looks_random() -> None:
    """Items of the first quarter are spread evenly over the quarters, within five standard deviations."""
    quarters = Counter(permute(position, 4000, 7) // 1000 for position in range(1000))
    assert all(abs(quarters[q] - 250) < 5 * 14 for q in range(4))


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    assert (
        len(
            {
                derive_seed(1, 2, 3),
                derive_seed(1, 3, 2),
                derive_seed(12, 3),
                derive_seed(1, 23),
                derive_seed(1, 2, 3, 0),
                derive_seed("1", "init", 2),
            }
        )
        == 6
    )
    assert 0 <= derive_seed("anything") < 2**63


def test_a_layer_draws_the_same_numbers_from_every_generator_on_every_worker() -> None:
    def draws(*where: int) -> tuple[float, float, float]:
        seed_layer(derive_seed(3, *where))
        return float(torch.rand(())), random.random(), float(np.random.uniform())

    first = draws(0, 1, 2)
    others = [draws(1, 1, 2), draws(0, 0, 2), draws(0, 1, 1)]
    assert draws(0, 1, 2) == first
    assert all(a != b for other in others for a, b in zip(first, other, strict=True))


def test_code_may_draw_if_its_file_imports_a_generator_and_is_observed_otherwise() -> None:
    assert may_use_python_rng(nn.Sequential(Dense()))
    assert may_use_python_rng(partial(mean))
    assert not may_use_python_rng(nn.Sequential(nn.Linear(1, 1), hidden_rng_layers.DeterministicLinear(1, 1)))
    assert not may_use_python_rng(hidden_rng_layers.loss)


@pytest.mark.parametrize(
    ("layer", "draws"), [(hidden_rng_layers.HiddenRandomLinear, True), (hidden_rng_layers.DeterministicLinear, False)]
)
def test_what_a_layer_draws_from_is_learned_when_it_first_trains(layer: Any, draws: bool) -> None:
    held = LayerReplica(plain, 0, layer(2, 2), {})
    held.module.eval()
    call_layer(held, (torch.ones(1, 2),), 0)
    assert held.traits.uses_python_rng is None
    held.module.train()
    call_layer(held, (torch.ones(1, 2),), 0)
    assert held.traits.uses_python_rng is draws


def test_a_micro_batch_is_the_same_whatever_was_drawn_before() -> None:
    job, device = JOBS["random data"], torch.device("cpu")
    (first,), *_ = load_micro_batch(job, 1, 2, device)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    (again,), *_ = load_micro_batch(job, 1, 2, device)
    (other,), *_ = load_micro_batch(job, 1, 3, device)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
