"""The parameters of a layer as an optimizer factory gets them: a list that knows their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class LayerParameters(list[nn.Parameter]):
    """The trainable parameters of one layer. A list, so that it can be passed to an optimizer as it is."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.named = dict(named)
        """By name, as in a checkpoint: "3.attention.weight"."""

    def groups(
        self, *, weight_decay: float, no_decay: Callable[[str, nn.Parameter], bool] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: `weight_decay` for matrices, none for biases, norms and other vectors.

        `no_decay(name, parameter)` decides otherwise. `options` are settings of all groups. A group without parameters
        is left out.
        """
        excluded = no_decay or (lambda _, parameter: parameter.ndim < 2)
        plain = [parameter for name, parameter in self.named.items() if excluded(name, parameter)]
        decayed = [parameter for name, parameter in self.named.items() if not excluded(name, parameter)]
        found = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return [{**group, **options} for group in found if group["params"]]
