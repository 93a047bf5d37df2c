"""What a forward keeps for its backward, off the device until the backward runs.

`SavedTensors` notes what autograd saves in a forward. Afterwards the memory of it is copied to the host once, whatever
views of it there are, and the graph refers to the copies (`OffLoadedTape`). Before the backward all of it is copied
back to memory with the same offsets and strides, so that the backward computes the same bits.

Weights, buffers and other tensors of the layers stay where they are. A copy of a weight in another precision, as
autocast makes it, is dropped and made again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from culm.runtime.compute.saved_tensors import storage_key

if TYPE_CHECKING:
    from culm.device.device_copies import DeviceCopies, HostCopy
    from culm.runtime.compute.segment import Tape

_VIEWS = ("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0")
"""Functions whose result is the same memory, under other strides."""
_MIN_SHARE = 0.5
"""Memory of which less is saved stays: most of it belongs to something else."""


class _Memory:
    """Memory of the device in which saved tensors lie."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.viewed_bytes = 0
        self.flat: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            storage, 0, (self.size,), (1,)
        )
        """None: it is not on the device."""

    def view(self, view: _View) -> Tensor:
        if self.flat is None:
            raise RuntimeError("a backward of a tape whose tensors are not on the device")
        whole = torch.empty(0, dtype=view.dtype, device=self.flat.device)
        return whole.set_(self.flat.untyped_storage(), view.offset, view.shape, view.strides)


class _Converted(_Memory):
    """A copy of a weight in another precision."""

    def __init__(self, tensor: Tensor, weight: Tensor) -> None:
        super().__init__(tensor)
        self._weight, self._dtype, self._version = weight, tensor.dtype, weight._version

    def convert(self) -> None:
        """Make the copy again."""
        if self.flat is None:
            _check_version(self._weight, self._version)
            converted = self._weight.detach().to(self._dtype)
            self.flat = torch.empty(0, dtype=torch.uint8, device=converted.device).set_(
                converted.untyped_storage(), 0, (self.size,), (1,)
            )


class _Saved(Protocol):
    """What the graph refers to instead of a tensor."""

    def tensor(self) -> Tensor: ...


class _Kept:
    """A tensor that stays."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    @property
    def is_unchanged(self) -> bool:
        return self._tensor._version == self._version

    def tensor(self) -> Tensor:
        _check_version(self._tensor, self._version)
        return self._tensor


class _View:
    """A tensor in memory that may leave."""

    def __init__(self, tensor: Tensor, memory: _Memory) -> None:
        self.memory, self.dtype = memory, tensor.dtype
        self.shape, self.strides, self.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self._kept: _Kept | None = _Kept(tensor)
        """Until the memory leaves, with the version of the tensor."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the tensor, which is on the device, has the values that were saved."""
        return self._kept is None or self._kept.is_unchanged

    def leave(self) -> None:
        """The memory leaves: drop the tensor."""
        self._kept = None

    def tensor(self) -> Tensor:
        return self.memory.view(self) if self._kept is None else self._kept.tensor()


class SavedTensors:
    """Notes what forwards of some layers keep. Objects that the graph drops are forgotten."""

    def __init__(self, device: torch.device, modules: Iterable[nn.Module], min_bytes: int) -> None:
        """`modules`: of the layers and the loss, whose tensors stay. `min_bytes`: smaller tensors stay, too."""
        self._device, self._min_bytes = device, min_bytes
        self._staying = {
            storage_key(value)
            for module in modules
            for each in module.modules()
            for value in (*each.parameters(recurse=False), *each.buffers(recurse=False), *vars(each).values())
            if isinstance(value, Tensor) and value.layout is torch.strided
        }
        self._memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        """By key of the storage, in the order of their first use. An entry keeps its storage alive."""
        self._views: weakref.WeakSet[_View] = weakref.WeakSet()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While this is open, autograd saves tensors here."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, _tensor_of):
            yield

    def _save(self, tensor: Tensor) -> _Saved:
        if not self._may_leave(tensor):
            return _Kept(tensor)
        key = storage_key(tensor)
        memory = self._memories.get(key)
        if memory is None:
            weight = self._converted_weight(tensor)
            memory = self._memories[key] = _Memory(tensor) if weight is None else _Converted(tensor, weight)
        memory.viewed_bytes += tensor.nbytes
        view = _View(tensor, memory)
        self._views.add(view)
        return view

    def _may_leave(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and tensor.untyped_storage().nbytes() >= max(self._min_bytes, 1)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and storage_key(tensor) not in self._staying
        )

    def _converted_weight(self, tensor: Tensor) -> Tensor | None:
        """The weight that a tensor is a copy of, in another precision; None: it is something else."""
        node: Any = tensor.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0":
            return None
        weight = getattr(node.next_functions[0][0], "variable", None)
        if weight is None or storage_key(weight) not in self._staying or not weight.is_contiguous():
            return None
        is_whole = tensor.untyped_storage().nbytes() == weight.numel() * tensor.itemsize
        return weight if is_whole and weight.device == tensor.device else None

    def off_loaded(self, tape: Tape, copies: DeviceCopies) -> OffLoadedTape:
        """What is to leave the device of a tape: what was noted, and the ends of its pieces."""
        ends: dict[int, Tensor] = {}
        for piece in tape.pieces:
            ends |= {id(tensor): tensor for tensor in (*piece.inputs, *piece.outputs)}
        for *_, inputs in tape.recompute_inputs:
            ends |= {id(tensor): tensor for tensor in inputs}
        ends |= {id(tensor): tensor for tensor in tape.inputs}
        with torch.no_grad():
            replaced = [(end, saved) for end in ends.values() if isinstance(saved := self._save(end), _View)]
        views = list(self._views)
        changed = {id(view.memory) for view in views if not view.is_unchanged}  # an error if a backward uses them
        memories = [
            memory
            for memory in list(self._memories.values())
            if (isinstance(memory, _Converted) or memory.viewed_bytes >= _MIN_SHARE * memory.size)
            and id(memory) not in changed
        ]
        return OffLoadedTape(copies, memories, views, replaced)


