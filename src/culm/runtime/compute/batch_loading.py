"""Load micro-batches: from sample indices to tensors on the device, some of them in advance."""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import xxhash
from torch import Tensor
from torch.utils.data import default_collate

from culm.data.stream import Stream
from culm.device.device_copies import DeviceCopies
from culm.errors import CulmError, JobError, LayerFailed, message_suffix
from culm.runtime.compute.loader_pool import LoaderPool
from culm.runtime.compute.rng import derive_seed, sample_indices, seed_everything
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Dataset, Job
    from culm.runtime.clock import Clock

Activations: TypeAlias = tuple[Tensor, ...]
"""What is passed between layers, always as a tuple. A layer with one input or output sees the tensor itself."""


class SampleDigests(NamedTuple):
    """Which samples a micro-batch consists of, as digests of their indices in order: those that were fetched, and
    those that its number stands for. Integers below 2^53, which a float64 holds exactly."""

    fetched: int
    expected: int


NO_SAMPLES = SampleDigests(0, 0)
"""The digests of a segment that loads no data."""


class MicroBatch(NamedTuple):
    """A micro-batch on the device."""

    inputs: Activations
    target: Any
    fetched: int = 0
    """Digest of the indices that were fetched from the data set."""


def digest_indices(indices: Sequence[int]) -> int:
    """A digest of sample indices in order, below 2^53."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(indices)}q", *indices)) >> 11


def expected_samples(job: Job, step: int, micro: int) -> int:
    """The digest of the indices that a micro-batch of a step stands for."""
    return digest_indices(sample_indices(job, step, micro))


def visits_items_once(job: Job, step: int) -> bool:
    """Whether a step lies within one pass over the data, so that none of its samples is used twice."""
    if isinstance(job.data, Stream):
        return True  # its items are numbered on over all passes
    first, count = step * job.global_batch, len(job.data)
    return first // count == (first + job.global_batch - 1) // count


_CPU = torch.device("cpu")
_MAX_PREFETCH_BYTES = 1 << 24
"""Limit for the bytes of prefetched micro-batches: more would only use memory."""


class MicroBatchPrefetcher:
    """The micro-batches that a worker needs, step by step. While the worker waits for a frame it can load the next
    ones."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        clock: Clock,
        micro_batches: Sequence[int],
        copies: DeviceCopies | None = None,
    ) -> None:
        """`copies`: to the device; default: it is the CPU."""
        self._job, self._device, self._clock, self._copies = job, device, clock, copies or DeviceCopies()
        self._micro_batches = micro_batches
        """In the order in which a step uses them."""
        self._pending: collections.deque[tuple[int, int]] = collections.deque()
        self._prefetched: dict[tuple[int, int], MicroBatch] = {}
        self._loaders = LoaderPool(job, lambda step, micro: load_micro_batch(job, step, micro, _CPU))
        self._last_load_s = math.inf
        self._batch_bytes = 0
        """Size of a micro-batch, as of the last one that was loaded."""

    def start_step(self, step: int) -> None:
        """Prepare to prefetch the micro-batches of a step that is about to begin, and of the one after it."""
        coming = [(step, micro) for micro in self._micro_batches]
        if step + 1 < self._job.steps:
            coming += [(step + 1, micro) for micro in self._micro_batches]
        if self._job.loaders:
            self._loaders.request(coming)
        else:
            self._pending = collections.deque([one for one in coming if one not in self._prefetched])

    def must_wait(self, step: int, micro: int) -> bool:
        """Whether a loader process still has to deliver a micro-batch: call `wait` in a thread before `take`. With
        loaders, the worker itself loads none: an item that hangs or ends its process may be tried on several
        workers."""
        if not self._job.loaders:
            return False
        self._loaders.add(step, micro)
        return not self._loaders.is_loaded(step, micro)

    def wait(self, step: int, micro: int) -> None:
        """Wait for a micro-batch from a loader process. Raises LayerFailed if it dies or takes too long."""
        self._loaders.wait(step, micro)

    def interrupt_wait(self) -> None:
        """Make a `wait` in another thread raise soon."""
        self._loaders.kill()

    def close(self) -> None:
        """End the loader processes."""
        self._loaders.close()

    def take(self, step: int, micro: int) -> MicroBatch:
        """A micro-batch. It is loaded now if it was not prefetched."""
        if self._job.loaders and self._loaders.has(step, micro):
            loaded: MicroBatch = self._loaders.take(step, micro)
            return self._move(loaded)
        batch = self._prefetched.pop((step, micro), None)
        if batch is None:
            batch = self._load(step, micro)
            if self._pending and self._pending[0] == (step, micro):
                self._pending.popleft()
        return batch

    def prefetch(self, max_seconds: float) -> bool:
        """Load the next micro-batch, unless that would take longer than `max_seconds`; False: nothing was loaded. An
        error in the data is raised later, by the step that uses the micro-batch."""
        if (
            not self._pending
            or self._last_load_s > max_seconds
            or (len(self._prefetched) + 1) * self._batch_bytes > _MAX_PREFETCH_BYTES
        ):
            return False
        step, micro = self._pending.popleft()
        try:  # noqa: SIM105 - without the calls of a context manager
            self._prefetched[step, micro] = self._load(step, micro)
        except CulmError:
            pass
        return True

    def _move(self, batch: MicroBatch) -> MicroBatch:
        """Move a loaded micro-batch to the device, beside the computation."""

        def move() -> MicroBatch:
            inputs, target = to_device(batch.inputs, self._device), to_device(batch.target, self._device)
            return MicroBatch(inputs, target, batch.fetched)

        moved: MicroBatch = self._copies.load(move, lambda found: _tensors_in((found.inputs, found.target)))
        return moved

    def _load(self, step: int, micro: int) -> MicroBatch:
        began = self._clock.now()
        if self._copies.is_synchronous:
            batch = load_micro_batch(self._job, step, micro, self._device)
        else:
            batch = self._move(load_micro_batch(self._job, step, micro, _CPU))
        self._last_load_s = self._clock.now() - began
        self._batch_bytes = sum([tensor.nbytes for tensor in batch.inputs]) + _tensor_bytes(batch.target)
        return batch


