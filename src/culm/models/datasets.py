"""Datasets that need no download, for examples, tests and benchmarks. Item i depends only on i and the seed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from culm.errors import JobError


class Characters:
    """Every substring of `length` characters of a text, and the characters that follow: (ids, ids shifted by one).

    The default text is a few sonnets of Shakespeare. Raises JobError if the text is too short.
    """

    def __init__(self, length: int = 64, text: str | None = None) -> None:
        text = _load_sonnets() if text is None else text
        if not 1 <= length < len(text):
            raise JobError(f"Characters.length is {length}: use 1 to {len(text) - 1}, since the text has {len(text)}")
        self.length = length
        self.alphabet = "".join(sorted(set(text)))
        self._ids = self.encode(text)

    @property
    def vocab(self) -> int:
        """Number of different characters."""
        return len(self.alphabet)

    def encode(self, text: str) -> Tensor:
        """Characters -> ids. All characters must be in the alphabet."""
        return torch.tensor([self.alphabet.index(character) for character in text])

    def decode(self, ids: Tensor) -> str:
        """Ids -> characters."""
        return "".join(self.alphabet[i] for i in ids.tolist())

    def __len__(self) -> int:
        return len(self._ids) - self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(len(self))[index]
        piece = self._ids[start : start + self.length + 1]
        return piece[:-1], piece[1:]


@dataclass(frozen=True)
class RandomTokens:
    """`count` sequences of random tokens, and the tokens that follow: nothing to learn, any size, no storage."""

    vocab: int
    length: int
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = _generator(self.seed, range(self.count)[index])
        piece = torch.randint(self.vocab, (self.length + 1,), generator=generator)
        return piece[:-1], piece[1:]


@dataclass(frozen=True)
class MaskedTokens:
    """`count` pairs of random segments for BERT: ((ids, segments), (labels, next)). 15 % of the tokens are replaced by
    token 1 and are the labels; labels are -100 elsewhere."""

    vocab: int
    length: int
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, range(self.count)[index])
        ids = torch.randint(2, self.vocab, (self.length,), generator=generator)
        masked = torch.rand(self.length, generator=generator) < 0.15
        masked[0] = True  # at least one label
        segments = (torch.arange(self.length) >= self.length // 2).long()
        follows = torch.randint(2, (), generator=generator)
        return (ids.masked_fill(masked, 1), segments), (ids.masked_fill(~masked, -100), follows)


@dataclass(frozen=True)
class Translations:
    """`count` random sentences and their reversals: ((source, target), target shifted by one)."""

    vocab: int
    length: int
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        source = torch.randint(1, self.vocab, (self.length,), generator=_generator(self.seed, range(self.count)[index]))
        target = torch.cat([torch.zeros(1, dtype=torch.long), source.flip(0)])
        return (source, target[:-1]), target[1:]


@dataclass(frozen=True)
class RandomImages:
    """`count` noisy images (3, size, size) of vertical waves; the label is the number of waves minus one.

    Raises JobError if the image is too small to distinguish the classes.
    """

    count: int
    seed: int = 0
    size: int = 32
    classes: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.classes < self.size // 2:
            raise JobError(
                f"RandomImages.classes is {self.classes}: use 1 to {self.size // 2 - 1} for size {self.size}"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = _generator(self.seed, range(self.count)[index])
        label = int(torch.randint(self.classes, (), generator=generator))
        shift = torch.rand((), generator=generator)
        waves = torch.sin(2 * math.pi * ((label + 1) * torch.arange(self.size) / self.size + shift))
        return waves + 0.5 * torch.randn(3, self.size, self.size, generator=generator), label


def _load_sonnets() -> str:
    return resources.files("culm.models").joinpath("sonnets.txt").read_text(encoding="utf-8")


def _generator(seed: int, index: int) -> torch.Generator:
    """A separate random stream for every item: hashed, so that neighbouring seeds and items are independent."""
    digest = hashlib.blake2b(f"{seed}.{index}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))
