"""Micro-batches: from numbers of samples to tensors on the device, some of them ahead of time."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import default_collate

from culm.errors import CulmError, JobError, LayerFailed, said
from culm.runtime.keys import key, sample_indices, seed_everything
from culm.runtime.raised import RAISED

if TYPE_CHECKING:
    from culm.job import Dataset, Job
    from culm.runtime.clock import Clock

Values: TypeAlias = tuple[Tensor, ...]
"""What travels between layers, always as a tuple; `pack` and `unpack` turn it into what a user's layer sees."""


_READY = 1 << 24
"""Bytes of micro-batches that may lie ready: more would only take memory."""


class Supply:
    """The micro-batches that a worker takes step by step. While it waits for others it can make the next ones."""

    def __init__(self, job: Job, device: torch.device, clock: Clock, wanted: Sequence[int]) -> None:
        self._job, self._device, self._clock = job, device, clock
        self._wanted = wanted
        """In the order in which a step takes them."""
        self._due: collections.deque[tuple[int, int]] = collections.deque()
        self._ready: dict[tuple[int, int], tuple[Values, Any]] = {}
        self._took_s = math.inf
        self._bytes = 0
        """Of a micro-batch, as the last one had them."""

    def begin(self, step: int) -> None:
        """A step is about to take its own, and the next one will be after it."""
        coming = [(step, micro) for micro in self._wanted]
        if step + 1 < self._job.steps:
            coming += [(step + 1, micro) for micro in self._wanted]
        self._due = collections.deque(one for one in coming if one not in self._ready)

    def take(self, step: int, micro: int) -> tuple[Values, Any]:
        """(input, target), made now if they do not lie ready."""
        found = self._ready.pop((step, micro), None)
        if found is None:
            found = self._made(step, micro)
            if self._due and self._due[0] == (step, micro):
                self._due.popleft()
        return found

    def ahead(self, room: float) -> bool:
        """Make the next one, unless that would take longer than so many seconds; False: nothing was made. What is wrong
        with the data is for the step that takes it to say."""
        if not self._due or self._took_s > room or (len(self._ready) + 1) * self._bytes > _READY:
            return False
        step, micro = self._due.popleft()
        with contextlib.suppress(CulmError):
            self._ready[step, micro] = self._made(step, micro)
        return True

    def _made(self, step: int, micro: int) -> tuple[Values, Any]:
        began = self._clock.now()
        found = micro_batch(self._job, step, micro, self._device)
        self._took_s = self._clock.now() - began
        self._bytes = _nbytes(found)
        return found


def _nbytes(value: Any) -> int:
    """Of the tensors in it."""
    held = 0

    def count(leaf: Any) -> None:
        nonlocal held
        held += leaf.nbytes if isinstance(leaf, Tensor) else 0

    mapped(value, count)
    return held


def micro_batch(job: Job, step: int, micro: int, device: torch.device) -> tuple[Values, Any]:
    """(input, target) of micro-batch `micro` of `step`. Draws of the data set and the collation are keyed alike."""
    seed_everything(key(job.seed, "data", step, micro))
    return _collated(job, "data", sample_indices(job, step, micro), device)


def evaluation_batch(job: Job, micro: int, device: torch.device) -> tuple[Values, Any]:
    """Items in order; the last micro-batch may be short."""
    assert job.evaluate is not None
    seed_everything(key(job.seed, "evaluate", micro))
    first = micro * job.micro_batch
    items = range(first, min(first + job.micro_batch, len(job.evaluate)))
    return _collated(job, "evaluate", items, device)


def evaluation_batches(job: Job) -> int:
    """How many micro-batches one evaluation has."""
    return -(-len(job.evaluate) // job.micro_batch) if job.evaluate is not None else 0


def evaluation_share(job: Job, micro: int, loss: Tensor, weight: Tensor | float | None) -> tuple[float, float]:
    """What a micro-batch adds to an evaluation: its loss, and its weight. A mean counts by the items behind it."""
    if weight is not None:
        return loss.item(), float(weight)
    assert job.evaluate is not None
    items = float(min(job.micro_batch, len(job.evaluate) - micro * job.micro_batch))
    return loss.item() * items, items


def _collated(job: Job, field: str, indices: Any, device: torch.device) -> tuple[Values, Any]:
    data: Dataset = getattr(job, field)
    try:
        items = [data[index] for index in indices]
    except RAISED as error:
        raise LayerFailed(f"Job.{field} raised {type(error).__name__} for item {list(indices)}{said(error)}") from error
    try:
        batch = (job.collate or _collate)(items)
    except RAISED as error:
        raise LayerFailed(f"the collation raised {type(error).__name__}{said(error)}") from error
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = type(batch).__name__
        raise JobError(f"Job.{field} gives {kind} after collation: an item must be a pair (input, target)")
    inputs, target = batch
    return pack(to_device(inputs, device), f"the input that Job.{field} gives"), to_device(target, device)


def _collate(items: list[Any]) -> Any:
    """As torch does it, in a shorter way where items are pairs of tensors."""
    if all(type(item) is tuple and len(item) == 2 and type(item[0]) is type(item[1]) is Tensor for item in items):
        inputs, targets = zip(*items, strict=True)
        return torch.stack(inputs), torch.stack(targets)
    return default_collate(items)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and whatever else can move itself, moved; everything else as it is."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return mapped(value, moved)


def mapped(value: Any, turn: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dictionaries with what is in them turned into something else."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, turn) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, turn) for item in value)
    if isinstance(value, dict):
        return {name: mapped(item, turn) for name, item in value.items()}
    return turn(value)


def pack(value: Any, what: str) -> Values:
    """What a layer returned, as a tuple of tensors; anything else is refused by name."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    raise JobError(f"{what} is a {_kind(value)}: between layers travels a tensor or a tuple of tensors")


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(map(_kind, value))})"
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__
