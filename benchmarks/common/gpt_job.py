"""The fixed jobs that both sides train, their data, and their cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from culm.errors import PlanError
from culm.models import RandomTokens, gpt, gpt_loss

if TYPE_CHECKING:
    from culm.job import Dataset, Precision

ModuleFactory: TypeAlias = Callable[[], nn.Module]
StageCut: TypeAlias = tuple[range, ...]
"""Layers of each stage, in order; stage g runs on worker g % workers."""


class JobSpec(Protocol):
    """A job that can be sent to a process and trained there."""

    @property
    def seed(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    def layers(self) -> Sequence[ModuleFactory]: ...
    def data(self) -> Dataset: ...
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...
    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class GPTSpec:
    """A GPT on random tokens: AdamW, no dropout. Two sides that use the same spec train the same job."""

    name: str
    width: int
    tokens: int
    blocks: int = 16
    heads: int = 4
    vocab: int = 512
    micro_batch: int = 4
    micro_batches: int = 8
    items: int = 256
    """Length of the dataset: eight steps, then it repeats."""
    seed: int = 0
    clip_norm: float | None = None
    """Gradients are scaled so that their norm over all stages is at most this."""
    lr: float = 3e-4
    device: str = "cpu"
    precision: Precision = "fp32"
    """bf16: autocast over weights of 32 bits."""

    def layers(self) -> Sequence[ModuleFactory]:
        return gpt(
            width=self.width,
            blocks=self.blocks,
            heads=self.heads,
            context=self.tokens,
            vocab=self.vocab,
            dropout=0.0,
        )

    def data(self) -> Dataset:
        """Generated once, so that a step only looks items up."""
        tokens = RandomTokens(vocab=self.vocab, length=self.tokens, count=self.items, seed=self.seed)
        return [tokens[number] for number in range(len(tokens))]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return gpt_loss(output, target)

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.lr)

    def plain_model(self) -> nn.Module:
        """The whole model."""
        return build_stage(self, range(len(self.layers())))

    def plain_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch, as the plain loop computes it."""
        return self.loss(model(inputs), targets)


LARGE_GPT = GPTSpec(name="large", width=256, tokens=128)
SMALL_GPT = GPTSpec(name="small", width=64, tokens=32)


def even_cut(layers: int, stages: int) -> StageCut:
    """Distribute the blocks evenly; the embedding goes with the first of them and the head with the last."""
    blocks = layers - 2
    if not 1 <= stages <= blocks:
        raise PlanError(f"stages is {stages}, but the model has {blocks} blocks: use 1 to {blocks} stages")
    inner = [1 + blocks * stage // stages for stage in range(1, stages)]
    return tuple(range(start, stop) for start, stop in zip([0, *inner], [*inner, layers], strict=True))


def build_stage(spec: JobSpec, layers: range) -> nn.Sequential:
    """The layers of one stage, named by their numbers in the model. Weights depend on (seed, layer), not on the cut."""
    factories = spec.layers()
    stage = nn.Sequential()
    for number in layers:
        torch.manual_seed(spec.seed + number)
        stage.add_module(str(number), factories[number]())
    return stage


def step_inputs(spec: JobSpec, data: Dataset, step: int) -> Tensor:
    """The input of the first stage at a step: all micro-batches, one after the other."""
    return torch.stack([data[number][0] for number in _sample_indices(spec, data, step)])


def step_targets(spec: JobSpec, data: Dataset, step: int) -> Tensor:
    """The targets of the last stage, in the order of `step_inputs`."""
    return torch.stack([data[number][1] for number in _sample_indices(spec, data, step)])


def _sample_indices(spec: JobSpec, data: Dataset, step: int) -> list[int]:
    batch = spec.micro_batch * spec.micro_batches
    return [number % len(data) for number in range(step * batch, (step + 1) * batch)]
