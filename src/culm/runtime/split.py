"""Backward in two halves over one graph, bit for bit what a fused backward gives.

`input_half` (I) computes the gradients of the inputs and catches those that arrive where weights hang on the graph;
`weight_half` (W) goes on from there. Weights that hang on a common node, or one that hangs on several, are a bunch and
done at once. A weight that no input reaches hangs on an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.utils.hooks import RemovableHandle

Gradients: TypeAlias = tuple[Tensor | None, ...]
Nodes: TypeAlias = dict[Node, None]
"""A set that keeps its order: a sum of gradients must not depend on where nodes lie in memory."""


@dataclass(slots=True, eq=False)
class Bunch:
    """Weights that are done at once: where they hang, and the gradients that arrived there."""

    weights: Nodes
    hangs: Nodes
    """Nodes with an input below them that the weights branch off from."""
    edges: list[GradientEdge]
    caught: list[Tensor | None] = field(default_factory=list)

    def take(self, other: Bunch) -> None:
        """All that another has."""
        self.weights |= other.weights
        self.hangs |= other.hangs
        self.edges += other.edges
        self.caught += other.caught

    def arrived(self) -> list[tuple[GradientEdge, Tensor]]:
        """The edges that a gradient arrived at, with it."""
        return [(edge, g) for edge, g in zip(self.edges, self.caught, strict=True) if g is not None]

    def clamped(self) -> list[RemovableHandle]:
        """Hooks on the nodes that it hangs on, while W runs through them."""
        pairs = self.arrived()
        return [node.register_prehook(_clamp(node, pairs)) for node in self.hangs]


def input_half(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> tuple[Gradients, list[Bunch]]:
    """I: the gradients of `inputs`, and what W needs. `gradients` None: `outputs` is the loss."""
    given = tuple(torch.ones_like(o) for o in outputs) if gradients is None else tuple(gradients)
    roots = [get_gradient_edge(output) for output in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    graph = _Graph(roots, wanted)
    hanging = graph.hanging()
    targets: tuple[Any, ...] = (*wanted, *(edge for bunch in hanging for edge in bunch.edges))
    found: Sequence[Tensor | None] = [None] * len(targets)
    if any(root.node in graph.leading for root in roots):
        found = _engine(outputs, given, targets, keep=True, add=False)
    mine, arrived = iter(found), iter(found[len(wanted) :])
    for bunch in hanging:
        bunch.caught = [next(arrived) for _ in bunch.edges]
    dinputs = tuple(_whole(next(mine)) if x.requires_grad else None for x in inputs)
    return dinputs, _joined([*hanging, *graph.stray(roots, given)])


def weight_half(*pieces: Sequence[Bunch]) -> None:
    """W: adds the gradients of the weights into their `.grad`.

    Each piece is what `input_half` found in a graph of its own. Such graphs share no node, so that a bunch of each is
    done at once: to start the engine takes as long as a small layer does.
    """
    # A bunch that hangs on several nodes runs through what lies between them, and another may hang there.
    keep = any(len(bunch.hangs) > 1 for bunches in pieces for bunch in bunches)
    for together in zip_longest(*pieces):
        _run([bunch for bunch in together if bunch is not None], keep=keep)


def _run(bunches: Sequence[Bunch], *, keep: bool) -> None:
    hooks = [hook for bunch in bunches if len(bunch.hangs) > 1 for hook in bunch.clamped()]
    pairs = [pair for bunch in bunches for pair in bunch.arrived()]
    weights = tuple(_leaf(node) for bunch in bunches for node in bunch.weights)
    try:
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            _engine(edges, gradients, weights, keep=keep, add=True)
    finally:
        for hook in hooks:
            hook.remove()


def _engine(
    ends: Sequence[Any], given: Sequence[Tensor], wanted: Sequence[Any], *, keep: bool, add: bool
) -> Sequence[Tensor | None]:
    """torch.autograd.grad, or with `add` backward, without their checks of the arguments, which take half of the time
    of a small layer. None: nothing arrived there."""
    found: Sequence[Tensor | None] = _engine_run_backward(
        tuple(ends), tuple(given), keep, False, tuple(wanted), allow_unreachable=True, accumulate_grad=add
    )
    return found


def _whole(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def _joined(bunches: Sequence[Bunch]) -> list[Bunch]:
    """Bunches that share a weight made one."""
    owner: dict[Node, Bunch] = {}
    for bunch in bunches:
        for other in {owner[weight]: None for weight in bunch.weights if weight in owner}:
            bunch.take(other)
        owner |= dict.fromkeys(bunch.weights, bunch)
    return list(dict.fromkeys(owner.values()))


def _clamp(node: Node, pairs: list[tuple[GradientEdge, Tensor]]) -> Callable[[tuple[Any, ...]], Gradients]:
    """What flows into the node from above is in what was caught there: take that, and do not add."""
    known = {edge.output_nr: gradient for edge, gradient in pairs if edge.node is node}
    return lambda arrived: tuple(known.get(port) for port in range(len(arrived)))


def _leaf(node: Node) -> Any:
    """The tensor that an end of the graph stands for; None for other nodes."""
    return getattr(node, "variable", None)


class _Graph:
    """What lies below some edges of an autograd graph, looked at once. It runs in every I, so it is written tight."""

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self.ends = {get_gradient_edge(x).node for x in inputs}
        self.leading = set(self.ends)
        """Inputs, and nodes with an input below them."""
        self.below: dict[Node, Nodes] = {}
        """Of a leading node: the weights that branch off from it. Of the others: all weights below."""
        self._ports: dict[Node, int] = {}
        """Bit by bit, by which of its outputs a node is entered."""
        for root in roots:
            self._ports[root.node] = self._ports.get(root.node, 0) | 1 << root.output_nr
        self._walk([root.node for root in roots])

    def _walk(self, todo: list[Node]) -> None:
        """Judge every node, after all that lie below it."""
        ports, below = self._ports, self.below
        links: dict[Node, Any] = {}
        while todo:
            node = todo[-1]
            if node not in links:
                links[node] = node.next_functions
                for child, port in links[node]:
                    if child is not None:
                        ports[child] = ports.get(child, 0) | 1 << port
                        if child not in links:
                            todo.append(child)
            if todo[-1] is node:
                todo.pop()
                if node not in below:
                    below[node] = self._judged(node, links[node])

    def _judged(self, node: Node, links: Any) -> Nodes:
        weights: Nodes = {}
        for child, _ in links:
            if child in self.leading:
                self.leading.add(node)
            elif child is not None:
                weights |= self.below[child]
        if not links and node not in self.ends and _leaf(node) is not None:
            weights[node] = None
        return weights

    def hanging(self) -> list[Bunch]:
        """Weights by the node that they hang on, from the outputs down."""
        nodes = [node for node in reversed(self.below) if node in self.leading and self.below[node]]
        return [Bunch(dict(self.below[node]), {node: None}, self._edges(node)) for node in nodes]

    def _edges(self, node: Node) -> list[GradientEdge]:
        ports = self._ports[node]
        return [GradientEdge(node, port) for port in range(ports.bit_length()) if ports >> port & 1]

    def stray(self, roots: Sequence[GradientEdge], given: Sequence[Tensor]) -> list[Bunch]:
        """Weights below outputs that no input reaches."""
        pairs = [(root, g) for root, g in zip(roots, given, strict=True) if root.node not in self.leading]
        return [Bunch(dict(self.below[root.node]), {}, [root], [gradient]) for root, gradient in pairs]
