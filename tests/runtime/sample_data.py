"""Data sets, collations, losses and optimizers of the small jobs."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6


class Points:
    """`count` points of a shape with a target: item i depends on i only."""

    def __init__(self, *shape: int, count: int = 23, classes: int = 3) -> None:
        self.shape, self.count, self.classes = shape or (WIDTH,), count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(*self.shape, generator=draw), index % self.classes


class Tokens:
    """Sequences of tokens and the tokens that follow."""

    def __init__(self, length: int = 5, vocab: int = 7, count: int = 23) -> None:
        self.length, self.vocab, self.count = length, vocab, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocab, (self.length + 1,), generator=draw)
        return ids[:-1], ids[1:]


class Noisy(Points):
    """Draws from all three generators that a data set may use."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point, label = super().__getitem__(index)
        return point + torch.randn(1) + np.random.uniform() + random.random(), label


class Ragged(Tokens):
    """Sequences of different lengths, padded by `pad`."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids, following = super().__getitem__(index)
        return ids[: 2 + index % 4], following[: 2 + index % 4]


class Short(Tokens):
    """Sequences of one to four tokens: a short transposed tensor can be contiguous."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids, following = super().__getitem__(index)
        return ids[: 1 + index % 4], following[: 1 + index % 4]


class Labelled(NamedTuple):
    """A target with names."""

    label: Tensor
    weight: Tensor


class Named(Points):
    """The target is a named tuple."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point, Labelled(torch.tensor(label), torch.tensor(1.0 + index % 3))


def pad(items: list[Any]) -> Any:
    """Pad to the longest sequence of the micro-batch. Padding has the target -1."""
    inputs, targets = zip(*items, strict=True)
    rows = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return rows(list(inputs)), rows(list(targets), padding_value=-1.0)


def jitter(items: list[Any]) -> Any:
    """A collation that draws random numbers."""
    inputs, labels = torch.utils.data.default_collate(items)
    return inputs * (1 + 0.1 * torch.rand(1)) + np.random.normal() + random.random(), labels


def halves(items: list[Any]) -> Any:
    """Two inputs: the points, and an integer mask that is passed along."""
    inputs, labels = torch.utils.data.default_collate(items)
    return (inputs, (inputs > 0).long()), labels


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def over_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight): the weight is the number of tokens that are not padding."""
    loss = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
    return loss, (target >= 0).sum()


def by_label(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """(sum, weight) with a float that differs by micro-batch."""
    return functional.cross_entropy(output, target, reduction="sum"), 0.1 + 0.7 * float(target.sum())


def by_name(output: Tensor, target: Labelled) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(output, target.label, reduction="none")
    return (each * target.weight).sum(), target.weight.sum()


def drawing(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws from all three generators."""
    noise = 0.1 * torch.randn_like(output) * random.random() * np.random.uniform()
    return functional.cross_entropy(output + noise, target)


def in_place(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes into its input."""
    return functional.cross_entropy(output.mul_(0.5), target)


def of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A loss for a last layer that returns a tuple."""
    return functional.cross_entropy(output[0], target) + 0.1 * output[1].pow(2).mean()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Clearing(torch.optim.SGD):
    """An optimizer that removes the gradients after its step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()


class Rebinding(torch.optim.SGD):
    """An optimizer that replaces the memory of its parameters instead of writing into it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


def warm(step: int) -> float:
    return (step + 1) / 3


def at_each_position(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target[:, None].expand(-1, output.shape[2]))
