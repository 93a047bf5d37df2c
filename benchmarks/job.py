"""What both sides train: the fixed jobs, their data, and the cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from culm.errors import PlanError
from culm.models import RandomTokens, gpt, gpt_loss

if TYPE_CHECKING:
    from culm.job import Dataset

Factory: TypeAlias = Callable[[], nn.Module]
Cut: TypeAlias = tuple[range, ...]
"""Layers of each stage, in order; stage g runs on worker g % workers."""


class Spec(Protocol):
    """A job, small enough to be sent to a process and complete enough to be trained there."""

    @property
    def seed(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    def layers(self) -> Sequence[Factory]: ...
    def data(self) -> Dataset: ...
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...
    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class GPTSpec:
    """A GPT on random tokens: fp32, AdamW, no dropout. Two sides that share a spec share every number in it."""

    name: str
    width: int
    tokens: int
    blocks: int = 16
    heads: int = 4
    vocab: int = 512
    micro_batch: int = 4
    micro_batches: int = 8
    items: int = 256
    """Length of the data set: eight steps, then it begins again."""
    seed: int = 0
    lr: float = 3e-4

    def layers(self) -> Sequence[Factory]:
        return gpt(
            width=self.width,
            blocks=self.blocks,
            heads=self.heads,
            context=self.tokens,
            vocab=self.vocab,
            dropout=0.0,
        )

    def data(self) -> Dataset:
        """Drawn once, so that in a step an item is looked up and not made."""
        tokens = RandomTokens(vocab=self.vocab, length=self.tokens, count=self.items, seed=self.seed)
        return [tokens[number] for number in range(len(tokens))]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return gpt_loss(output, target)

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.lr)


LARGE = GPTSpec(name="large", width=256, tokens=128)
SMALL = GPTSpec(name="small", width=64, tokens=32)


def even_cut(layers: int, stages: int) -> Cut:
    """Blocks spread evenly; the embedding rides with the first of them and the head with the last."""
    blocks = layers - 2
    if not 1 <= stages <= blocks:
        raise PlanError(f"stages is {stages}, but the model has {blocks} blocks: use 1 to {blocks} stages")
    inner = [1 + blocks * stage // stages for stage in range(1, stages)]
    return tuple(range(start, stop) for start, stop in zip([0, *inner], [*inner, layers], strict=True))


def build(spec: Spec, layers: range) -> nn.Sequential:
    """The layers of one stage under their numbers in the model. Weights depend on (seed, layer), not on the cut."""
    factories = spec.layers()
    stage = nn.Sequential()
    for number in layers:
        torch.manual_seed(spec.seed + number)
        stage.add_module(str(number), factories[number]())
    return stage


def inputs(spec: Spec, data: Dataset, step: int) -> Tensor:
    """What goes into the first stage at a step: all micro-batches, one after the other."""
    return torch.stack([data[number][0] for number in _numbers(spec, data, step)])


def targets(spec: Spec, data: Dataset, step: int) -> Tensor:
    """What the last stage compares its output with, in the order of `inputs`."""
    return torch.stack([data[number][1] for number in _numbers(spec, data, step)])


def _numbers(spec: Spec, data: Dataset, step: int) -> list[int]:
    batch = spec.micro_batch * spec.micro_batches
    return [number % len(data) for number in range(step * batch, (step + 1) * batch)]
