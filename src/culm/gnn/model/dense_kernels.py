"""The dense tasks, forward and backward, without autograd: apply vertex (AV) and apply edge (AE). Servers and
workers compute the same bits.

A function takes rows of one interval and weights, and returns rows and gradients; it keeps no state. `ForwardCache`
carries intermediate results from a forward to its backward. Without it, the backward recomputes them from its inputs
(rematerialisation), with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from culm.gnn.graph.csr_graph import TEST, TRAIN, VAL
from culm.gnn.model.dropout import dropout_rows
from culm.gnn.model.gnn_model import GnnModel, LayerWeights
from culm.gnn.model.pass_steps import multiply_orders
from culm.gnn.model.sparse_rows import SparseRows

if TYPE_CHECKING:
    Gradients = dict[int, LayerWeights]

RowBlock = Tensor | SparseRows
LEAKY_RELU_SLOPE = 0.2
"""Slope of the leaky ReLU on attention scores, as in PyG."""


@dataclass(frozen=True)
class DropoutContext:
    """Seed, training epoch and vertices that dropout depends on; no dropout unless `train`."""

    seed: int
    epoch: int
    train: bool
    vertices: Tensor
    """Global numbers of the rows."""


class ForwardCache(NamedTuple):
    """Results of AV that ∇AV needs: the input after dropout (if it was changed), the activations, the output rows."""

    input_rows: RowBlock
    activations: RowBlock
    output_rows: Tensor


class LossResult(NamedTuple):
    """Result of the last AV of an interval."""

    row_gradient: Tensor | None
    """Gradient of the gathered rows. None in an evaluation, and for models without a gather."""
    gradients: Gradients
    loss_sum: float
    """Sum of the losses of the interval's training vertices."""
    counts: tuple[int, ...]
    """Training: the number of training vertices. Evaluation: correct and total, for train, val and test vertices."""


