"""A pass over the graph as data: the steps that every interval walks through, and who runs each.

    AV   apply vertex     dense: from gathered rows to rows that are sent              (worker)
    SC   scatter          rows to the servers that see them as ghosts                  (server)
    AE   apply edge       attention only: softmax over the edges of a vertex           (worker, server where small)
    GA   gather           sum over the neighbours                                      (server)

and the same against the direction, written with a leading ∇. `AV k` stands between the gather of layer k-1 and that of
layer k; the last one holds the loss, forward and backward in one call. WU, the update of a layer's weights, belongs to
no interval: the parameter server runs it when all gradients of an epoch are there.

Where to multiply. "cached": A.X of the first layer never changes and is computed once. "multiply": H.W first, so that
the gather is as wide as the layer's output. "gather": the gather first, where the layer widens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from culm.gnn.model import Model

Order = Literal["cached", "multiply", "gather"]
Place = Literal["worker", "server"]
FEATURES = "X"
"""The table of what the first dense task reads: features, or A.X."""


class Step(NamedTuple):
    """One step of the walk."""

    kind: str
    layer: int
    back: bool
    place: Place

    def __str__(self) -> str:
        return f"{'∇' if self.back else ''}{self.kind}{self.layer}"

    @property
    def gathers(self) -> bool:
        """Whether it reads what other intervals have sent: here the staleness bound is checked."""
        return self.kind == "GA" or (self.kind == "AE" and not self.back)


def orders(model: Model) -> tuple[Order, ...]:
    """Where each layer multiplies."""
    if model.kind == "gat":
        return tuple[Order, ...](["multiply"]) * model.layers
    rest: list[Order] = [
        "multiply" if model.widths[i + 1] <= model.widths[i] else "gather" for i in range(1, model.layers)
    ]
    return ("cached", *rest)


def first_gather(model: Model) -> int:
    """The first layer that has to be gathered in every pass."""
    return 1 if orders(model)[0] == "cached" else 0


def sent_width(model: Model, layer: int) -> int:
    """Columns of the rows that are scattered forward for a layer."""
    if model.kind == "gat":
        return model.heads * (model.channels(layer) + 2)
    return model.widths[layer + 1] if orders(model)[layer] == "multiply" else model.widths[layer]


def gathered_width(model: Model, layer: int) -> int:
    """Columns of the rows that a gather makes, and of their gradients."""
    if model.kind == "gat":
        return model.heads * model.channels(layer)
    return sent_width(model, layer)


def walk(model: Model, *, train: bool, edges: Place = "worker") -> tuple[Step, ...]:
    """The steps of a pass; an evaluation goes forward only. `edges`: who applies them."""
    attention = model.kind == "gat"
    gathered = range(first_gather(model), model.layers)
    steps = []
    for layer in gathered:
        steps += [Step("AV", layer, False, "worker"), Step("SC", layer, False, "server")]
        steps += [Step("AE", layer, False, edges)] if attention else []
        steps += [Step("GA", layer, False, "server")]
    steps.append(Step("AV", model.layers, False, loss_place(model)))
    for layer in reversed(gathered) if train else ():
        steps += [Step("AE", layer, True, edges)] if attention else []
        steps += [
            Step("SC", layer, True, "server"),
            Step("GA", layer, True, "server"),
            Step("AV", layer, True, "worker"),
        ]
    return tuple(steps)


def loss_place(model: Model) -> Place:
    """The loss goes to a worker where it multiplies by weights; a bias and a softmax cost less than the way there."""
    return "server" if orders(model)[-1] == "multiply" else "worker"


def weights_of(model: Model, step: Step) -> tuple[int, ...]:
    """The layers whose weights a step reads."""
    if step.kind != "AV":
        return ()
    before = (step.layer - 1,) if step.layer > 0 else ()
    after = (step.layer,) if step.layer < model.layers and orders(model)[step.layer] == "multiply" else ()
    return before + after


def gradients_of(model: Model, step: Step) -> tuple[int, ...]:
    """The layers that a step of a training pass has gradients for; each layer's come complete with these parts."""
    if step.kind != "AV" or not (step.back or step.layer == model.layers):
        return ()
    return weights_of(model, step)


def parts(model: Model) -> dict[int, int]:
    """How many gradients a layer gets from each interval in an epoch."""
    counted = dict.fromkeys(range(model.layers), 0)
    for step in walk(model, train=True):
        for layer in gradients_of(model, step):
            counted[layer] += 1
    return counted