class OffLoadedTape:
    """What a tape keeps, on the device or on the host."""

    def __init__(
        self,
        copies: DeviceCopies,
        memories: list[_Memory],
        views: list[_View],
        ends: list[tuple[Tensor, _View]],
    ) -> None:
        """`ends`: tensors of the tape itself."""
        self._copies = copies
        leaving = {id(memory) for memory in memories}
        self._copied = [memory for memory in memories if not isinstance(memory, _Converted)]
        self._converted = [memory for memory in memories if isinstance(memory, _Converted)]
        self._views: list[weakref.ref[_View]] = [weakref.ref(view) for view in views if id(view.memory) in leaving]
        self._ends = [(tensor, view) for tensor, view in ends if id(view.memory) in leaving]
        self._host_copies: list[HostCopy] = []
        self._sources: list[weakref.ref[Tensor]] = []
        """The memory of the device that is copied, which is held until that is complete."""
        self._has_left = False

    @property
    def is_on_host(self) -> bool:
        """Whether it has slabs."""
        return bool(self._host_copies)

    @property
    def copied_bytes(self) -> int:
        """Bytes of what is copied."""
        return sum(memory.size for memory in self._copied)

    def missing_slabs(self) -> list[int] | None:
        """See `DeviceCopies.missing_slabs`."""
        return self._copies.missing_slabs(self._flat_tensors())

    def _flat_tensors(self) -> list[Tensor]:
        return [memory.flat for memory in self._copied if memory.flat is not None]

    def leave_device(self) -> None:
        """Queue the copies to the host. The memory of the device is free when they are complete."""
        tensors = self._flat_tensors()
        self._sources = [weakref.ref(tensor) for tensor in tensors]
        self._host_copies = self._copies.off_load(tensors)
        del tensors
        for memory in (*self._copied, *self._converted):
            memory.flat = None
        for reference in self._views:
            view = reference()
            if view is not None:
                view.leave()
        for tensor, _ in self._ends:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._has_left = True

    @property
    def is_copied(self) -> bool:
        """Whether the copies to the host are complete. Does not wait."""
        return all(copy.event.is_complete() for copy in self._host_copies)

    def bring_back(self) -> None:
        """Before the backward: queue the copies to the device. What is launched from now on finds the tensors."""
        if not self._has_left:
            return
        on_host = [tensor for copy in self._host_copies for tensor in copy.tensors]
        for memory, source, tensor in zip(self._copied, self._sources, on_host, strict=True):
            memory.flat = source()  # still here until the copy to the host is complete
            if memory.flat is None:
                (memory.flat,) = self._copies.to_device((tensor,))
        for converted in self._converted:
            converted.convert()
        for tensor, view in self._ends:
            tensor.data = view.memory.view(view)
        self._has_left = False
        self._host_copies, self._sources = [], []
        self._copied, self._converted, self._ends, self._views = [], [], [], []


def _tensor_of(saved: _Saved) -> Tensor:
    return saved.tensor()


def _check_version(tensor: Tensor, version: int) -> None:
    """What autograd checks for tensors that it keeps itself."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}, and was saved at version {version}"
        )
