"""Job.layers: nn.Sequential and any iterable of modules or factories."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny_jobs import job
from torch import nn

from culm.errors import JobError
from culm.testing import reference


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def test_a_sequential_trains_as_the_list_of_its_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(linear() for _ in range(3)))
    listed = reference(job(layers=list(copy.deepcopy(model))))
    assert reference(job(layers=model)).weights_sha256 == listed.weights_sha256


@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.Sequential(linear(), linear()),
        lambda: nn.ModuleList([linear(), linear()]),
        lambda: (linear() for _ in range(2)),
        lambda: [linear, linear()],
    ],
)
def test_any_iterable_is_read_once_into_a_tuple(layers: Any) -> None:
    made = job(layers=layers())
    assert isinstance(made.layers, tuple)
    assert len(made.layers) == 2
    assert replace(made, seed=7).layers == made.layers
    assert len(copy.copy(made).layers) == 2


def test_a_job_with_layers_can_be_pickled() -> None:
    made = job(layers=nn.Sequential(linear(), linear()), optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss)
    assert len(pickle.loads(pickle.dumps(made)).layers) == 2


class Branching(nn.Module):
    pass


class Residual(nn.Sequential):
    def forward(self, input: Any) -> Any:
        return input


def hooked() -> nn.Module:
    model = nn.Sequential(linear())
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (Branching(), "Job.layers is a Branching, and not its layers in order: list them, as in layers=\\[model.embed"),
        (nn.ModuleDict({"a": linear()}), "Job.layers is a ModuleDict, and not its layers in order"),
        (Residual(linear()), "Job.layers is a Residual with a forward, hooks or parameters of its own"),
        (hooked(), "Job.layers is a Sequential with a forward, hooks or parameters of its own"),
        (3, "Job.layers is a int, which has no order of layers: list them"),
        ([], "Job.layers is empty"),
        ([linear, 3], r"Job.layers\[1\] is 3: use a module"),
    ],
)
def test_what_has_no_order_of_layers_is_refused(layers: Any, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        job(layers=layers)
