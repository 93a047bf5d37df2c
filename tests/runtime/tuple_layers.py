"""Layers that pass tuples on."""

from __future__ import annotations

import torch
from tests.runtime.sample_data import WIDTH
from tests.runtime.sample_layers import Dense
from torch import Tensor, nn


class Branch(nn.Module):
    """Starts a tuple: (features, skip, mask). Later layers use the skip; the mask never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return torch.tanh(y), y, mask


class Along(nn.Module):
    """Uses skip and mask, and passes both on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x) + skip * mask), skip, mask


class Ahead(nn.Module):
    """Does not use the skip, and returns a float without a gradient and an output that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        x, skip, mask = values
        return [self.linear(x), skip, mask, (x > 0).float(), self.spare(x)]


class Merge(nn.Module):
    """Ends the tuple; the last use of the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor, sign: Tensor, unused: Tensor) -> Tensor:
        del unused
        out: Tensor = self.linear(x * (1 + mask) + skip * sign)
        return out


class Doubled(nn.Module):
    """The same tensor at two places of the tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Added(Dense):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + y


class Tripled(nn.Module):
    """One tensor in three places: the result depends on the order of their gradients."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, x


class Weighed(nn.Module):
    """Uses three tensors differently, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.a(x)) + torch.sigmoid(self.b(y)) * self.c(z) + x * y
        return out


class Stray(nn.Module):
    """An output that depends on a parameter only: no input reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prompt = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * self.prompt, torch.tanh(self.prompt).expand_as(x)
