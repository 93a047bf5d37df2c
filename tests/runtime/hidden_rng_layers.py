"""Layers in a file that does not import `random` or numpy, but draws from them through another module."""

from __future__ import annotations

import torch
from tests.runtime import hidden_rng
from torch import Tensor, nn


class HiddenRandomLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * hidden_rng.random_factor()


class DeterministicLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output * hidden_rng.random_factor(), target)
