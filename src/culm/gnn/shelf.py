"""The weights of some layers in versions: gradients in, updates out, old versions gone when nobody needs them.

Pure but for the arithmetic. Version n has seen the gradients of epochs 0 to n-1, of every interval once. Updates of a
layer happen in the order of epochs, whichever is complete first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from culm.gnn.lookahead import Stashed
from culm.gnn.tally import Tally
from culm.runtime.state import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model import Weights

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(msgspec.Struct, frozen=True, kw_only=True):
    """torch.optim.Adam, the arithmetic alone."""

    lr: float = 0.01
    weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step(self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: int) -> None:
        """One update in place, the count-th."""
        first, second = self.betas
        gradient = gradient.add(parameter, alpha=self.weight_decay) if self.weight_decay else gradient
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        parameter.addcdiv_(mean, self._denominator(square, count), value=-self.lr / (1 - first**count))

    def expected(self, mean: Tensor, square: Tensor, count: int) -> Tensor:
        """What the next update will add if gradients go on as they did: what the last one, the count-th, has added."""
        if count == 0:
            return torch.zeros_like(mean)
        return mean.div(self._denominator(square, count)).mul_(-self.lr / (1 - self.betas[0] ** count))

    def _denominator(self, square: Tensor, count: int) -> Tensor:
        return (square.sqrt() / math.sqrt(1 - self.betas[1] ** count)).add_(self.eps)


class Shelf:
    """Layers of one parameter server. `lookahead`: with each version goes the step that is expected to follow it."""

    def __init__(self, layers: Iterable[int], servers: int, adam: Adam, *, lookahead: bool = False) -> None:
        self.layers = tuple(layers)
        self._adam, self._servers, self._lookahead = adam, servers, lookahead
        self._now: dict[int, Weights] = {}
        self._moments: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._newest: dict[int, int] = {}
        self._stash: dict[tuple[int, int], Stashed] = {}
        self._needed: dict[int, dict[int, int]] = {}
        self._tally: Tally[int] = Tally(range(servers))
        self._complete: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.freed = 0

    def fill(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Begin with a version out of `tensors`: `LAYER.NAME`, and moments where they are not zero."""
        for layer in self.layers:
            names = [n.removeprefix(f"{layer}.") for n in tensors if n.startswith(f"{layer}.")]
            self._now[layer] = {n: tensors[f"{layer}.{n}"].clone() for n in names}
            self._moments[layer] = {n: self._loaded(tensors, layer, n) for n in names}
            self._newest[layer] = version
            self._needed[layer] = dict.fromkeys(range(self._servers), version)
            self._keep(layer)

    def _loaded(self, tensors: Mapping[str, Tensor], layer: int, name: str) -> tuple[Tensor, Tensor]:
        like = self._now[layer][name]
        mean, square = (tensors.get(f"optimizer.{layer}.{name}.{m}") for m in _MOMENTS)
        return (
            torch.zeros_like(like) if mean is None else mean.clone(),
            torch.zeros_like(like) if square is None else square.clone(),
        )

    def newest(self, layer: int) -> int:
        return self._newest[layer]

    def version(self, layer: int, version: int) -> Stashed | None:
        """A version that is still kept."""
        return self._stash.get((layer, version))

    def kept(self, layer: int) -> list[int]:
        """Versions of a layer that are kept, oldest first."""
        return sorted(v for held, v in self._stash if held == layer)

    def add(self, epoch: int, layer: int, server: int, gradient: Mapping[str, Tensor]) -> list[int]:
        """The gradient of a server for an epoch; returns the versions that became complete by it, oldest first."""
        if epoch < self._newest[layer]:
            return []
        total = self._tally.add((layer, epoch), server, gradient)
        if total is not None:
            self._complete[layer, epoch] = total
        made = []
        while (ready := self._complete.pop((layer, self._newest[layer]), None)) is not None:
            self._update(layer, ready)
            made.append(self._newest[layer])
        return made

    def _update(self, layer: int, gradient: Mapping[str, Tensor]) -> None:
        self._newest[layer] += 1
        for name, parameter in self._now[layer].items():
            self._adam.step(parameter, gradient[name], *self._moments[layer][name], self._newest[layer])
        self._keep(layer)
        self._free(layer)

    def _keep(self, layer: int) -> None:
        """The newest version, as it is now."""
        count, step = self._newest[layer], {}
        if self._lookahead:
            step = {name: self._adam.expected(*own, count) for name, own in self._moments[layer].items()}
        self._stash[layer, count] = Stashed({name: own.clone() for name, own in self._now[layer].items()}, step)

    def oldest(self, layer: int, server: int, version: int) -> None:
        """A graph server will ask for no older version."""
        self._needed[layer][server] = max(version, self._needed[layer][server])
        self._free(layer)

    def _free(self, layer: int) -> None:
        floor = min(*self._needed[layer].values(), self._newest[layer])
        for version in self.kept(layer):
            if version < floor:
                del self._stash[layer, version]
                self.freed += 1

    def snapshot(self, layer: int) -> dict[str, Tensor]:
        """The state under the names that `fill` reads."""
        state = self.state(layer)
        weights = {f"{layer}.{name}": tensor for name, tensor in state.parameters.items()}
        return weights | {f"optimizer.{layer}.{name}": tensor for name, tensor in state.moments.items()}

    def state(self, layer: int) -> Snapshot:
        """Weights and moments of the newest version, copied: updates happen in place."""
        moments = {
            f"{name}.{key}": value.clone()
            for name, own in self._moments[layer].items()
            for key, value in zip(_MOMENTS, own, strict=True)
        }
        return Snapshot(parameters={name: own.clone() for name, own in self._now[layer].items()}, moments=moments)
