"""The dense tasks: AV and AE, forward and backward, written out by hand. Whoever runs them gets the same numbers.

A function takes rows of one interval and weights, and returns rows and gradients; nothing is kept but what it returns.
`Kept` is what a forward leaves for its backward; without it the backward makes it again out of its inputs
(rematerialisation), bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from culm.gnn.dropout import drop
from culm.gnn.few import Few
from culm.gnn.graph import TEST, TRAIN, VAL
from culm.gnn.model import Model, Weights
from culm.gnn.program import orders

if TYPE_CHECKING:
    Gradients = dict[int, Weights]

Rows = Tensor | Few
SLOPE = 0.2
"""Of the leaky ReLU on attention scores, as in PyG."""


@dataclass(frozen=True)
class Context:
    """What chance depends on, and whether there is any."""

    seed: int
    epoch: int
    train: bool
    vertices: Tensor
    """Global numbers of the rows."""


class Kept(NamedTuple):
    """What AV leaves for ∇AV: its input after dropout where it was changed, the activations, what was sent."""

    source: Rows
    hidden: Rows
    sent: Tensor


class Loss(NamedTuple):
    """What the last AV makes of an interval."""

    rows: Tensor | None
    """Gradient of the gathered rows; None in an evaluation, and where nothing was gathered."""
    gradients: Gradients
    total: float
    """Sum of the losses of its training vertices."""
    counts: tuple[int, ...]
    """Training vertices that it is the loss of; in an evaluation right and all of training, validation and test."""


class Dense:
    """The dense tasks of one model."""

    def __init__(self, model: Model) -> None:
        self._model, self._orders = model, orders(model)

    def forward(self, layer: int, rows: Rows, weights: Mapping[int, Weights], context: Context) -> tuple[Tensor, Kept]:
        """AV: gathered rows of layer - 1 (or features) to the rows that are sent for `layer`."""
        source, hidden = self._hidden(layer, rows, weights, context)
        if self._model.kind == "gat":
            sent = self._scored(layer, _multiplied(hidden, weights[layer]["lin.weight"]), weights[layer])
        elif self._orders[layer] == "multiply":
            sent = _multiplied(hidden, weights[layer]["lin.weight"])
        else:
            sent = _all(hidden)
        return sent, Kept(source, hidden, sent)

    def backward(
        self,
        layer: int,
        rows: Rows | None,
        above: Tensor,
        weights: Mapping[int, Weights],
        context: Context,
        keep: Kept | None,
    ) -> tuple[Tensor | None, Gradients]:
        """∇AV: gradient `above` of what was sent, to that of the gathered rows below (None: nothing is gathered there)
        and of the weights. Either what the forward kept or its input `rows` must be there."""
        if keep is None:
            assert rows is not None
            _, keep = self.forward(layer, rows, weights, context)
        gradients: Gradients = {}
        hidden = self._sending_back(layer, above, weights, keep, gradients)
        if layer == 0 or hidden is None:
            return None, gradients
        p = self._model.dropout if context.train else 0.0
        open_ = _all(keep.hidden)  # zero where ReLU or dropout closed a unit
        hidden = torch.ops.aten.threshold_backward(hidden, open_, 0)
        if p:
            hidden.mul_(1 / (1 - p))
        return self._entering_back(layer - 1, hidden, weights, keep.source, gradients), gradients

    def loss(
        self, rows: Rows, weights: Mapping[int, Weights], context: Context, labels: Tensor, roles: Tensor, total: int
    ) -> Loss:
        """The last AV: logits, loss (a mean over the `total` training vertices of the graph), and the way back."""
        layer = self._model.layers - 1
        source, logits = self._logits(layer, rows, weights, context)
        if not context.train:
            return Loss(None, {}, 0.0, _counts(logits, labels, roles))
        chosen = (roles == TRAIN).nonzero().squeeze(1)
        chances = functional.log_softmax(logits[chosen], 1)
        picked = labels[chosen].unsqueeze(1)
        value = -chances.gather(1, picked).sum(dtype=torch.float64).item()
        slope = chances.exp_()
        slope.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=slope.dtype))
        above = torch.zeros_like(logits).index_copy_(0, chosen, slope.div_(total))
        gradients: Gradients = {}
        back = self._entering_back(layer, above, weights, source, gradients)
        return Loss(back, gradients, value, (len(chosen),))

    def _hidden(self, layer: int, rows: Rows, weights: Mapping[int, Weights], context: Context) -> tuple[Rows, Rows]:
        """Input of a layer's multiplication: features, or activations out of gathered rows."""
        if layer == 0:
            entering = _dropped(rows, self._model.input_dropout, 0, context)
            return entering, entering
        source, entered = self._entered(layer - 1, rows, weights, context)
        return source, _dropped(entered.relu_(), self._model.dropout, layer, context)

    def _entered(self, layer: int, rows: Rows, weights: Mapping[int, Weights], context: Context) -> tuple[Rows, Tensor]:
        """From gathered rows to what the activation gets; also the rows as they were multiplied."""
        own = weights[layer]
        if self._orders[layer] == "multiply":
            return rows, _all(rows) + own["bias"]
        if self._orders[layer] == "cached":
            rows = _dropped(rows, self._model.input_dropout, 0, context)
        return rows, _multiplied(rows, own["lin.weight"], own["bias"])

    def _logits(self, layer: int, rows: Rows, weights: Mapping[int, Weights], context: Context) -> tuple[Rows, Tensor]:
        if self._model.kind == "gat":
            rows = _all(rows)
            heads = rows.view(len(rows), self._model.heads, -1)
            return rows, heads.mean(1) + weights[layer]["bias"]
        return self._entered(layer, rows, weights, context)

    def _entering_back(
        self, layer: int, above: Tensor, weights: Mapping[int, Weights], source: Rows, gradients: Gradients
    ) -> Tensor | None:
        """Gradient of what entered, to that of the gathered rows; adds what it finds for the weights."""
        own = gradients.setdefault(layer, {})
        own["bias"] = above.sum(0)
        if self._model.kind == "gat":
            last = layer == self._model.layers - 1
            return (above / self._model.heads).repeat(1, self._model.heads) if last else above
        if self._orders[layer] == "multiply":
            return above
        own["lin.weight"] = _gradient(above, source)
        return None if self._orders[layer] == "cached" else above @ weights[layer]["lin.weight"]

    def _sending_back(
        self, layer: int, above: Tensor, weights: Mapping[int, Weights], keep: Kept, gradients: Gradients
    ) -> Tensor | None:
        """Gradient of what was sent, to that of the activations (None below the first layer)."""
        if self._model.kind == "gat":
            above = self._scored_back(layer, above, weights[layer], keep.sent, gradients)
        elif self._orders[layer] != "multiply":
            return above
        gradients.setdefault(layer, {})["lin.weight"] = _gradient(above, keep.hidden)
        return None if layer == 0 else above @ weights[layer]["lin.weight"]

    def _scored(self, layer: int, rows: Tensor, own: Weights) -> Tensor:
        """What attention sends: the rows, and each head's score as a source and as a target."""
        heads = rows.view(len(rows), self._model.heads, self._model.channels(layer))
        return torch.cat([rows, (heads * own["att_src"]).sum(-1), (heads * own["att_dst"]).sum(-1)], 1)

    def _scored_back(self, layer: int, above: Tensor, own: Weights, sent: Tensor, gradients: Gradients) -> Tensor:
        count, channels = self._model.heads, self._model.channels(layer)
        wide = count * channels
        rows = sent[:, :wide].reshape(-1, count, channels)
        source, target = above[:, wide : wide + count, None], above[:, wide + count :, None]
        gradients.setdefault(layer, {}).update(
            att_src=(rows * source).sum(0, keepdim=True), att_dst=(rows * target).sum(0, keepdim=True)
        )
        back = above[:, :wide].reshape(-1, count, channels) + source * own["att_src"] + target * own["att_dst"]
        return back.view(-1, wide)


