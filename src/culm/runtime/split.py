"""Backward in two halves, by torch's own functions: the only file that touches torch.distributed.pipelining's internals.

`input_half` (I) computes the gradients of the inputs and remembers where the weights hang; `weight_half` (W) computes
those of the weights from there. Bit for bit the same as one fused backward.

Bare, torch's functions raise for outputs that are views (LSTM, attention), lose parameters that no input reaches, and
run a checkpointed stage once per parameter group. Here: the caller passes outputs through `owned`, the lost parameters
are found and done in I, and recomputation is the segment's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Halfway(NamedTuple):
    """What I leaves for W."""

    groups: list[dict[str, Any]]
    strays: list[tuple[nn.Parameter, Tensor]]


def owned(output: Tensor) -> Tensor:
    """The output as a tensor that may be detached in place: torch refuses that for views and for leaves."""
    return output.clone() if output.requires_grad and (output._is_view() or output.grad_fn is None) else output


def input_half(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> Halfway:
    """I: leaves the gradients of `inputs` in their `.grad`. `gradients` None: `outputs` is the loss."""
    strays = _strays(outputs, gradients, inputs, weights)
    _, groups = stage_backward_input(
        list(outputs), None if gradients is None else list(gradients), list(inputs), iter(weights)
    )
    return Halfway(groups, strays)


def weight_half(weights: Sequence[nn.Parameter], halfway: Halfway) -> None:
    """W: adds the gradients of `weights` into their `.grad`."""
    stage_backward_weight(iter(weights), halfway.groups)
    for weight, gradient in halfway.strays:
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient


def _strays(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> list[tuple[nn.Parameter, Tensor]]:
    """Gradients through outputs that depend on weights alone: no path to an input passes there, so I would miss them."""
    if len(outputs) < 2:
        return []
    reached = [_reaches(output, inputs) for output in outputs]
    if all(reached) or gradients is None:
        return []
    alone = [(o, g) for o, g, seen in zip(outputs, gradients, reached, strict=True) if not seen]
    found = torch.autograd.grad(
        [o for o, _ in alone], list(weights), [g for _, g in alone], retain_graph=True, allow_unused=True
    )
    return [(weight, gradient) for weight, gradient in zip(weights, found, strict=True) if gradient is not None]


def _reaches(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether the graph of an output has one of the inputs as a leaf."""
    wanted = {id(x) for x in inputs}
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        todo.extend(following for following, _ in node.next_functions)
    return False
