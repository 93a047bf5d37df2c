"""The steps of a pass over the graph, and the place where each one runs.

    AV   apply vertex     dense: from gathered rows to the rows to scatter              (worker)
    SC   scatter          send rows to the servers where they are ghosts                (server)
    AE   apply edge       attention only: softmax over the edges of a vertex            (worker, server if small)
    GA   gather           sum over the neighbours                                       (server)

The backward steps have a leading ∇. `AV k` lies between the gathers of layers k-1 and k; the last AV computes the loss,
forward and backward in one task. The weight update (WU) of a layer belongs to no interval: the parameter server runs it
when all gradients of a training epoch have arrived.

A layer multiplies by its weights in one of three orders. "cached": A.X of the first layer never changes and is computed
once. "multiply": H.W before the gather, which is then as wide as the layer's output. "gather": the gather first, if the
layer widens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from culm.gnn.model.gnn_model import GnnModel

MultiplyOrder = Literal["cached", "multiply", "gather"]
Place = Literal["worker", "server"]
FEATURE_TABLE = "X"
"""Name of the table that the first dense task reads: features, or A.X."""


class PassStep(NamedTuple):
    """One step of a pass."""

    kind: str
    layer: int
    backward: bool
    place: Place

    def __str__(self) -> str:
        return f"{'∇' if self.backward else ''}{self.kind}{self.layer}"

    @property
    def reads_scattered_rows(self) -> bool:
        """Whether the step reads rows that other intervals have scattered. These steps check the staleness bound."""
        return self.kind == "GA" or (self.kind == "AE" and not self.backward)


def multiply_orders(model: GnnModel) -> tuple[MultiplyOrder, ...]:
    """Return the order of product and gather of each layer."""
    if model.kind == "gat":
        return tuple[MultiplyOrder, ...](["multiply"]) * model.layers
    rest: list[MultiplyOrder] = [
        "multiply" if model.widths[i + 1] <= model.widths[i] else "gather" for i in range(1, model.layers)
    ]
    return ("cached", *rest)


def first_gathered_layer(model: GnnModel) -> int:
    """Return the first layer that is gathered in every pass."""
    return 1 if multiply_orders(model)[0] == "cached" else 0


def sent_width(model: GnnModel, layer: int) -> int:
    """Return the columns of the rows that are scattered forward for a layer."""
    if model.kind == "gat":
        return model.heads * (model.head_width(layer) + 2)
    return model.widths[layer + 1] if multiply_orders(model)[layer] == "multiply" else model.widths[layer]


def gathered_width(model: GnnModel, layer: int) -> int:
    """Return the columns of gathered rows, and of their gradients."""
    if model.kind == "gat":
        return model.heads * model.head_width(layer)
    return sent_width(model, layer)


def steps_of_pass(model: GnnModel, *, train: bool, edge_place: Place = "worker") -> tuple[PassStep, ...]:
    """Return the steps of a pass; an evaluation only has the forward steps. `edge_place` is where AE runs."""
    attention = model.kind == "gat"
    gathered = range(first_gathered_layer(model), model.layers)
    steps = []
    for layer in gathered:
        steps += [PassStep("AV", layer, False, "worker"), PassStep("SC", layer, False, "server")]
        steps += [PassStep("AE", layer, False, edge_place)] if attention else []
        steps += [PassStep("GA", layer, False, "server")]
    steps.append(PassStep("AV", model.layers, False, loss_place(model)))
    for layer in reversed(gathered) if train else ():
        steps += [PassStep("AE", layer, True, edge_place)] if attention else []
        steps += [
            PassStep("SC", layer, True, "server"),
            PassStep("GA", layer, True, "server"),
            PassStep("AV", layer, True, "worker"),
        ]
    return tuple(steps)


def loss_place(model: GnnModel) -> Place:
    """Return where the loss is computed: on a worker if it multiplies by weights. A bias and a softmax cost less
    than the transfer."""
    return "server" if multiply_orders(model)[-1] == "multiply" else "worker"


def layers_read(model: GnnModel, step: PassStep) -> tuple[int, ...]:
    """Return the layers whose weights a step reads."""
    if step.kind != "AV":
        return ()
    before = (step.layer - 1,) if step.layer > 0 else ()
    after = (step.layer,) if step.layer < model.layers and multiply_orders(model)[step.layer] == "multiply" else ()
    return before + after


def layers_with_gradients(model: GnnModel, step: PassStep) -> tuple[int, ...]:
    """Return the layers that a step of a training pass has gradients for."""
    if step.kind != "AV" or not (step.backward or step.layer == model.layers):
        return ()
    return layers_read(model, step)
