"""The job of a soak: small, exact, and slow enough that faults hit every part of a step."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from culm.job import Job

_WIDTH, _LAYERS, _MICRO_BATCHES = 8, 4, 8


class SleepyLinear(nn.Module):
    """A residual linear layer whose forward takes at least this many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(_WIDTH, _WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        made: Tensor = x + torch.tanh(self.linear(x))
        return made


class FlippingSGD(torch.optim.SGD):
    """SGD that flips a bit of a weight, once, if a file contains the id of this process."""

    def __init__(self, parameters: Iterable[nn.Parameter], flip_file: str) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self._flip_file = Path(flip_file)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self._flip_file.exists() and self._is_meant():
            self.param_groups[0]["params"][0].data.view(torch.int32).view(-1)[0] ^= 1 << 20
        return loss

    def _is_meant(self) -> bool:
        """Whether the file names this process; removes it then. A worker has an optimizer for each layer."""
        try:
            if self._flip_file.read_text() != str(os.getpid()):
                return False
            self._flip_file.unlink()
        except FileNotFoundError:
            return False
        return True


def _plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def soak_job(steps: int, *, flip_file: str = "", layer_s: float = 0.002) -> Job:
    """The job. Without `flip_file` and with `layer_s` 0, the failure-free run of it."""
    dice = torch.Generator().manual_seed(1)
    samples = [(torch.randn(_WIDTH, generator=dice), torch.randn(_WIDTH, generator=dice)) for _ in range(64)]
    optimizer: Callable[[Any], torch.optim.Optimizer] = (
        functools.partial(FlippingSGD, flip_file=flip_file) if flip_file else _plain_sgd
    )
    return Job(
        layers=[functools.partial(SleepyLinear, layer_s)] * _LAYERS,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        data=samples,
        global_batch=2 * _MICRO_BATCHES,
        micro_batch=2,
        steps=steps,
        exact=True,
    )
