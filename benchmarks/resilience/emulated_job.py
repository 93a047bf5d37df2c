"""Emulated compute: layers that sleep, so that more workers than cores can run side by side, as on separate machines.
They compute real but small results that do not depend on the sleep, so that weights can be compared.

F, I and W of a layer sleep equally long, B as long as I and W together; everything else is real.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.resilience import slow_storage
from culm.job import Job

WIDTH = 8
_ITEMS = 64
slow_storage.register_slow_storage()  # so that a node that unpickles the job knows this storage


class _DelayedGradient(torch.autograd.Function):
    """Identity whose gradient is delayed by a sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingLinear(nn.Module):
    """A small layer that takes `action_s` longer in each of F, I and W: the gradients of its input and of its weight
    are delayed by separate sleeps."""

    def __init__(self, action_s: float) -> None:
        super().__init__()
        self.action_s = action_s
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.action_s)
        if not x.requires_grad:  # the first layer has no I: its W takes the time of both
            return torch.tanh(x @ _delay_gradient(self.weight, 2 * self.action_s))
        return torch.tanh(_delay_gradient(x, self.action_s) @ _delay_gradient(self.weight, self.action_s))


def _delay_gradient(x: Tensor, seconds: float) -> Tensor:
    delayed: Tensor = _DelayedGradient.apply(x, seconds)  # type: ignore[no-untyped-call]
    return delayed


@dataclass(frozen=True, kw_only=True)
class EmulatedJob:
    """A job with one sleeping layer for each stage."""

    stages: int
    micro_batches: int
    """Micro-batches of the whole step."""
    action_s: float
    """Seconds of F, of I and of W in one stage for one micro-batch."""
    steps: int
    exact: bool = False

    def build_job(self) -> Job:
        """The job as a user would write it."""
        action_s = self.action_s
        generator = torch.Generator().manual_seed(0)
        data = [(torch.randn(WIDTH, generator=generator), torch.zeros(WIDTH)) for _ in range(_ITEMS)]
        return Job(
            layers=[lambda: SleepingLinear(action_s)] * self.stages,
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