class DenseKernels:
    """The dense tasks of one model."""

    def __init__(self, model: GnnModel) -> None:
        self._model, self._orders = model, multiply_orders(model)

    def forward(
        self, layer: int, rows: RowBlock, weights: Mapping[int, LayerWeights], context: DropoutContext
    ) -> tuple[Tensor, ForwardCache]:
        """AV: compute the rows to scatter for `layer` from the gathered rows of layer - 1 (or the features)."""
        input_rows, activations = self._activations(layer, rows, weights, context)
        if self._model.kind == "gat":
            output_rows = self._append_attention_scores(
                layer, _linear(activations, weights[layer]["lin.weight"]), weights[layer]
            )
        elif self._orders[layer] == "multiply":
            output_rows = _linear(activations, weights[layer]["lin.weight"])
        else:
            output_rows = _require_dense(activations)
        return output_rows, ForwardCache(input_rows, activations, output_rows)

    def backward(
        self,
        layer: int,
        rows: RowBlock | None,
        output_gradient: Tensor,
        weights: Mapping[int, LayerWeights],
        context: DropoutContext,
        cache: ForwardCache | None,
    ) -> tuple[Tensor | None, Gradients]:
        """∇AV: compute the gradients of the weights and of the gathered rows below from the gradient of the output
        rows.

        Returns None for the row gradient if nothing is gathered below. Needs either the forward's `cache` or its input
        `rows`.
        """
        if cache is None:
            assert rows is not None
            _, cache = self.forward(layer, rows, weights, context)
        gradients: Gradients = {}
        gradient = self._output_backward(layer, output_gradient, weights, cache, gradients)
        if layer == 0 or gradient is None:
            return None, gradients
        p = self._model.dropout if context.train else 0.0
        activations = _require_dense(cache.activations)  # zero where ReLU or dropout zeroed a unit
        gradient = torch.ops.aten.threshold_backward(gradient, activations, 0)
        if p:
            gradient.mul_(1 / (1 - p))
        return self._pre_activation_backward(layer - 1, gradient, weights, cache.input_rows, gradients), gradients

    def loss(
        self,
        rows: RowBlock,
        weights: Mapping[int, LayerWeights],
        context: DropoutContext,
        labels: Tensor,
        roles: Tensor,
        train_vertices: int,
    ) -> LossResult:
        """The last AV: compute logits, the loss (a mean over the `train_vertices` of the whole graph), and its
        gradients."""
        layer = self._model.layers - 1
        source, logits = self._logits(layer, rows, weights, context)
        if not context.train:
            return LossResult(None, {}, 0.0, _accuracy_counts(logits, labels, roles))
        train_rows = (roles == TRAIN).nonzero().squeeze(1)
        log_probabilities = functional.log_softmax(logits[train_rows], 1)
        targets = labels[train_rows].unsqueeze(1)
        loss_sum = -log_probabilities.gather(1, targets).sum(dtype=torch.float64).item()
        slope = log_probabilities.exp_()
        slope.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=slope.dtype))
        logit_gradient = torch.zeros_like(logits).index_copy_(0, train_rows, slope.div_(train_vertices))
        gradients: Gradients = {}
        row_gradient = self._pre_activation_backward(layer, logit_gradient, weights, source, gradients)
        return LossResult(row_gradient, gradients, loss_sum, (len(train_rows),))

    def _activations(
        self, layer: int, rows: RowBlock, weights: Mapping[int, LayerWeights], context: DropoutContext
    ) -> tuple[RowBlock, RowBlock]:
        """Return the input rows after dropout, and the input of the layer's product: features, or activations of
        gathered rows."""
        if layer == 0:
            features = _apply_dropout(rows, self._model.input_dropout, 0, context)
            return features, features
        source, pre_activation = self._pre_activation(layer - 1, rows, weights, context)
        return source, _apply_dropout(pre_activation.relu_(), self._model.dropout, layer, context)

    def _pre_activation(
        self, layer: int, rows: RowBlock, weights: Mapping[int, LayerWeights], context: DropoutContext
    ) -> tuple[RowBlock, Tensor]:
        """Return the rows as they were multiplied, and the input of the activation function."""
        layer_weights = weights[layer]
        if self._orders[layer] == "multiply":
            return rows, _require_dense(rows) + layer_weights["bias"]
        if self._orders[layer] == "cached":
            rows = _apply_dropout(rows, self._model.input_dropout, 0, context)
        return rows, _linear(rows, layer_weights["lin.weight"], layer_weights["bias"])

    def _logits(
        self, layer: int, rows: RowBlock, weights: Mapping[int, LayerWeights], context: DropoutContext
    ) -> tuple[RowBlock, Tensor]:
        if self._model.kind == "gat":
            rows = _require_dense(rows)
            heads = rows.view(len(rows), self._model.heads, -1)
            return rows, heads.mean(1) + weights[layer]["bias"]
        return self._pre_activation(layer, rows, weights, context)

    def _pre_activation_backward(
        self,
        layer: int,
        output_gradient: Tensor,
        weights: Mapping[int, LayerWeights],
        source: RowBlock,
        gradients: Gradients,
    ) -> Tensor | None:
        """Return the gradient of the gathered rows from that of the pre-activations; add the weight gradients to
        `gradients`."""
        layer_gradients = gradients.setdefault(layer, {})
        layer_gradients["bias"] = output_gradient.sum(0)
        if self._model.kind == "gat":
            last = layer == self._model.layers - 1
            return (output_gradient / self._model.heads).repeat(1, self._model.heads) if last else output_gradient
        if self._orders[layer] == "multiply":
            return output_gradient
        layer_gradients["lin.weight"] = _weight_gradient(output_gradient, source)
        return None if self._orders[layer] == "cached" else output_gradient @ weights[layer]["lin.weight"]

    def _output_backward(
        self,
        layer: int,
        output_gradient: Tensor,
        weights: Mapping[int, LayerWeights],
        cache: ForwardCache,
        gradients: Gradients,
    ) -> Tensor | None:
        """Return the gradient of the activations from that of the output rows (None for the first layer); add the
        weight gradients."""
        if self._model.kind == "gat":
            output_gradient = self._attention_scores_backward(
                layer, output_gradient, weights[layer], cache.output_rows, gradients
            )
        elif self._orders[layer] != "multiply":
            return output_gradient
        gradients.setdefault(layer, {})["lin.weight"] = _weight_gradient(output_gradient, cache.activations)
        return None if layer == 0 else output_gradient @ weights[layer]["lin.weight"]

    def _append_attention_scores(self, layer: int, rows: Tensor, layer_weights: LayerWeights) -> Tensor:
        """Append each head's attention score as a source and as a target to the rows."""
        heads = rows.view(len(rows), self._model.heads, self._model.head_width(layer))
        return torch.cat(
            [rows, (heads * layer_weights["att_src"]).sum(-1), (heads * layer_weights["att_dst"]).sum(-1)], 1
        )

    def _attention_scores_backward(
        self,
        layer: int,
        output_gradient: Tensor,
        layer_weights: LayerWeights,
        output_rows: Tensor,
        gradients: Gradients,
    ) -> Tensor:
        count, channels = self._model.heads, self._model.head_width(layer)
        wide = count * channels
        rows = output_rows[:, :wide].reshape(-1, count, channels)
        source, target = output_gradient[:, wide : wide + count, None], output_gradient[:, wide + count :, None]
        gradients.setdefault(layer, {}).update(
            att_src=(rows * source).sum(0, keepdim=True), att_dst=(rows * target).sum(0, keepdim=True)
        )
        back = (
            output_gradient[:, :wide].reshape(-1, count, channels)
            + source * layer_weights["att_src"]
            + target * layer_weights["att_dst"]
        )
        return back.view(-1, wide)


