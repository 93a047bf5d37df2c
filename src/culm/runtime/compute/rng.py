"""Sample order and randomness as functions of (seed, step, micro-batch, layer).

Nothing here has state: whichever worker runs a piece of work, the first time or again after a loss, draws the same
numbers.
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

from culm.data.stream import Stream

if TYPE_CHECKING:
    from culm.job import Job

_SEED_MASK = (1 << 63) - 1


def derive_seed(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order."""
    return _hash_to_seed("\x1f".join(map(str, parts)))


def _hash_to_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _SEED_MASK


def layer_seeds(seed: int, step: int, micro: int, layers: Iterable[int]) -> list[int]:
    """The seeds of the random draws inside layers (dropout and the like), one for each of `layers`.

    Computed together: between the kernels of two layers nothing of this would be in the cache, and a seed would take
    three times as long.
    """
    before = f"{seed}\x1f{step}\x1f{micro}\x1f"
    return [_hash_to_seed(f"{before}{layer}") for layer in layers]


def seed_layer(seed: int, *, python_rng: bool = True) -> None:
    """Seed the generators that a layer draws from. `python_rng` False: the layer draws from torch only."""
    if python_rng:
        seed_everything(seed)
    else:
        seed_torch(seed)


def python_rng_state() -> tuple[object, ...]:
    """The state of the generators of `random` and numpy. It changes when they are used. Slow."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, words, position, *_ = numpy.random.get_state()
    return random.getstate(), words.tobytes(), position


def may_use_python_rng(code: Callable[..., Any]) -> bool:
    """Whether the file that defines some code has imported `random` or numpy, or a part of them, so that it may draw
    from them."""
    homes = {getattr(getattr(code, "func", code), "__module__", None) or ""}
    if isinstance(code, nn.Module):
        homes = {cls.__module__ for part in code.modules() for cls in type(part).__mro__}
    own = [sys.modules.get(home) for home in homes if home.partition(".")[0] not in ("torch", "builtins")]
    return any(_is_python_rng(value) for home in own if home is not None for value in list(vars(home).values()))


def _is_python_rng(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in ("random", "numpy")
    owner = type(getattr(value, "__self__", None))
    return owner.__module__.partition(".")[0] in ("random", "numpy")


def seed_torch(value: int) -> None:
    """Seed the generators of the available devices. On a CPU 100 times cheaper than torch.manual_seed."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def seed_everything(value: int) -> None:
    """Seed torch, random and numpy: everything that a layer, a data set or an initialiser may draw from."""
    seed_torch(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def sample_indices(job: Job, step: int, micro: int) -> list[int]:
    """The items of micro-batch `micro` of `step`. Each pass over the data visits every item once, in an order given by
    the seed. A stream is used in its own order."""
    first = step * job.global_batch + micro * job.micro_batch
    if isinstance(job.data, Stream):
        return list(range(first, first + job.micro_batch))
    count = len(job.data)
    return [_shuffled_index(job.seed, number, count) for number in range(first, first + job.micro_batch)]


@functools.lru_cache(maxsize=4096)
def _shuffled_index(seed: int, number: int, count: int) -> int:
    """Cached: the workers of the first and of the last layers ask for it, and often they are one process."""
    epoch, position = divmod(number, count)
    return permute(position, count, _order_seed(seed, epoch))


@functools.lru_cache(maxsize=8)
def _order_seed(seed: int, epoch: int) -> int:
    return derive_seed(seed, "order", epoch)


def permute(position: int, count: int, seed: int) -> int:
    """The image of `position` in a keyed permutation of range(count): a Feistel network, so that nothing is stored.

    The network permutes a power of four that is at least `count`. Following its cycle until the value is in range
    restricts it to range(count).
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(right + seed + turn) & mask)
        position = (left << half) | right
        if position < count:
            return position


def _mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value = (value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
