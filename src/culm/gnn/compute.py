"""One dense task from its inputs to its result: the same function for a worker and for a server that runs it itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.dense import Context, Dense, Kept, attend, attend_back
from culm.gnn.dropout import drop

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.dense import Gradients
    from culm.gnn.few import Few
    from culm.gnn.model import Model, Weights
    from culm.gnn.passes import Pass
    from culm.gnn.program import Step


@dataclass(frozen=True)
class Outcome:
    """What a dense task comes to."""

    rows: Tensor | None
    gradients: Gradients = field(default_factory=dict)
    loss: float = 0.0
    counts: tuple[int, ...] = ()
    kept: Kept | None = None


class Kernel:
    """The dense tasks of a run."""

    def __init__(self, model: Model, seed: int, total: int) -> None:
        self._model, self._seed, self._total = model, seed, total
        self._dense = Dense(model)

    def run(
        self,
        step: Step,
        now: Pass,
        inputs: Sequence[Tensor],
        weights: Mapping[int, Weights],
        keep: Kept | None = None,
        features: Few | None = None,
    ) -> Outcome:
        """Inputs as `Shard.inputs` names them; `keep` is what the forward of the same interval and pass left.
        `features`: those among the inputs, where they are few."""
        if step.kind == "AE":
            return self._edges(step, now, inputs)
        context = Context(self._seed, now.epoch, now.train, inputs[0])
        if step.layer == self._model.layers:
            found = self._dense.loss(features or inputs[1], weights, context, inputs[2], inputs[3], self._total)
            return Outcome(found.rows, found.gradients, found.total, found.counts)
        if step.back:
            source = features or (inputs[2] if len(inputs) > 2 else None)
            rows, gradients = self._dense.backward(step.layer, source, inputs[1], weights, context, keep)
            return Outcome(rows, gradients)
        sent, left = self._dense.forward(step.layer, features or inputs[1], weights, context)
        return Outcome(sent, kept=left)

    def _edges(self, step: Step, now: Pass, inputs: Sequence[Tensor]) -> Outcome:
        """What is gathered with is the attention after dropout; its gradient needs the attention before it again."""
        offsets, scores = (inputs[0] - inputs[0][0]).long(), inputs[1]
        p = self._model.attention_dropout if now.train else 0.0

        def thinned(rows: Tensor) -> Tensor:
            return drop(rows, p, self._seed, now.epoch, step.layer, inputs[-1], what="attention") if p else rows

        if not step.back:
            return Outcome(thinned(attend(scores, offsets)))
        attention = attend(scores, offsets) if p else inputs[2][:, : self._model.heads]
        return Outcome(attend_back(scores, attention, thinned(inputs[3]), offsets))