def _apply_dropout(rows: RowBlock, p: float, layer: int, context: DropoutContext) -> RowBlock:
    if p == 0 or not context.train:
        return rows
    if isinstance(rows, SparseRows):
        return rows.dropout(p, context.seed, context.epoch, layer, context.vertices)
    return dropout_rows(rows, p, context.seed, context.epoch, layer, context.vertices)


def _linear(rows: RowBlock, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(rows, SparseRows):
        return functional.linear(rows, weight, bias)
    product = rows.multiply(weight)
    return product if bias is None else product.add_(bias)


def _weight_gradient(output_gradient: Tensor, rows: RowBlock) -> Tensor:
    return rows.weight_gradient(output_gradient) if isinstance(rows, SparseRows) else output_gradient.t() @ rows


def _require_dense(rows: RowBlock) -> Tensor:
    """Return dense rows. Only features can be sparse; gathered rows and activations never are."""
    assert not isinstance(rows, SparseRows)
    return rows


def _accuracy_counts(logits: Tensor, labels: Tensor, roles: Tensor) -> tuple[int, ...]:
    correct = logits.argmax(1) == labels
    counts: list[int] = []
    for role in (TRAIN, VAL, TEST):
        members = roles == role
        counts += [int((correct & members).sum()), int(members.sum())]
    return tuple(counts)


def attention_softmax(scores: Tensor, offsets: Tensor) -> Tensor:
    """AE: compute attention from the raw scores of an interval's edges, by head: a softmax over the edges of each
    vertex."""
    active = functional.leaky_relu(scores, LEAKY_RELU_SLOPE)
    sizes = offsets.diff()
    top = torch.segment_reduce(active, "max", offsets=offsets, axis=0)
    exponents = active.sub_(top.repeat_interleave(sizes, 0)).exp_()
    total = torch.segment_reduce(exponents, "sum", offsets=offsets, axis=0)
    return exponents.div_(total.repeat_interleave(sizes, 0))


def attention_softmax_backward(scores: Tensor, attention: Tensor, output_gradient: Tensor, offsets: Tensor) -> Tensor:
    """∇AE: compute the gradient of the raw scores from that of the attention."""
    weighted = attention * output_gradient
    mean = torch.segment_reduce(weighted, "sum", offsets=offsets, axis=0)
    gradient = weighted.sub_(attention * mean.repeat_interleave(offsets.diff(), 0))
    return gradient.mul_(torch.where(scores > 0, 1.0, LEAKY_RELU_SLOPE))
