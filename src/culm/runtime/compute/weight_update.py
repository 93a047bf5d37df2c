"""From reduced gradients to the next weights: divide once, clip by the global norm, step, update the buffers.

The reference loop and every worker use these functions, so that the arithmetic of a step exists once.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.errors import LayerFailed, NonFiniteLoss
from culm.runtime.compute import buffer_statistics

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.compute.model_state import LayerReplica, ModelState, TiedGroup


def sequential_sum(values: Iterable[float]) -> float:
    """Sum the values in order. The built-in `sum` compensates for rounding in some versions of Python only."""
    return functools.reduce(operator.add, values, 0.0)


def finalize_gradients(layers: Iterable[LayerReplica], divisor: float) -> None:
    """Turn the gradient sums of layers into gradients."""
    for layer in layers:
        layer.accumulator.finalize_gradient(divisor)


def layer_norms(layer: LayerReplica, tied: Mapping[str, TiedGroup]) -> Tensor:
    """The norm of each trained parameter's gradient, in order. A tied parameter counts in its first layer only."""
    aliases = {name: group for group in tied.values() for name in group.names}
    norms = []
    for name, parameter in layer.trainable.items():
        group = aliases.get(name)
        if group is None:
            assert parameter.grad is not None
            norms.append(torch.linalg.vector_norm(parameter.grad))
        elif group.name == name:
            norms.append(torch.linalg.vector_norm(group.gradient))
    if not layer.accumulator.is_finite:
        norms.append(torch.tensor(math.nan, device=layer.accumulator.gradient.device))
    if not norms:
        return torch.zeros(0)
    stacked = torch.stack(norms)
    return stacked if stacked.dtype == torch.float64 else stacked.float()


def clip_factor(job: Job, norms: Sequence[Tensor]) -> tuple[float, Tensor]:
    """(global norm, factor for all gradients) from the norms of all layers in order, as torch's clip_grad_norm_
    computes it."""
    total = torch.linalg.vector_norm(torch.cat([n.cpu() for n in norms]))
    limit = math.inf if job.clip_norm is None else job.clip_norm
    return float(total), torch.clamp(limit / (total + 1e-6), max=1.0)


def check_loss(job: Job, step: int, loss_sum: float, weight_sum: float) -> None:
    """Check the totals of a step. Raises LayerFailed if the sum of the weights is negative, infinite or NaN;
    NonFiniteLoss if the step has no finite loss and such steps are not skipped."""
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


def gradient_sums(layers: Iterable[LayerReplica], groups: Iterable[TiedGroup]) -> Tensor:
    """A number on the device that is finite only if all gradients are: a NaN or an infinity would be in the sum."""
    gradients = [layer.accumulator.gradient for layer in layers] + [group.gradient for group in groups]
    sums = [gradient.sum().float() for gradient in gradients if gradient.numel() or len(gradients) == 1]
    if not sums:
        return torch.zeros(())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def check_finite(
    step: int, layers: Iterable[LayerReplica], groups: Iterable[TiedGroup], sums: Tensor | None = None
) -> None:
    """Raises NonFiniteLoss if a gradient is not finite. No weight has changed yet. Needs one pass and one device
    synchronisation; none if `sums` is what `gradient_sums` returned before the gradients were clipped, on the host, and
    it is finite."""
    layers, groups = list(layers), list(groups)
    gradients = [(layer.label, layer.accumulator.gradient, layer.accumulator.is_finite) for layer in layers]
    gradients += [(f"the tied {group.name}", group.gradient, True) for group in groups]
    if all(finite for _, _, finite in gradients):
        sums = gradient_sums(layers, groups) if sums is None else sums
        if math.isfinite(sums):
            return
    for label, gradient, finite in gradients:
        if not finite or not bool(gradient.isfinite().all()):
            raise NonFiniteLoss(
                f"a gradient of {label} in step {step} is not finite: lower the learning rate, set clip_norm, or skip "
                "such steps with nonfinite='skip'"
            )


def scale_gradients(
    state: ModelState, layers: Iterable[LayerReplica], groups: Iterable[TiedGroup], factor: Tensor
) -> None:
    """Multiply gradients by the clip factor."""
    moved = factor.to(state.device, non_blocking=True)
    for layer in layers:
        layer.accumulator.gradient.mul_(moved)
    for group in groups:
        group.gradient.mul_(moved)


def clip_values(job: Job, layers: Iterable[LayerReplica], groups: Iterable[TiedGroup]) -> None:
    """Clip every element of the gradients to Job.clip_value, as torch's clip_grad_value_ does. They are finite."""
    if job.clip_value is not None:
        for gradient in (*(layer.accumulator.gradient for layer in layers), *(group.gradient for group in groups)):
            gradient.clamp_(-job.clip_value, job.clip_value)


def apply_statistics(layer: LayerReplica, recorded: Iterable[buffer_statistics.Statistics]) -> None:
    """Update a layer's buffers by what each micro-batch recorded, in micro-batch order. What another worker recorded
    is moved to the device of the buffers."""
    with torch.no_grad():
        for micro in recorded:
            for module, values in zip(layer.moving_modules, micro, strict=True):
                device = next(module.buffers()).device
                buffer_statistics.apply_to_buffers(module, values, device)
