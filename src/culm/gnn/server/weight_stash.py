"""Weight stash: the weights of some layers in versions, updated by Adam. Old versions are freed when no server needs
them.

Pure but for the arithmetic. Version n includes the gradients of training epochs 0 to n-1, of every interval once. The
updates of a layer are applied in the order of epochs, even if a later gradient is complete first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from culm.gnn.server.gradient_reducer import GradientReducer
from culm.gnn.server.weight_prediction import StashedWeights
from culm.runtime.compute.snapshot import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model.gnn_model import LayerWeights

_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class Adam(msgspec.Struct, frozen=True, kw_only=True):
    """The update rule of torch.optim.Adam."""

    lr: float = 0.01
    weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step(self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: int) -> None:
        """Apply update number `count` in place."""
        first, second = self.betas
        gradient = gradient.add(parameter, alpha=self.weight_decay) if self.weight_decay else gradient
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        parameter.addcdiv_(mean, self._denominator(square, count), value=-self.lr / (1 - first**count))

    def expected_update(self, mean: Tensor, square: Tensor, count: int) -> Tensor:
        """Return what the next update will add if gradients stay the same: what update number `count` has added."""
        if count == 0:
            return torch.zeros_like(mean)
        return mean.div(self._denominator(square, count)).mul_(-self.lr / (1 - self.betas[0] ** count))

    def _denominator(self, square: Tensor, count: int) -> Tensor:
        return (square.sqrt() / math.sqrt(1 - self.betas[1] ** count)).add_(self.eps)


class WeightStash:
    """The layers of one parameter server. With `lookahead`, every version is stashed with its expected update."""

    def __init__(self, layers: Iterable[int], servers: int, adam: Adam, *, lookahead: bool = False) -> None:
        self.layers = tuple(layers)
        self._adam, self._servers, self._lookahead = adam, servers, lookahead
        self._weights: dict[int, LayerWeights] = {}
        self._moments: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._newest_version: dict[int, int] = {}
        self._stash: dict[tuple[int, int], StashedWeights] = {}
        self._oldest_needed: dict[int, dict[int, int]] = {}
        self._reducer: GradientReducer[int] = GradientReducer(range(servers))
        self._complete_gradients: dict[tuple[int, int], dict[str, Tensor]] = {}

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load a version from `tensors`: `LAYER.NAME`, and `optimizer.LAYER.NAME.*` for moments that are not zero."""
        for layer in self.layers:
            names = [n.removeprefix(f"{layer}.") for n in tensors if n.startswith(f"{layer}.")]
            self._weights[layer] = {n: tensors[f"{layer}.{n}"].clone() for n in names}
            self._moments[layer] = {n: self._load_moments(tensors, layer, n) for n in names}
            self._newest_version[layer] = version
            self._oldest_needed[layer] = dict.fromkeys(range(self._servers), version)
            self._stash_newest(layer)

    def _load_moments(self, tensors: Mapping[str, Tensor], layer: int, name: str) -> tuple[Tensor, Tensor]:
        like = self._weights[layer][name]
        mean, square = (tensors.get(f"optimizer.{layer}.{name}.{m}") for m in _MOMENT_NAMES)
        return (
            torch.zeros_like(like) if mean is None else mean.clone(),
            torch.zeros_like(like) if square is None else square.clone(),
        )

    def newest_version(self, layer: int) -> int:
        return self._newest_version[layer]

    def get_version(self, layer: int, version: int) -> StashedWeights | None:
        """Return a version; None if it is not stashed."""
        return self._stash.get((layer, version))

    def stashed_versions(self, layer: int) -> list[int]:
        """Return the stashed versions of a layer, oldest first."""
        return sorted(v for owner, v in self._stash if owner == layer)

    def add_gradient(self, epoch: int, layer: int, server: int, gradient: Mapping[str, Tensor]) -> list[int]:
        """Add the gradient of a server for a training epoch. Returns the versions that it completed, oldest first."""
        if epoch < self._newest_version[layer]:
            return []
        total = self._reducer.add((layer, epoch), server, gradient)
        if total is not None:
            self._complete_gradients[layer, epoch] = total
        versions = []
        while (gradient_sum := self._complete_gradients.pop((layer, self._newest_version[layer]), None)) is not None:
            self._apply_update(layer, gradient_sum)
            versions.append(self._newest_version[layer])
        return versions

    def _apply_update(self, layer: int, gradient: Mapping[str, Tensor]) -> None:
        self._newest_version[layer] += 1
        for name, parameter in self._weights[layer].items():
            self._adam.step(parameter, gradient[name], *self._moments[layer][name], self._newest_version[layer])
        self._stash_newest(layer)
        self._free_unneeded(layer)

    def _stash_newest(self, layer: int) -> None:
        """Stash a copy of the newest version."""
        count, update = self._newest_version[layer], {}
        if self._lookahead:
            update = {name: self._adam.expected_update(*pair, count) for name, pair in self._moments[layer].items()}
        self._stash[layer, count] = StashedWeights(
            {name: weight.clone() for name, weight in self._weights[layer].items()}, update
        )

    def release_older_than(self, layer: int, server: int, version: int) -> None:
        """Note that a graph server will request no older version, and free versions that no server needs."""
        self._oldest_needed[layer][server] = max(version, self._oldest_needed[layer][server])
        self._free_unneeded(layer)

    def _free_unneeded(self, layer: int) -> None:
        floor = min(*self._oldest_needed[layer].values(), self._newest_version[layer])
        for version in self.stashed_versions(layer):
            if version < floor:
                del self._stash[layer, version]

    def checkpoint_tensors(self, layer: int) -> dict[str, Tensor]:
        """Return the newest state of a layer under the names that `load` reads."""
        state = self.newest_state(layer)
        weights = {f"{layer}.{name}": tensor for name, tensor in state.parameters.items()}
        return weights | {f"optimizer.{layer}.{name}": tensor for name, tensor in state.moments.items()}

    def newest_state(self, layer: int) -> Snapshot:
        """Return a copy of the newest version's weights and moments; updates happen in place."""
        moments = {
            f"{name}.{key}": value.clone()
            for name, pair in self._moments[layer].items()
            for key, value in zip(_MOMENT_NAMES, pair, strict=True)
        }
        parameters = {name: weight.clone() for name, weight in self._weights[layer].items()}
        return Snapshot(parameters=parameters, moments=moments)
