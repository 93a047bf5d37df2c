"""Step several units in one call where torch's optimizers update each parameter independently. The result is the same,
and for small layers a call costs more than its arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from culm.errors import CulmError, LayerFailed, message_suffix
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.runtime.compute.lr_schedule import LearningRates
    from culm.runtime.compute.model_state import OptimizerUnit

_PER_PARAMETER_OPTIMIZERS = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
}
"""Optimizers that update a parameter from its own gradient and state only, whatever parameters they are called with."""
_FOREACH_BITWISE_EQUAL = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}
"""Those of them that give the same bits on a CPU with torch's foreach implementation, in float32 and float64. Lower
precisions round at other places there."""
_FOREACH_TYPES = {torch.float32, torch.float64}
_SMALL_PARAMETER = 1 << 14
"""Mean number of elements per parameter up to which calls cost more than their arithmetic. Above it, the cache
matters."""


class Steppable(Protocol):
    """Something that makes the optimizer step of a step, with its learning rates."""

    def step(self, step: int, rates: LearningRates) -> None: ...


def fuse_units(units: Sequence[OptimizerUnit]) -> list[Steppable]:
    """What has to be stepped instead of these units: units that can share a call are combined."""
    kinds: dict[type[Optimizer], list[OptimizerUnit]] = {}
    for unit in units:
        if unit.optimizer is not None and _is_unmodified(unit.optimizer):
            kinds.setdefault(type(unit.optimizer), []).append(unit)
    together = [alike for alike in kinds.values() if len(alike) > 1]
    apart = [unit for unit in units if not any(unit in alike for alike in together)]
    return [*(FusedOptimizer(alike) for alike in together), *apart]


class FusedOptimizer:
    """Units with optimizers of one kind. They share one optimizer from now on; each parameter keeps its own state."""

    def __init__(self, units: Sequence[OptimizerUnit]) -> None:
        self._units = units
        optimizers = [unit.optimizer for unit in units if unit.optimizer is not None]
        self.optimizer = copy.copy(optimizers[0])
        self.optimizer.param_groups, self._sources = _merge_param_groups(units)
        for optimizer in optimizers:
            self.optimizer.state.update(optimizer.state)
            optimizer.state = self.optimizer.state
        for group in self.optimizer.param_groups:
            if type(self.optimizer) in _FOREACH_BITWISE_EQUAL and group["foreach"] is None and not group["fused"]:
                group["foreach"] = _prefers_foreach(group["params"]) or None
        self._label = f"{units[0].label} to {units[-1].label}"

    def step(self, step: int, rates: LearningRates) -> None:
        for group, (unit, number) in zip(self.optimizer.param_groups, self._sources, strict=True):
            assert unit.optimizer is not None
            group.update(rates.settings_at(step, unit.optimizer, unit.base_groups)[number])
        run_optimizer_step(self.optimizer, self._label)
        for unit in self._units:
            if unit.averages:
                unit.update_averages()


def run_optimizer_step(optimizer: Optimizer, label: str) -> None:
    """Make one step on the gradients in `.grad`. Raises LayerFailed if the optimizer fails."""
    try:
        optimizer.step()
    except CulmError:
        raise
    except ASYNC_USER_EXCEPTIONS as error:
        name, kind = type(optimizer).__name__, type(error).__name__
        raise LayerFailed(f"the optimizer of {label} ({name}) raised {kind}{message_suffix(error)}") from error


def _is_unmodified(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torch's own: no user class, no hooks, and its step not wrapped."""
    if type(optimizer) not in _PER_PARAMETER_OPTIMIZERS or "step" in vars(optimizer):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return not any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values())


def _merge_param_groups(
    units: Sequence[OptimizerUnit],
) -> tuple[list[dict[str, Any]], list[tuple[OptimizerUnit, int]]]:
    """The parameter groups of all units, with those of equal settings and schedules merged, and where each is from: a
    unit and the number of the group there. The schedule of a group depends on all groups of its optimizer."""
    merged: list[dict[str, Any]] = []
    sources: list[tuple[OptimizerUnit, int]] = []
    for unit in units:
        for number, group in enumerate(unit.optimizer.param_groups if unit.optimizer is not None else ()):
            same = next(
                (i for i, (other, n) in enumerate(sources) if n == number and other.base_groups == unit.base_groups),
                None,
            )
            if same is None:
                merged.append({**group, "params": list(group["params"])})
                sources.append((unit, number))
            else:
                merged[same]["params"] += group["params"]
    return merged, sources


def _prefers_foreach(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are small, on a CPU and of a type that gives the same bits. On a GPU torch combines
    parameters by itself."""
    elements = sum(parameter.numel() for parameter in parameters)
    suits = all(p.device.type == "cpu" and p.dtype in _FOREACH_TYPES for p in parameters)
    return suits and elements <= _SMALL_PARAMETER * len(parameters)
