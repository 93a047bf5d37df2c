"""Samples and randomness as functions of (seed, step, micro-batch, layer).

Nothing here remembers anything: whoever runs a piece of work, today or again after a loss, draws the same numbers.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from culm.job import Job

_MASK = (1 << 63) - 1


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _MASK


def seed_layer(seed: int, step: int, micro: int, layer: int, *, outside: bool = True) -> None:
    """Draws inside a layer (dropout and the like) come from (seed, step, micro-batch, layer).

    `outside` False: the layer is known to draw from torch alone.
    """
    value = key(seed, step, micro, layer)
    if outside:
        seed_everything(value)
    else:
        seed_torch(value)


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


def _shuffled(seed: int, number: int, count: int) -> int:
    epoch, position = divmod(number, count)
    return permute(position, count, key(seed, "order", epoch))


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
