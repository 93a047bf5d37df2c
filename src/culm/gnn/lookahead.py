"""A version of a layer's weights, and the weights that are expected some updates later.

A pass may begin with weights that are some updates behind those that its gradients will be applied to. It then computes
with the weights that are expected by then (SpecTrain, XPipe):

    w' = w - s * lr * m / (sqrt(v) + eps)          m, v: Adam's moments of w, corrected; s: updates behind

which is the last update, once more for every update to come. The true weights stay with the parameter servers: they are
what is updated, saved, evaluated and returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model import Weights


@dataclass(frozen=True)
class Stashed:
    """A version as it is kept and sent. `step`: what the next update is expected to add; empty: nobody looks ahead."""

    weights: Weights
    step: Weights

    def ahead(self, updates: int) -> Weights:
        """The weights that are expected so many updates later; the true ones for none."""
        if updates == 0 or not self.step:
            return self.weights
        return {name: own.add(self.step[name], alpha=updates) for name, own in self.weights.items()}

    def tensors(self, names: Sequence[str]) -> list[Tensor]:
        """As they travel: the weights of these names, behind them their steps where there are any."""
        return [own[name] for own in (self.weights, self.step) if own for name in names]


def received(names: Sequence[str], tensors: Sequence[Tensor]) -> Stashed:
    """What was sent as `Stashed.tensors`."""
    steps = tensors[len(names) :]
    return Stashed(
        dict(zip(names, tensors[: len(names)], strict=True)),
        dict(zip(names, steps, strict=True)) if steps else {},
    )
