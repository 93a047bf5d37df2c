"""GNMT (Wu et al. 2016) as a list of layers: LSTMs with attention for translation, tuples between layers.

As in the MLPerf implementation: the first encoder layer reads in both directions, the first decoder layer attends to
the encoder's output, and its context is an input of every later decoder layer. GNMT-16 has 8 + 8 LSTM layers, and
277,718,593 parameters with three matrices for source, target and head (278 million in the literature). An item is
((source, target), next): ids of one length each, and the target shifted by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from culm.errors import JobError


@dataclass(frozen=True, kw_only=True)
class GnmtConfig:
    """The dimensions of a GNMT; the defaults are GNMT-16."""

    width: int = 1024
    layers: int = 8
    """LSTM layers of the encoder, and as many of the decoder."""
    vocab: int = 32320
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise JobError(f"GnmtConfig.layers is {self.layers}: use at least 2")


def gnmt(**sizes: Any) -> list[Callable[[], nn.Module]]:
    """The layers of GNMT-16, or of another size: `gnmt(width=32, layers=2, vocab=64)`."""
    config = GnmtConfig(**sizes)
    later = range(1, config.layers)
    return [
        partial(GnmtEmbed, config),
        *[partial(GnmtEncode, config, number) for number in range(config.layers)],
        partial(GnmtEmbedTarget, config),
        partial(GnmtAttend, config),
        *[partial(GnmtDecode, config, number) for number in later],
        partial(GnmtHead, config),
    ]


def gnmt_tied(layers: Sequence[object]) -> list[tuple[str, ...]]:
    """The value for Job.tied if source and target share their embedding, as in the MLPerf implementation."""
    return [("0.tokens.weight", f"{len(layers) // 2}.tokens.weight")]


def gnmt_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


class GnmtEmbed(nn.Module):
    """(source ids, target ids) -> (embedded source, target ids)."""

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(source), target


class GnmtEncode(nn.Module):
    """An LSTM of the encoder. The first one reads in both directions; from the third one on the input is added."""

    def __init__(self, config: GnmtConfig, number: int) -> None:
        super().__init__()
        self.adds = number >= 2
        self.dropout = nn.Dropout(config.dropout)
        inputs = 2 * config.width if number == 1 else config.width
        self.lstm = _lstm(inputs, config.width, both=number == 0)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(self.dropout(x))
        return (y + x if self.adds else y), target


class GnmtEmbedTarget(nn.Module):
    """(encoder output, target ids) -> (embedded target, encoder output)."""

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)

    def forward(self, memory: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(target), memory


class GnmtAttend(nn.Module):
    """The first LSTM of the decoder and its attention (Bahdanau et al., normalised): -> (states, context)."""

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = _lstm(config.width, config.width)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.scores = nn.Parameter(torch.empty(config.width).uniform_(-0.1, 0.1))
        self.scale = nn.Parameter(torch.tensor([1.0 / math.sqrt(config.width)]))
        self.bias = nn.Parameter(torch.zeros(config.width))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.lstm(self.dropout(x))
        keys, queries = self.key(memory).unsqueeze(1), self.query(states).unsqueeze(2)
        direction = self.scores / self.scores.norm() * self.scale
        weights = (torch.tanh(keys + queries + self.bias) @ direction).softmax(dim=-1)
        return states, weights @ memory


class GnmtDecode(nn.Module):
    """A later LSTM of the decoder, with the context as a further input: -> (states, context)."""

    def __init__(self, config: GnmtConfig, number: int) -> None:
        super().__init__()
        self.adds = number >= 2
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = _lstm(2 * config.width, config.width)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(torch.cat([self.dropout(x), context], dim=-1))
        return (y + x if self.adds else y), context


class GnmtHead(nn.Module):
    """(states, context) -> logits (batch, length, vocab)."""

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__()
        self.head = nn.Linear(config.width, config.vocab)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.bias, -0.1, 0.1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # noqa: ARG002 - the context ends here
        out: Tensor = self.head(x)
        return out


def _lstm(inputs: int, width: int, *, both: bool = False) -> nn.LSTM:
    lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=both)
    for weight in lstm.parameters():
        nn.init.uniform_(weight, -0.1, 0.1)
    return lstm
