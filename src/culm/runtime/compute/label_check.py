"""Find labels beyond the classes of the loss before a run: on a GPU they would end it with an error that names
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from culm.errors import JobError


class LabelRange(TorchFunctionMode):
    """Notes, while a loss is computed, how many classes torch's cross entropy has for the target as a whole."""

    def __init__(self, target: object) -> None:
        super().__init__()
        self._target = target if isinstance(target, Tensor) and not target.is_floating_point() else None
        self.classes: int | None = None
        """None: the loss is another one, or takes its labels from elsewhere."""
        self._ignored = -100

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in (functional.cross_entropy, functional.nll_loss):
            given = dict(zip(("input", "target"), args, strict=False)) | named
            self._note(given["input"], given["target"], named.get("ignore_index", -100))
        return func(*args, **named)

    def _note(self, scores: Tensor, labels: Tensor, ignored: int) -> None:
        """Labels of a part of the target could be others than those of the whole: only a view of all of it counts."""
        target = self._target
        if target is None or labels.numel() != target.numel() or not _is_view(labels, target):
            return
        self.classes, self._ignored = scores.shape[1 if scores.ndim > 1 else 0], ignored

    def check(self, where: str, target: object) -> None:
        """Raise JobError if a target has a label that the loss does not have."""
        if self.classes is None or not isinstance(target, Tensor) or target.is_floating_point():
            return
        labels = target[target != self._ignored]
        wrong = labels[(labels < 0) | (labels >= self.classes)]
        if wrong.numel():
            raise JobError(
                f"{where} has the label {int(wrong[0])}, and the loss has {self.classes} classes: use labels from 0 to "
                f"{self.classes - 1}, or {self._ignored} for none"
            )


def _is_view(one: Tensor, other: Tensor) -> bool:
    shared: bool = torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
    return shared
