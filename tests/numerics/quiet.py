"""Code in a file that knows nothing of `random` and numpy, and draws from them all the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import elsewhere


class Chance(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * elsewhere.draw()


class Steady(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output * elsewhere.draw(), target)
