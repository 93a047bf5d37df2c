"""Data sets that need no download: for examples, tests and benches. Item i is a function of i (and the seed) alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from culm.errors import JobError


class Characters:
    """Every run of `length` characters of a text, and the characters that follow: (ids, ids shifted by one).

    The text is a few sonnets of Shakespeare, unless another is given. Raises JobError when it is too short.
    """

    def __init__(self, length: int = 64, text: str | None = None) -> None:
        text = _sonnets() if text is None else text
        if not 1 <= length < len(text):
            raise JobError(f"Characters.length is {length}: use 1 to {len(text) - 1}, since the text has {len(text)}")
        self.length = length
        self.alphabet = "".join(sorted(set(text)))
        self._ids = self.encode(text)

    @property
    def vocab(self) -> int:
        """How many different characters there are."""
        return len(self.alphabet)

    def encode(self, text: str) -> Tensor:
        """Characters -> ids. All of them must be in the alphabet."""
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
        draw = _generator(self.seed, range(self.count)[index])
        piece = torch.randint(self.vocab, (self.length + 1,), generator=draw)
        return piece[:-1], piece[1:]


@dataclass(frozen=True)
class RandomImages:
    """`count` noisy images (3, size, size) of vertical waves; the label is how many waves there are, less one.

    Raises JobError when the image is too small to tell the classes apart.
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
        draw = _generator(self.seed, range(self.count)[index])
        label = int(torch.randint(self.classes, (), generator=draw))
        shift = torch.rand((), generator=draw)
        waves = torch.sin(2 * math.pi * ((label + 1) * torch.arange(self.size) / self.size + shift))
        return waves + 0.5 * torch.randn(3, self.size, self.size, generator=draw), label


def _sonnets() -> str:
    return resources.files("culm.models").joinpath("sonnets.txt").read_text(encoding="utf-8")


def _generator(seed: int, index: int) -> torch.Generator:
    """Its own stream for every item: hashed, so that neighbouring seeds and items share nothing."""
    digest = hashlib.blake2b(f"{seed}.{index}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))
