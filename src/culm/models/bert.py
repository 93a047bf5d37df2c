"""BERT (Devlin et al. 2018) with its pretraining heads as a list of layers: BertEmbed, BertBlock x N, BertHead.

An item is ((ids, segments), (labels, next)): `labels` are the ids of masked positions and -100 elsewhere, `next` says
whether the second segment follows the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from culm.errors import JobError


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The dimensions of a BERT; the defaults are BERT-Large."""

    width: int = 1024
    blocks: int = 24
    heads: int = 16
    context: int = 512
    vocab: int = 30522
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise JobError(f"BertConfig.heads is {self.heads}: use a divisor of the width {self.width}")


def bert(**sizes: Any) -> list[Callable[[], nn.Module]]:
    """The layers of BERT-Large, or of another size: `bert(width=64, blocks=2, heads=4)`."""
    config = BertConfig(**sizes)
    blocks = [partial(BertBlock, config) for _ in range(config.blocks)]
    return [partial(BertEmbed, config), *blocks, partial(BertHead, config)]


def bert_tied(layers: list[Callable[[], nn.Module]]) -> list[tuple[str, str]]:
    """The value for Job.tied: the output embedding is the token embedding."""
    return [("0.tokens.weight", f"{len(layers) - 1}.decoder.weight")]


def bert_loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Masked language model plus next sentence, each a mean."""
    (logits, follows), (labels, next_one) = output, target
    return cross_entropy(logits.flatten(0, 1), labels.flatten()) + cross_entropy(follows, next_one)


class BertEmbed(nn.Module):
    """(ids, segments), each (batch, length) -> (batch, length, width)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        _initialize(self)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.dropout(self.norm(self.tokens(ids) + self.positions(places) + self.segments(segments)))
        return out


class BertBlock(nn.Module):
    """Attention in both directions, then an MLP; the norm comes after each addition."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.drop = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.wide = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=self.drop if self.training else 0.0)
        x = self.attention_norm(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2))))
        out: Tensor = self.mlp_norm(x + self.dropout(self.narrow(gelu(self.wide(x)))))
        return out


class BertHead(nn.Module):
    """(batch, length, width) -> (logits of tokens, logits of 'follows')."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=1e-12)
        self.decoder = nn.Linear(config.width, config.vocab)
        self.pooler = nn.Linear(config.width, config.width)
        self.follows = nn.Linear(config.width, 2)
        _initialize(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.decoder(self.norm(gelu(self.transform(x))))
        return logits, self.follows(torch.tanh(self.pooler(x[:, 0])))


def _initialize(layer: nn.Module) -> None:
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