def _tensor_bytes(value: Any) -> int:
    """Number of bytes of all tensors in a structure."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_tensor_bytes, value)) if isinstance(value, (tuple, list, ValuesView)) else 0


def _tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a structure."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in _tensors_in(item)]


def load_micro_batch(job: Job, step: int, micro: int, device: torch.device) -> MicroBatch:
    """Load micro-batch `micro` of `step`. Random draws of the data set and of the collation are seeded by
    (seed, step, micro)."""
    seed_everything(derive_seed(job.seed, "data", step, micro))
    return load_items(job, "data", sample_indices(job, step, micro), device)


def load_evaluation_batch(job: Job, micro: int, device: torch.device) -> MicroBatch:
    """Load a micro-batch of the evaluation set. Items are in order; the last micro-batch may be short."""
    assert job.evaluate is not None
    seed_everything(derive_seed(job.seed, "evaluate", micro))
    first = micro * job.micro_batch
    items = range(first, min(first + job.micro_batch, len(job.evaluate)))
    return load_items(job, "evaluate", items, device)


def evaluation_micro_batches(job: Job) -> int:
    """Number of micro-batches of one evaluation."""
    return -(-len(job.evaluate) // job.micro_batch) if job.evaluate is not None else 0


def evaluation_contribution(job: Job, micro: int, loss: Tensor, weight: Tensor | float | None) -> tuple[float, float]:
    """(loss, weight) that a micro-batch adds to an evaluation. A mean is weighted by its number of items."""
    if weight is not None:
        return loss.item(), float(weight)
    assert job.evaluate is not None
    items = float(min(job.micro_batch, len(job.evaluate) - micro * job.micro_batch))
    return loss.item() * items, items


def load_items(job: Job, field: str, indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Load items of Job.data or Job.evaluate as one micro-batch. Raises LayerFailed, which names the items, for an
    exception of the data set or of the collation."""
    data: Dataset = getattr(job, field)
    try:
        items = [data[index] for index in indices]
    except LayerFailed:  # of a stream, which names the item
        raise
    except JobError as error:  # of culm.data, which says what is wrong
        raise LayerFailed(f"Job.{field} cannot load item {list(indices)}: {error}") from error
    except ASYNC_USER_EXCEPTIONS as error:
        raise LayerFailed(
            f"Job.{field} raised {type(error).__name__} for item {list(indices)}{message_suffix(error)}"
        ) from error
    try:
        batch = (job.collate or _default_collate)(items)
    except JobError as error:
        raise LayerFailed(f"Job.{field} cannot load item {list(indices)}: {error}") from error
    except ASYNC_USER_EXCEPTIONS as error:
        what = f"the collation of Job.{field} raised {type(error).__name__} for items {list(indices)}"
        raise LayerFailed(f"{what}{message_suffix(error)}") from error
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = type(batch).__name__
        raise JobError(f"Job.{field} gives {kind} after collation: an item must be a pair (input, target)")
    inputs, target = batch
    packed = pack_activations(to_device(inputs, device), f"the input that Job.{field} gives")
    return MicroBatch(packed, to_device(target, device), digest_indices(indices))


def _default_collate(items: list[Any]) -> Any:
    """torch's default collation, with a shorter path for pairs of tensors."""
    if all(type(item) is tuple and len(item) == 2 and type(item[0]) is type(item[1]) is Tensor for item in items):
        inputs, targets = zip(*items, strict=True)
        return torch.stack(inputs), torch.stack(targets)
    return default_collate(items)


def to_device(value: Any, device: torch.device) -> Any:
    """A structure with its tensors, and other objects that have a method `to`, moved to the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return map_structure(value, moved)


def map_structure(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dictionaries with `function` applied to each leaf."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_structure(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_structure(item, function) for item in value)
    if isinstance(value, dict):
        return {name: map_structure(item, function) for name, item in value.items()}
    return function(value)


def pack_activations(value: Any, description: str) -> Activations:
    """What a layer returned, as a tuple of tensors. Raises JobError, which names the layer, for anything else."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    raise JobError(f"{description} is a {_type_name(value)}: layers pass a tensor or a tuple of tensors to each other")


def _type_name(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(map(_type_name, value))})"
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__
