"""How much memory autograd keeps for the backward of a layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SavedTensorBytes:
    """A hook for `saved_tensors_hooks` that adds up what a forward keeps. Memory that several operations save counts
    once; parameters and views of them do not count. A copy of a weight in another precision does: each micro-batch in
    flight keeps its own."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.total = 0
        self._known = {storage_key(parameter) for parameter in parameters}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            self.total += tensor.nbytes
        elif (storage := storage_key(tensor)) not in self._known:
            self._known.add(storage)
            self.total += tensor.untyped_storage().nbytes()
        return tensor


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor; also of one without data, with which a model is checked."""
    address: int = tensor.untyped_storage()._cdata
    return address
