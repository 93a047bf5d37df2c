"""Layers stepped by one call of an optimizer equal layers that are stepped one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.runtime.sample_jobs import JOBS, plain
from torch import nn
from torch.optim import Optimizer

from culm.runtime.compute.fused_step import FusedOptimizer, fuse_units
from culm.runtime.compute.model_state import ModelState, OptimizerUnit

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


class Own(torch.optim.AdamW):
    """A user's optimizer: it may use all its parameters together."""


def grouped(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Matrices decay, biases do not."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0, "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.1)


def hooked(parameters: Iterable[nn.Parameter]) -> Optimizer:
    made = torch.optim.AdamW(parameters, lr=0.1)
    made.register_step_post_hook(lambda *_: None)
    return made


def halved(step: int) -> float:
    return 0.5**step


def state(optimizer: Callable[[Any], Optimizer], dtype: torch.dtype = torch.float32) -> ModelState:
    layers = [partial(nn.Linear, 4, 4, dtype=dtype)] * 3
    return ModelState(replace(plain, layers=layers, tied=(), optimizer=optimizer, lr_schedule=halved), range(3))


def units(of: ModelState) -> list[OptimizerUnit]:
    return [unit for _, unit in of.units()]


def gradients(of: ModelState, turn: int) -> None:
    drawn = torch.Generator().manual_seed(turn)
    for unit in units(of):
        for parameter in unit.parameters.values():
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=drawn))


def trained(optimizer: Callable[[Any], Optimizer], *, together: bool, dtype: torch.dtype = torch.float32) -> ModelState:
    made = state(optimizer, dtype)
    for turn in range(3):
        gradients(made, turn)
        if together:
            made.step(turn)
            continue
        for one in units(made):
            one.step(turn, made.rates)
    return made


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), grouped, hooked, Own], ids=lambda o: o.__name__)
def test_a_fused_step_trains_the_same_as_separate_steps(optimizer: Callable[[Any], Optimizer]) -> None:
    one, other = trained(optimizer, together=True), trained(optimizer, together=False)
    assert one.digests(one.layers) == other.digests(other.layers)


MANNERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.2, maximize=True),
    "Adam, decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2, maximize=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, betas=(0.8, 0.95), eps=1e-3),
}


@pytest.mark.parametrize("optimizer", MANNERS.values(), ids=MANNERS)
def test_small_weights_are_stepped_by_fewer_calls_to_the_same_bits_in_every_manner(
    optimizer: Callable[[Any], Optimizer],
) -> None:
    one, other = trained(optimizer, together=True), trained(optimizer, together=False)
    assert one.digests(one.layers) == other.digests(other.layers)
    (together,) = fuse_units(units(state(optimizer)))
    assert isinstance(together, FusedOptimizer)
    assert [group["foreach"] for group in together.optimizer.param_groups] == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("optimizer", [*MANNERS.values(), OPTIMIZERS["SGD"]], ids=[*MANNERS, "SGD, nesterov"])
def test_weights_of_other_precisions_are_stepped_to_the_same_bits(
    optimizer: Callable[[Any], Optimizer], dtype: torch.dtype
) -> None:
    one, other = (trained(optimizer, together=together, dtype=dtype) for together in (True, False))
    assert one.digests(one.layers) == other.digests(other.layers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_of_torch_are_fused(optimizer: Callable[[Any], Optimizer]) -> None:
    (one,) = fuse_units(units(state(optimizer)))
    assert isinstance(one, FusedOptimizer)
    (group,) = one.optimizer.param_groups
    assert len(group["params"]) == 6


def test_groups_with_the_same_settings_stay_together_and_others_apart() -> None:
    (one,) = fuse_units(units(state(grouped)))
    assert isinstance(one, FusedOptimizer)
    assert [(len(g["params"]), g["weight_decay"], g["lr"]) for g in one.optimizer.param_groups] == [
        (3, 0.3, 0.1),
        (3, 0.0, 0.5),
    ]


@pytest.mark.parametrize("optimizer", [hooked, Own, lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1))])
def test_a_modified_optimizer_is_not_fused(optimizer: Callable[[Any], Optimizer]) -> None:
    apart = units(state(optimizer))
    assert fuse_units(apart) == apart


def test_training_continues_from_restored_state_before_and_after_the_first_step() -> None:
    optimizer = OPTIMIZERS["AdamW"]
    donor = trained(optimizer, together=True)
    saved = donor.snapshot().copy()
    fresh, used = state(optimizer), trained(optimizer, together=True)
    gradients(used, 9)
    used.step(3)
    for each in (fresh, used):
        each.restore(saved)
    for each in (donor, fresh, used):
        gradients(each, 5)
        each.step(4)
    assert donor.digests(range(3)) == fresh.digests(range(3)) == used.digests(range(3))


def test_training_continues_from_a_file_even_if_the_memory_layout_of_a_weight_differs() -> None:
    job = JOBS["turned weight, fused"]
    donor, fresh = (ModelState(job, range(len(job.layers))) for _ in range(2))
    gradients(donor, 0)
    donor.step(0)
    fresh.restore_named({name: value.contiguous() for name, value in donor.snapshot().tensors.items()}, {})
    for each in (donor, fresh):
        gradients(each, 1)
        each.step(1)
    assert donor.digests(donor.layers) == fresh.digests(fresh.layers)
