"""From complete sums to the next weights: divide once, clip by the global norm, step, move the statistics.

The reference loop and every worker go through these functions, so that the arithmetic of a step exists once.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.errors import LayerFailed, NonFiniteLoss, said
from culm.runtime import statistics
from culm.runtime.raised import RAISED

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.state import HeldLayer, State, TiedGroup


def added(values: Iterable[float]) -> float:
    """One after the other: the built-in sum compensates for rounding in some versions of Python, and not in others."""
    return functools.reduce(operator.add, values, 0.0)


def finish_layers(layers: Iterable[HeldLayer], divisor: float) -> None:
    """Turn the sums of layers into gradients."""
    for layer in layers:
        layer.accumulator.finish(divisor)


def layer_norms(layer: HeldLayer, tied: Mapping[str, TiedGroup]) -> Tensor:
    """The norm of each trained parameter's gradient, in order; a tied one counts in its first layer only."""
    aliases = {name: group for group in tied.values() for name in group.names}
    found = []
    for name, parameter in layer.trained.items():
        group = aliases.get(name)
        if group is None:
            assert parameter.grad is not None
            found.append(torch.linalg.vector_norm(parameter.grad))
        elif group.name == name:
            found.append(torch.linalg.vector_norm(group.gradient))
    if not layer.accumulator.finite:
        found.append(torch.tensor(math.nan, device=layer.accumulator.gradient.device))
    if not found:
        return torch.zeros(0)
    norms = torch.stack(found)
    return norms if norms.dtype == torch.float64 else norms.float()


def clip_factor(job: Job, norms: Sequence[Tensor]) -> tuple[float, Tensor]:
    """(global norm, factor for all gradients) from the norms of all layers in order; as torch's clip_grad_norm_."""
    total = torch.linalg.vector_norm(torch.cat([n.cpu() for n in norms]))
    limit = math.inf if job.clip_norm is None else job.clip_norm
    return float(total), torch.clamp(limit / (total + 1e-6), max=1.0)


def check_loss(job: Job, step: int, loss_sum: float, weight_sum: float) -> None:
    """Raises LayerFailed if the weights would turn training around; NonFiniteLoss if the step has no finite loss and
    such steps are not skipped."""
    skips = job.nonfinite == "skip"
    if weight_sum < 0 or weight_sum == math.inf or (math.isnan(weight_sum) and not skips):
        raise LayerFailed(
            f"the weights that the loss returned add up to {weight_sum} in step {step}: return (sum, weight) with a "
            "finite weight of at least 0, such as a count"
        )
    if skips:
        return
    if weight_sum == 0:
        raise NonFiniteLoss(
            f"the weights that the loss returned add up to 0 in step {step}: there is nothing to learn from; make "
            "batches with something that counts, or skip such steps with nonfinite='skip'"
        )
    if not math.isfinite(loss_sum):
        raise NonFiniteLoss(
            f"the loss of step {step} is {loss_sum}: lower the learning rate, set clip_norm, or skip such steps with "
            "nonfinite='skip'"
        )


def check_finite(step: int, layers: Iterable[HeldLayer], groups: Iterable[TiedGroup]) -> None:
    """Raises NonFiniteLoss if a gradient is not finite: no weight has moved yet. One pass, one wait for the device."""
    made = [(layer.label, layer.accumulator.gradient, layer.accumulator.finite) for layer in layers]
    made += [(f"the tied {group.name}", group.gradient, True) for group in groups]
    if all(finite for _, _, finite in made):
        sums = [gradient.sum().float() for _, gradient, _ in made]
        if math.isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum()):  # a NaN or an infinity would show
            return
    for label, gradient, finite in made:
        if not finite or not bool(gradient.isfinite().all()):
            raise NonFiniteLoss(
                f"a gradient of {label} in step {step} is not finite: lower the learning rate, set clip_norm, or skip "
                "such steps with nonfinite='skip'"
            )


def scale(state: State, layers: Iterable[HeldLayer], groups: Iterable[TiedGroup], factor: Tensor) -> None:
    """Multiply gradients by the clip factor."""
    moved = factor.to(state.device)
    for layer in layers:
        layer.accumulator.gradient.mul_(moved)
    for group in groups:
        group.gradient.mul_(moved)


def lr_factor(job: Job, step: int) -> float:
    """The learning rate's factor: a function of the step alone. Raises LayerFailed if it gives no number for it."""
    if job.lr_schedule is None:
        return 1.0
    try:
        factor = float(job.lr_schedule(step))
    except RAISED as error:
        raise LayerFailed(f"Job.lr_schedule raised {type(error).__name__} for step {step}{said(error)}") from error
    if not math.isfinite(factor):
        raise LayerFailed(f"Job.lr_schedule is {factor} for step {step}: return a finite factor")
    return factor


def apply_statistics(layer: HeldLayer, recorded: Iterable[statistics.Statistics]) -> None:
    """Move a layer's buffers by what each micro-batch recorded, in micro-batch order."""
    with torch.no_grad():
        for micro in recorded:
            for module, values in zip(layer.moving, micro, strict=True):
                statistics.apply(module, values)
