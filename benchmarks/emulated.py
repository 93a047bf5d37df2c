"""Emulated compute: layers whose work is to sleep, so that more workers than cores run side by side, as on machines of
their own. What they compute is real but small, and the same however long they sleep: weights can be compared.

F, I and W of a layer sleep for the same time each, B for both; everything around them is real.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import slow
from culm.job import Job

WIDTH = 8
_ITEMS = 64
slow.register()  # wherever the job is unpickled, such storage is known


class _Late(torch.autograd.Function):
    """The same tensor, and its gradient only after a sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Nap(nn.Module):
    """A small layer that takes `unit_s` longer in each of F, I and W: the gradients of its input and of its weight
    come late, each by a sleep of its own."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.unit_s)
        if not x.requires_grad:  # the first layer has no I of its own: its W takes both
            return torch.tanh(x @ _late(self.weight, 2 * self.unit_s))
        return torch.tanh(_late(x, self.unit_s) @ _late(self.weight, self.unit_s))


def _late(x: Tensor, seconds: float) -> Tensor:
    late: Tensor = _Late.apply(x, seconds)  # type: ignore[no-untyped-call]
    return late


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A job of one sleeping layer for each stage."""

    stages: int
    micro_batches: int
    """Of the whole step."""
    unit_s: float
    """Seconds of F, of I and of W in one stage for one micro-batch."""
    steps: int
    exact: bool = False

    def job(self) -> Job:
        """As a user would write it."""
        unit_s = self.unit_s
        draw = torch.Generator().manual_seed(0)
        data = [(torch.randn(WIDTH, generator=draw), torch.zeros(WIDTH)) for _ in range(_ITEMS)]
        return Job(
            layers=[lambda: Nap(unit_s)] * self.stages,
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            data=data,
            global_batch=self.micro_batches,
            micro_batch=1,
            steps=self.steps,
            exact=self.exact,
            device="cpu",
        )

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(range(1, self.stages))
