"""How much memory autograd keeps for the backward of a layer, and between the halves of a split backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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


class DeferredBytes:
    """Adds up what a split backward keeps from I until W: the gradients at the outputs of modules that have trained
    parameters of their own."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def counting(self, module: nn.Module) -> Iterator[None]:
        """While this is open, forwards of the module count."""
        with ExitStack() as stack:
            for part in module.modules():
                if any(p.requires_grad for p in part.parameters(recurse=False)):
                    stack.callback(part.register_forward_hook(self._add).remove)
            yield

    def _add(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        values = outputs if isinstance(outputs, tuple | list) else (outputs,)
        self.total += sum(v.nbytes for v in values if isinstance(v, Tensor) and v.requires_grad)


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor; also of one without data, with which a model is checked."""
    address: int = tensor.untyped_storage()._cdata
    return address
