"""Count how often a micro-batch was added to the gradient sums of a segment, from the additions themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from culm.runtime.compute.large_gradients import GRADIENT_FUNCTIONS

if TYPE_CHECKING:
    from culm.runtime.compute.model_state import LayerReplica
    from culm.runtime.compute.split_backward import WeightGroup


class Additions(NamedTuple):
    """How often a micro-batch was added to the sums of a segment: the least and the most of all parameters."""

    least: int
    most: int


NO_ADDITIONS = Additions(0, 0)
_ONE_ADDITION = Additions(1, 1)


def count_additions(layers: Iterable[LayerReplica], unreached: set[int]) -> Additions:
    """Take the additions of one micro-batch from the layers' accumulators.

    `unreached`: ids of the parameters that the micro-batch does not use (a layer that was skipped at random). They
    count as added once.
    """
    counts: list[int] = []
    for layer in layers:
        taken = layer.accumulator.take_additions()
        if unreached:
            pairs = zip(taken, layer.accumulator.parameters, strict=True)
            taken = [count or int(id(parameter) in unreached) for count, parameter in pairs]
        counts += taken
    return Additions(min(counts), max(counts)) if counts else _ONE_ADDITION


def unreached_by_graph(layers: Sequence[LayerReplica], outputs: Sequence[Tensor]) -> set[int]:
    """Ids of the parameters that received no gradient in the backward of `outputs`, and did not have to.

    A parameter has to receive one if a path of built-in functions leads to it: only a custom autograd function returns
    None for an input that needs a gradient. The graph is searched only if there is a parameter without a gradient. It
    keeps its structure after its backward.
    """
    silent = _silent_parameters(layers)
    return silent - _due_leaves([output.grad_fn for output in outputs]) if silent else silent


def unreached_by_groups(layers: Sequence[LayerReplica], groups: Sequence[WeightGroup]) -> set[int]:
    """The same for a split backward, whose gradients arrived at the edges of the groups."""
    silent = _silent_parameters(layers)
    if not silent:
        return silent
    return silent - _due_leaves([edge.node for group in groups for edge, _ in group.received_gradients()])


def _silent_parameters(layers: Sequence[LayerReplica]) -> set[int]:
    return {id(parameter) for layer in layers for parameter in layer.accumulator.silent_parameters()}


def _due_leaves(roots: Sequence[Node | None]) -> set[int]:
    """Ids of the leaves that a path of built-in functions leads to."""
    seen: set[Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen and not _is_custom(node):
            seen.add(node)
            todo += [child for child, _ in node.next_functions]
    return {id(getattr(node, "variable", None)) for node in seen}


def _is_custom(node: Node) -> bool:
    """Whether a node is of a custom autograd function, which may return no gradient: in Python, compiled by
    torch.compile, or in C++."""
    if isinstance(node, BackwardCFunction):
        return getattr(node, "_forward_cls", None) not in GRADIENT_FUNCTIONS
    return "CppNode" in node.name()
