"""Layers of one tensor to one tensor, each with one potential problem."""

from __future__ import annotations

import random

import numpy as np
import torch
from tests.runtime.sample_data import WIDTH
from torch import Tensor, nn
from torch.nn import functional

from culm.runtime.compute import buffer_statistics


class Dense(nn.Module):
    """Linear and tanh: the plainest layer."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(torch.tanh(self.linear(x)))
        return out


class Frozen(Dense):
    """A layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class HalfFrozen(Dense):
    """A layer of which one parameter does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.bias.requires_grad_(False)


class Twice(nn.Module):
    """One weight in three places, two of them with their own bias, and a norm between: hard to split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.first, self.second = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(functional.linear(x, self.weight, self.first))
        y = torch.tanh(functional.linear(y, self.weight, self.second))
        return x + y @ self.weight


class Shared(nn.Module):
    """Two names for one parameter inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Probe(nn.Module):
    """Passes no gradient to its input, but is trained itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.detach())
        return out


class Residual(nn.Module):
    """Uses its input at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.sigmoid(self.gate(x)) * self.value(x) - 0.1 * x
        return out


class Normed(nn.Module):
    """Batch norm in the middle."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.norm(self.linear(x)))
        return out


class Activated(nn.BatchNorm1d):
    """A user's subclass of batch norm that does more than batch norm."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


class Forces(nn.Module):
    """Computes a gradient in its forward; with respect to its own leaf where its input requires none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        at = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(self.linear(at)).square().sum(), at, create_graph=True)
        return force


class Turned(nn.Module):
    """A weight whose rows are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Behind(Dense):
    """Writes into its input through `.data`, which torch does not notice."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2.0)
        return super().forward(x)


class Hooked(Dense):
    """Replaces its gradients by other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


class NormedTwice(Normed):
    """One batch norm, called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Stochastic(Normed):
    """Stochastic depth: some micro-batches skip the layer, including its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else super().forward(x)


class Chance(Dense):
    """Draws from `random` and numpy in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random() + np.random.uniform(0.5, 1.0)


class Tracked(nn.Module):
    """A moving buffer of its own: the largest input so far, and how often it was updated."""

    largest: Tensor
    looks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(WIDTH))
        self.register_buffer("looks", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            buffer_statistics.record(self, x.abs().amax(0), torch.tensor(len(x)))
        out: Tensor = self.linear(x / (1 + self.largest))
        return out

    def apply_statistics(self, largest: Tensor, looks: Tensor) -> None:
        torch.maximum(self.largest, largest, out=self.largest)
        self.looks += looks


class Ignoring(nn.Module):
    """A learned table that does not use its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table).expand(x.shape)


class Sometimes(nn.Module):
    """One of its two parameters has a gradient for some data only; the other never has one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) if float(x.detach().sum()) > 0 else self.right(x)
        return torch.tanh(out)


class Rectified(nn.Module):
    """Writes into its input first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(0.9).add_(0.1).relu_())
        return out
