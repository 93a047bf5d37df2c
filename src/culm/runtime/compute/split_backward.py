"""Backward in two halves over one graph, bit for bit equal to a fused backward.

`input_backward` (I) computes the gradients of the inputs, and captures the gradients that arrive at the nodes where
weights branch off. `weight_backward` (W) continues from there. Weights that branch off from a common node, or a weight
that branches off from several nodes, form a group and are computed together. A weight that no input reaches belongs to
an output.
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
"""A set that keeps its order: a sum of gradients must not depend on memory addresses of nodes."""


@dataclass(slots=True, eq=False)
class WeightGroup:
    """Weights that are computed together: the edges where they branch off, and the gradients that arrived there."""

    weights: Nodes
    branch_nodes: Nodes
    """Nodes with an input below them that the weights branch off from."""
    edges: list[GradientEdge]
    gradients: list[Tensor | None] = field(default_factory=list)

    def merge(self, other: WeightGroup) -> None:
        """Add everything that another group has."""
        self.weights |= other.weights
        self.branch_nodes |= other.branch_nodes
        self.edges += other.edges
        self.gradients += other.gradients

    def received_gradients(self) -> list[tuple[GradientEdge, Tensor]]:
        """The edges that a gradient arrived at, and the gradients."""
        return [(edge, g) for edge, g in zip(self.edges, self.gradients, strict=True) if g is not None]

    def install_hooks(self) -> list[RemovableHandle]:
        """Hooks on the nodes of the group, while W runs through them."""
        pairs = self.received_gradients()
        return [node.register_prehook(_gradient_override_hook(node, pairs)) for node in self.branch_nodes]


def input_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> tuple[Gradients, list[WeightGroup]]:
    """I: returns the gradients of `inputs`, and the weight groups for W. `gradients` None: `outputs` is the loss."""
    output_gradients = tuple(torch.ones_like(o) for o in outputs) if gradients is None else tuple(gradients)
    roots = [get_gradient_edge(output) for output in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    graph = _BackwardGraph(roots, wanted)
    weight_groups = graph.weight_groups()
    targets: tuple[Any, ...] = (*wanted, *(edge for group in weight_groups for edge in group.edges))
    computed: Sequence[Tensor | None] = [None] * len(targets)
    if any(root.node in graph.input_reaching_nodes for root in roots):
        computed = _run_autograd(outputs, output_gradients, targets, keep_graph=True, accumulate_grad=False)
    input_gradients, arrived = iter(computed), iter(computed[len(wanted) :])
    for group in weight_groups:
        group.gradients = [next(arrived) for _ in group.edges]
    dinputs = tuple(_contiguous(next(input_gradients)) if x.requires_grad else None for x in inputs)
    return dinputs, _merge_weight_groups([*weight_groups, *graph.unreached_weight_groups(roots, output_gradients)])


def weight_backward(*pieces: Sequence[WeightGroup]) -> None:
    """W: add the gradients of the weights to their `.grad`.

    Each argument is what `input_backward` returned for one graph. Different graphs share no node, so that one group of
    each is computed in one call: starting the engine takes as long as a small layer.
    """
    # A group with several nodes runs through the nodes between them, where another group may branch off.
    keep = any(len(group.branch_nodes) > 1 for groups in pieces for group in groups)
    for together in zip_longest(*pieces):
        _run_weight_groups([group for group in together if group is not None], keep=keep)


def _run_weight_groups(groups: Sequence[WeightGroup], *, keep: bool) -> None:
    hooks = [hook for group in groups if len(group.branch_nodes) > 1 for hook in group.install_hooks()]
    pairs = [pair for group in groups for pair in group.received_gradients()]
    weights = tuple(_leaf_tensor(node) for group in groups for node in group.weights)
    try:
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            _run_autograd(edges, gradients, weights, keep_graph=keep, accumulate_grad=True)
    finally:
        for hook in hooks:
            hook.remove()


def _run_autograd(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor],
    inputs: Sequence[Any],
    *,
    keep_graph: bool,
    accumulate_grad: bool,
) -> Sequence[Tensor | None]:
    """torch.autograd.grad or, with `accumulate_grad`, backward, without their checks of the arguments, which take half
    of the time of a small layer. None: no gradient arrived."""
    computed: Sequence[Tensor | None] = _engine_run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate_grad,
    )
    return computed


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def _merge_weight_groups(groups: Sequence[WeightGroup]) -> list[WeightGroup]:
    """Groups that share a weight, merged into one."""
    owner: dict[Node, WeightGroup] = {}
    for group in groups:
        for other in {owner[weight]: None for weight in group.weights if weight in owner}:
            group.merge(other)
        owner |= dict.fromkeys(group.weights, group)
    return list(dict.fromkeys(owner.values()))


def _gradient_override_hook(
    node: Node, pairs: list[tuple[GradientEdge, Tensor]]
) -> Callable[[tuple[Any, ...]], Gradients]:
    """A hook: what flows into the node from above is part of what was captured there, so use the captured gradient and
    do not add."""
    known = {edge.output_nr: gradient for edge, gradient in pairs if edge.node is node}
    return lambda arrived: tuple(known.get(port) for port in range(len(arrived)))


def _leaf_tensor(node: Node) -> Any:
    """The tensor of a leaf node; None for other nodes."""
    return getattr(node, "variable", None)


class _BackwardGraph:
    """The part of an autograd graph below some edges, found in one pass. It runs in every I, so it is optimised."""

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self.input_nodes = {get_gradient_edge(x).node for x in inputs}
        self.input_reaching_nodes = set(self.input_nodes)
        """Inputs, and nodes with an input below them."""
        self.weights_below: dict[Node, Nodes] = {}
        """For a node that reaches an input: the weights that branch off from it. For others: all weights below."""
        self._used_outputs: dict[Node, int] = {}
        """Bit mask of the outputs by which a node is entered."""
        for root in roots:
            self._used_outputs[root.node] = self._used_outputs.get(root.node, 0) | 1 << root.output_nr
        self._walk([root.node for root in roots])

    def _walk(self, todo: list[Node]) -> None:
        """Classify every node, after all nodes below it."""
        ports, below = self._used_outputs, self.weights_below
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
                    below[node] = self._find_weights(node, links[node])

    def _find_weights(self, node: Node, links: Any) -> Nodes:
        weights: Nodes = {}
        for child, _ in links:
            if child in self.input_reaching_nodes:
                self.input_reaching_nodes.add(node)
            elif child is not None:
                weights |= self.weights_below[child]
        if not links and node not in self.input_nodes and _leaf_tensor(node) is not None:
            weights[node] = None
        return weights

    def weight_groups(self) -> list[WeightGroup]:
        """Weights by the node that they branch off from, from the outputs down."""
        nodes = [
            node
            for node in reversed(self.weights_below)
            if node in self.input_reaching_nodes and self.weights_below[node]
        ]
        return [WeightGroup(dict(self.weights_below[node]), {node: None}, self._edges(node)) for node in nodes]

    def _edges(self, node: Node) -> list[GradientEdge]:
        ports = self._used_outputs[node]
        return [GradientEdge(node, port) for port in range(ports.bit_length()) if ports >> port & 1]

    def unreached_weight_groups(self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> list[WeightGroup]:
        """Weights below outputs that no input reaches."""
        reaching = self.input_reaching_nodes
        pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root.node not in reaching]
        return [WeightGroup(dict(self.weights_below[root.node]), {}, [root], [gradient]) for root, gradient in pairs]
