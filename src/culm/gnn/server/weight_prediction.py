"""A stashed version of a layer's weights, and the prediction of the weights some updates later.

A pass may start with weights that are some updates behind those that its gradients will be applied to. It then computes
with predicted weights (SpecTrain, XPipe):

    w' = w - s * lr * m / (sqrt(v) + eps)          m, v: Adam's corrected moments of w; s: updates behind

which repeats the last update s times. The parameter servers keep the true weights: only these are updated, saved,
evaluated and returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model.gnn_model import LayerWeights


@dataclass(frozen=True)
class StashedWeights:
    """A version as it is stashed and sent. `expected_update` is what the next update is expected to add; empty
    without prediction."""

    weights: LayerWeights
    expected_update: LayerWeights

    def predict(self, updates: int) -> LayerWeights:
        """Return the weights predicted for `updates` updates later; the true ones for 0."""
        if updates == 0 or not self.expected_update:
            return self.weights
        return {name: weight.add(self.expected_update[name], alpha=updates) for name, weight in self.weights.items()}

    def wire_tensors(self, names: Sequence[str]) -> list[Tensor]:
        """Return the tensors to send: the weights of these names, then their expected updates, if any."""
        return [group[name] for group in (self.weights, self.expected_update) if group for name in names]


def from_wire_tensors(names: Sequence[str], tensors: Sequence[Tensor]) -> StashedWeights:
    """Inverse of `StashedWeights.wire_tensors`."""
    updates = tensors[len(names) :]
    return StashedWeights(
        dict(zip(names, tensors[: len(names)], strict=True)),
        dict(zip(names, updates, strict=True)) if updates else {},
    )
