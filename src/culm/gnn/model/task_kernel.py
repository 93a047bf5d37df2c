"""One dense task, from its inputs to its result. Workers and servers run the same function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.gnn.model.dense_kernels import (
    DenseKernels,
    DropoutContext,
    ForwardCache,
    attention_softmax,
    attention_softmax_backward,
)
from culm.gnn.model.dropout import dropout_rows

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model.dense_kernels import Gradients
    from culm.gnn.model.gnn_model import GnnModel, LayerWeights
    from culm.gnn.model.pass_steps import PassStep
    from culm.gnn.model.sparse_rows import SparseRows
    from culm.gnn.scheduler.passes import Pass


@dataclass(frozen=True)
class TaskResult:
    """Result of a dense task."""

    rows: Tensor | None
    gradients: Gradients = field(default_factory=dict)
    loss: float = 0.0
    counts: tuple[int, ...] = ()
    forward_cache: ForwardCache | None = None


class TaskKernel:
    """The dense tasks of a run."""

    def __init__(self, model: GnnModel, seed: int, train_vertices: int) -> None:
        self._model, self._seed, self._train_vertices = model, seed, train_vertices
        self._dense = DenseKernels(model)

    def run_task(
        self,
        step: PassStep,
        graph_pass: Pass,
        inputs: Sequence[Tensor],
        weights: Mapping[int, LayerWeights],
        forward_cache: ForwardCache | None = None,
        features: SparseRows | None = None,
    ) -> TaskResult:
        """Run a task. `inputs` are the tensors of `GraphShard.task_inputs`; `forward_cache` is that of the same
        interval and pass; `features` replace the features among the inputs if they are sparse."""
        if step.kind == "AE":
            return self._apply_edges(step, graph_pass, inputs)
        context = DropoutContext(self._seed, graph_pass.epoch, graph_pass.train, inputs[0])
        if step.layer == self._model.layers:
            loss = self._dense.loss(features or inputs[1], weights, context, inputs[2], inputs[3], self._train_vertices)
            return TaskResult(loss.row_gradient, loss.gradients, loss.loss_sum, loss.counts)
        if step.backward:
            source = features or (inputs[2] if len(inputs) > 2 else None)
            rows, gradients = self._dense.backward(step.layer, source, inputs[1], weights, context, forward_cache)
            return TaskResult(rows, gradients)
        output_rows, forward_cache = self._dense.forward(step.layer, features or inputs[1], weights, context)
        return TaskResult(output_rows, forward_cache=forward_cache)

    def _apply_edges(self, step: PassStep, graph_pass: Pass, inputs: Sequence[Tensor]) -> TaskResult:
        """Run AE or ∇AE. Dropout is applied to the attention; the backward recomputes the attention before dropout."""
        offsets, scores = (inputs[0] - inputs[0][0]).long(), inputs[1]
        p = self._model.attention_dropout if graph_pass.train else 0.0

        def apply_dropout(rows: Tensor) -> Tensor:
            return (
                dropout_rows(rows, p, self._seed, graph_pass.epoch, step.layer, inputs[-1], purpose="attention")
                if p
                else rows
            )

        if not step.backward:
            return TaskResult(apply_dropout(attention_softmax(scores, offsets)))
        attention = attention_softmax(scores, offsets) if p else inputs[2][:, : self._model.heads]
        return TaskResult(attention_softmax_backward(scores, attention, apply_dropout(inputs[3]), offsets))
