"""A job that trains in milliseconds, and layers that misbehave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from culm import Job

WIDTH = 4
DATA = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), torch.zeros(WIDTH)) for i in range(32)]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def job(**fields: Any) -> Job:
    """Four layers, four micro-batches of two, three steps."""
    described: dict[str, Any] = {
        "layers": [linear] * 4,
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "data": DATA,
        "global_batch": 8,
        "micro_batch": 2,
        "steps": 3,
    }
    return Job(**{**described, **fields})


class At(nn.Module):
    """A linear layer that does something else in one of its forward passes in training, counted from 0."""

    def __init__(self, call: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.call, self.act = 0, call, act

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        self.calls += 1
        return self.act(output) if self.calls == self.call + 1 else output


def boom(_: Tensor) -> Tensor:
    raise ValueError("boom")


def nan(x: Tensor) -> Tensor:
    return x * float("nan")


def layers(number: int, call: int, act: Callable[[Tensor], Tensor]) -> list[Callable[[], nn.Module]]:
    """Four layers, of which one acts."""
    return [(lambda: At(call, act)) if i == number else linear for i in range(4)]


class Nap(nn.Module):
    """A linear layer whose forward takes at least this many seconds, so that a run lasts long enough for faults."""

    def __init__(self, seconds: float = 0.004) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        output: Tensor = self.linear(x)
        return output
