"""Units stepped by one call, where torch's optimizers move each parameter by itself: the numbers are the same, and a
call costs more than the arithmetic of a small layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from culm.errors import CulmError, LayerFailed, said
from culm.runtime.raised import RAISED

if TYPE_CHECKING:
    from culm.runtime.state import Unit

_BY_ITSELF = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
}
"""Optimizers that move a parameter by its own gradient and state, whatever others they are given with it."""
_SAME_FOREACH = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}
"""Of these, those that on a CPU come to the same bits where torch goes through all parameters in each of its calls."""
_SMALL = 1 << 14
"""Elements of a parameter, on average, up to which the calls cost more than what they do; above, the cache counts."""


class Stepped(Protocol):
    """Something that makes an optimizer step, its learning rates multiplied by a factor."""

    def step(self, factor: float) -> None: ...


def joined(units: Sequence[Unit]) -> list[Stepped]:
    """All that has to be stepped instead of these: those that can be are put together."""
    kinds: dict[type[Optimizer], list[Unit]] = {}
    for unit in units:
        if unit.optimizer is not None and _plain(unit.optimizer):
            kinds.setdefault(type(unit.optimizer), []).append(unit)
    together = [alike for alike in kinds.values() if len(alike) > 1]
    apart = [unit for unit in units if not any(unit in alike for alike in together)]
    return [*(Joint(alike) for alike in together), *apart]


class Joint:
    """Units with optimizers of one kind. From here on they share their state, each parameter with what is its own."""

    def __init__(self, units: Sequence[Unit]) -> None:
        made = [unit.optimizer for unit in units if unit.optimizer is not None]
        self.optimizer = copy.copy(made[0])
        self.optimizer.param_groups = _grouped(made)
        for one in made:
            self.optimizer.state.update(one.state)
            one.state = self.optimizer.state
        for group in self.optimizer.param_groups:
            if type(self.optimizer) in _SAME_FOREACH and group["foreach"] is None and not group["fused"]:
                group["foreach"] = _small(group["params"]) or None
        self._base = [group["lr"] for group in self.optimizer.param_groups]
        self._label = f"{units[0].label} to {units[-1].label}"

    def step(self, factor: float) -> None:
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor
        step_of(self.optimizer, self._label)


def step_of(optimizer: Optimizer, label: str) -> None:
    """One step on the gradients that lie in `.grad`. Raises LayerFailed if the optimizer can not make it."""
    try:
        optimizer.step()
    except CulmError:
        raise
    except RAISED as error:
        name, kind = type(optimizer).__name__, type(error).__name__
        raise LayerFailed(f"the optimizer of {label} ({name}) raised {kind}{said(error)}") from error


def _plain(optimizer: Optimizer) -> bool:
    """Whether it is as torch made it: no class of the user's, no hooks, nothing wrapped around its step."""
    if type(optimizer) not in _BY_ITSELF or "step" in vars(optimizer):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return not any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values())


def _grouped(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Their groups, those with the same settings as one."""
    found: list[dict[str, Any]] = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        same = next((other for other in found if _settings(other) == _settings(group)), None)
        if same is None:
            found.append({**group, "params": list(group["params"])})
        else:
            same["params"] += group["params"]
    return found


def _small(parameters: Sequence[Tensor]) -> bool:
    """Whether they lie on a CPU and are small: a GPU's parameters torch takes together by itself."""
    elements = sum(parameter.numel() for parameter in parameters)
    return all(p.device.type == "cpu" for p in parameters) and elements <= _SMALL * len(parameters)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
