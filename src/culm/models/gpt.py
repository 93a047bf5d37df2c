"""GPT as a list of layers: Embed, Block x N, Head. Based on nanoGPT, written for readability.

A layer takes and returns one tensor and changes nothing in place, so the list can be cut anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from culm.errors import JobError


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The dimensions of a GPT. Raises JobError if they do not fit together."""

    width: int
    """Width of the residual stream; the MLP is four times as wide."""
    blocks: int
    heads: int
    context: int
    """The longest sequence."""
    vocab: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in ("width", "blocks", "heads", "context", "vocab"):
            if getattr(self, field) < 1:
                raise JobError(f"GPTConfig.{field} is {getattr(self, field)}: use a whole number of at least 1")
        if self.width % self.heads:
            raise JobError(f"GPTConfig.heads is {self.heads}: use a divisor of the width {self.width}")
        if not 0 <= self.dropout < 1:
            raise JobError(f"GPTConfig.dropout is {self.dropout}: use a number of at least 0 and below 1")

    @property
    def parameters(self) -> int:
        """Number of parameters with tied token embedding and head, as published numbers count them."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocab + self.context + 2) * self.width + self.blocks * block


_gpt2 = partial(GPTConfig, context=1024, vocab=50257)
_gpt3 = partial(GPTConfig, context=2048, vocab=50257)

SIZES: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "nano": GPTConfig(width=64, blocks=4, heads=4, context=64, vocab=128),
        "mini": GPTConfig(width=384, blocks=6, heads=6, context=256, vocab=128),
        "gpt2": _gpt2(width=768, blocks=12, heads=12),
        "gpt2-medium": _gpt2(width=1024, blocks=24, heads=16),
        "gpt2-large": _gpt2(width=1280, blocks=36, heads=20),
        "gpt2-xl": _gpt2(width=1600, blocks=48, heads=25),
        # Brown et al. 2020, table 2.1, where 24 heads of 128 for 1.3B and a width of 5140 for 13B are inconsistent.
        "gpt3-1.3b": _gpt3(width=2048, blocks=24, heads=16),
        "gpt3-2.7b": _gpt3(width=2560, blocks=32, heads=32),
        "gpt3-6.7b": _gpt3(width=4096, blocks=32, heads=32),
        "gpt3-13b": _gpt3(width=5120, blocks=40, heads=40),
        "gpt3-175b": _gpt3(width=12288, blocks=96, heads=96),
    }
)
"""Published dimensions by name, and two that train on a laptop (mini is nanoGPT's Shakespeare model)."""


def gpt_config(size: str = "nano", **overrides: Any) -> GPTConfig:
    """The dimensions of that size, with `overrides`. Raises JobError for an unknown size or field."""
    if size not in SIZES:
        raise JobError(f"there is no GPT of size {size!r}: use one of {', '.join(SIZES)}")
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    for name in overrides:
        if name not in fields:
            raise JobError(f"a GPT has no {name!r}: use one of {', '.join(fields)}")
    return dataclasses.replace(SIZES[size], **overrides)


def gpt(size: str = "nano", **overrides: Any) -> list[Callable[[], nn.Module]]:
    """The layers of a GPT, as factories that can be pickled by reference: `gpt("nano", blocks=6, vocab=65)`."""
    config = gpt_config(size, **overrides)
    return [partial(Embed, config), *[partial(Block, config) for _ in range(config.blocks)], partial(Head, config)]


def gpt_tied(layers: Sequence[object]) -> list[tuple[str, str]]:
    """The value for Job.tied in which the head shares its weight with the token embedding, as in GPT-2."""
    return [("0.tokens.weight", f"{len(layers) - 1}.head.weight")]


def gpt_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions: (batch, length, vocab), (batch, length) -> scalar."""
    return cross_entropy(output.flatten(0, -2), target.flatten())


class Embed(nn.Module):
    """Token ids (batch, length) -> (batch, length, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        _initialize_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[-1]
        if length > self.context:
            raise JobError(f"the input has {length} tokens, but the GPT's context is {self.context}: raise its context")
        places = torch.arange(length, device=ids.device)
        out: Tensor = self.dropout(self.tokens(ids) + self.positions(places))
        return out


class Block(nn.Module):
    """Attention and MLP, each applied to the normalized residual stream and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        _initialize_weights(self)
        # GPT-2: projections into the residual stream start smaller in deeper models, so that the sum keeps its scale.
        for end in (self.attention.out, self.mlp.out):
            nn.init.normal_(end.weight, std=0.02 / (2 * config.blocks) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Causal self-attention: a position attends to itself and to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.drop = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        drop = self.drop if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        return out


class MLP(nn.Module):
    """Two linear layers with a hidden width of four times the stream, applied to each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wide = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.out(gelu(self.wide(x))))
        return out


class Head(nn.Module):
    """(batch, length, width) -> logits (batch, length, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        _initialize_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


def _initialize_weights(layer: nn.Module) -> None:
    """As in GPT-2: weights normal with std 0.02, biases zero; LayerNorm keeps its ones and zeros."""
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