def _dropped(rows: Rows, p: float, layer: int, context: Context) -> Rows:
    if p == 0 or not context.train:
        return rows
    if isinstance(rows, Few):
        return rows.dropped(p, context.seed, context.epoch, layer, context.vertices)
    return drop(rows, p, context.seed, context.epoch, layer, context.vertices)


def _multiplied(rows: Rows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(rows, Few):
        return functional.linear(rows, weight, bias)
    found = rows.multiplied(weight)
    return found if bias is None else found.add_(bias)


def _gradient(above: Tensor, rows: Rows) -> Tensor:
    return rows.gradient(above) if isinstance(rows, Few) else above.t() @ rows


def _all(rows: Rows) -> Tensor:
    """What was gathered or activated: only features are taken as few."""
    assert not isinstance(rows, Few)
    return rows


def _counts(logits: Tensor, labels: Tensor, roles: Tensor) -> tuple[int, ...]:
    right = logits.argmax(1) == labels
    found: list[int] = []
    for role in (TRAIN, VAL, TEST):
        mine = roles == role
        found += [int((right & mine).sum()), int(mine.sum())]
    return tuple(found)


def attend(scores: Tensor, offsets: Tensor) -> Tensor:
    """AE: raw scores of an interval's edges, by head, to attention: a softmax over the edges of each vertex."""
    active = functional.leaky_relu(scores, SLOPE)
    sizes = offsets.diff()
    top = torch.segment_reduce(active, "max", offsets=offsets, axis=0)
    exponents = active.sub_(top.repeat_interleave(sizes, 0)).exp_()
    total = torch.segment_reduce(exponents, "sum", offsets=offsets, axis=0)
    return exponents.div_(total.repeat_interleave(sizes, 0))


def attend_back(scores: Tensor, attention: Tensor, above: Tensor, offsets: Tensor) -> Tensor:
    """∇AE: gradient of the attention to that of the raw scores."""
    weighed = attention * above
    mean = torch.segment_reduce(weighed, "sum", offsets=offsets, axis=0)
    found = weighed.sub_(attention * mean.repeat_interleave(offsets.diff(), 0))
    return found.mul_(torch.where(scores > 0, 1.0, SLOPE))
