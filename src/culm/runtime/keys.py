"""Samples and randomness as functions of (seed, step, micro-batch, layer).

Nothing here remembers anything: whoever runs a piece of work, today or again after a loss, draws the same numbers.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from culm.job import Job

_MASK = (1 << 63) - 1


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order."""
    return _key("\x1f".join(map(str, parts)))


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


def draws(seed: int, step: int, micro: int, layers: Iterable[int]) -> list[int]:
    """What the draws inside layers (dropout and the like) come from: the keys of (seed, step, micro-batch, layer).

    All at once: between the kernels of two layers nothing of this would be in the cache, and a key takes three times
    as long.
    """
    before = f"{seed}\x1f{step}\x1f{micro}\x1f"
    return [_key(f"{before}{layer}") for layer in layers]


def seed_layer(draw: int, *, outside: bool = True) -> None:
    """Let a layer draw from its key. `outside` False: it is known to draw from torch alone."""
    if outside:
        seed_everything(draw)
    else:
        seed_torch(draw)


def outside_state() -> tuple[object, ...]:
    """Where the generators of `random` and numpy stand: it changes when somebody draws from them. Slow."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, words, position, *_ = numpy.random.get_state()
    return random.getstate(), words.tobytes(), position


def knows_outside(code: Callable[..., Any]) -> bool:
    """Whether a file that code stands in has imported `random` or numpy, or something of theirs, and so may draw."""
    homes = {getattr(getattr(code, "func", code), "__module__", None) or ""}
    if isinstance(code, nn.Module):
        homes = {cls.__module__ for part in code.modules() for cls in type(part).__mro__}
    own = [sys.modules.get(home) for home in homes if home.partition(".")[0] not in ("torch", "builtins")]
    return any(_from_outside(value) for home in own if home is not None for value in list(vars(home).values()))


def _from_outside(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in ("random", "numpy")
    owner = type(getattr(value, "__self__", None))
    return owner.__module__.partition(".")[0] in ("random", "numpy")


def seed_torch(value: int) -> None:
    """Seed the generators of the devices at hand; 100 times cheaper than torch.manual_seed on a CPU."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def seed_everything(value: int) -> None:
    """Seed torch, random and numpy: what a layer, a data set or an initialiser may draw from."""
    seed_torch(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def sample_indices(job: Job, step: int, micro: int) -> list[int]:
    """The items of micro-batch `micro` of `step`: each pass over the data visits every item once, in a keyed order."""
    count = len(job.data)
    first = step * job.global_batch + micro * job.micro_batch
    return [_shuffled(job.seed, number, count) for number in range(first, first + job.micro_batch)]


@functools.lru_cache(maxsize=4096)
def _shuffled(seed: int, number: int, count: int) -> int:
    """Kept for a while: whoever runs the first layers asks, and whoever runs the last; often that is one process."""
    epoch, position = divmod(number, count)
    return permute(position, count, _order(seed, epoch))


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int) -> int:
    return key(seed, "order", epoch)


def permute(position: int, count: int, secret: int) -> int:
    """Where `position` goes in a keyed permutation of range(count): a Feistel network, so nothing is stored.

    The network permutes a power of four that is at least `count`; walking its cycle until the value is in range
    again restricts it to range(count).
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(right + secret + turn) & mask)
        position = (left << half) | right
        if position < count:
            return position


def _mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value = (value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
