"""S: from complete sums to the next weights, on one worker, with what it must hear from others.

Most jobs need to hear nothing: each worker divides by M and steps. Only a loss with weights (their sum is known where
the loss is), clipping or skipping (norms of all layers) and tied parameters (sums of their other layers) make it wait.
The speaker of a segment, its holder in the first pipeline, tells everyone who needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.runtime.update import check_finite, check_loss, clip_factor, finish_layers, layer_norms, lr_factor, scale
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.runtime.executor import Executor
    from culm.runtime.state import HeldLayer, TiedGroup


@dataclass(frozen=True)
class Closed:
    """How a step ended here."""

    loss_sum: float | None
    """Where this worker speaks for the last segment."""
    weight_sum: float | None
    norm: float | None
    skipped: bool


class Closing:
    """Ends the steps of an executor's epoch."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.job, self.state = executor.job, executor.state
        self.plan, self.epoch = executor.plan, executor.epoch
        self.last = self.plan.segments - 1
        self.mine = set(executor.segments)
        self.layers: list[HeldLayer] = [layer for s in executor.segments.values() for layer in s.layers]
        self.asks_totals = self.epoch.weighted or self.job.nonfinite == "skip"
        self.asks_norms = self.job.clip_norm is not None or self.job.nonfinite == "skip"

    async def close(self, step: int) -> Closed:
        """Divide, clip, step and move the statistics; the sums are empty afterwards."""
        settled = self.executor.settled.get(self.last)
        if settled is not None and self.job.nonfinite == "stop":
            check_loss(step, settled.loss_sum, settled.weight_sum)
        loss_sum, weight_sum = await self._totals(step)
        for group in self.state.tied.values():  # before the sums of the layers, which are divided in place
            await self._finish_tied(step, group, weight_sum)
        finish_layers(self.layers, weight_sum)
        norm = await self._clip(step)
        skipped = self.job.nonfinite == "skip" and not (math.isfinite(loss_sum) and math.isfinite(norm or 0.0))
        if not skipped:
            check_finite(step, self.layers, self.state.tied.values())
            factor = lr_factor(self.job, step)
            for _, unit in self.state.units():
                unit.step(factor)
            self.executor.move_statistics()
        for layer in self.layers:
            layer.accumulator.clear()
        speaks = settled is not None and self._speaks(self.last)
        return Closed(loss_sum if speaks else None, weight_sum if speaks else None, norm, skipped)

    async def _totals(self, step: int) -> tuple[float, float]:
        """Sum of the losses (where known) and what the sums are divided by: M, or the weights that the loss gave."""
        settled = self.executor.settled.get(self.last)
        weights = float(self.job.micro_batches)
        if settled is None and not self.asks_totals:
            return 0.0, weights
        if settled is None:
            (heard,) = await self._hear(step, "totals")
            return float(heard[0]), float(heard[1]) if self.epoch.weighted else weights
        weights = settled.weight_sum if self.epoch.weighted else weights
        if self.asks_totals and self._speaks(self.last):
            self._tell(
                step, "totals", torch.tensor([settled.loss_sum, weights], dtype=torch.float64), self._without(self.last)
            )
        return settled.loss_sum, weights

    async def _clip(self, step: int) -> float | None:
        """The global norm over all layers in order, after scaling the gradients where it is above the limit."""
        if not self.asks_norms:
            return None
        norms: list[Tensor] = []
        for g in range(self.plan.segments):
            if g in self.mine:
                own = [layer_norms(layer, self.state.tied) for layer in self.executor.segments[g].layers]
                found = torch.cat([n.cpu() for n in own])
                if self._speaks(g):
                    self._tell(step, f"norms {g}", found, self._others())
            if g not in self.mine or not self._speaks(g):
                (found,) = await self._hear(step, f"norms {g}")
            norms.append(found)
        norm, factor = clip_factor(self.job, norms)
        if self.job.clip_norm is not None:
            scale(self.state, self.layers, self.state.tied.values(), factor)
        return norm

    async def _finish_tied(self, step: int, group: TiedGroup, divisor: float) -> None:
        sums, bounds = [], []
        for name, index in zip(group.names, group.layers(), strict=True):
            g = self._segment_of(index)
            if g in self.mine:
                layer = self.state.layers[index]
                total, bound = layer.sums()[name], torch.tensor([layer.accumulator.bound])
                if self._speaks(g):
                    self._tell_both(step, f"tied {name}", total, bound, self._sharers(group, g))
            else:
                total, bound = await self._hear(step, f"tied {name}")
                total = total.to(group.gradient.device)
            sums.append(total)
            bounds.append(int(bound))
        group.finish(sums, bounds, divisor)

    def _segment_of(self, layer: int) -> int:
        return next(g for g, (low, high) in enumerate(self.epoch.segments) if low <= layer < high)

    def _speaks(self, g: int) -> bool:
        return self.plan.holders_of(g)[0] == self.executor.slot

    def _others(self) -> list[int]:
        return [w for w in range(len(self.epoch.members)) if w != self.executor.slot]

    def _without(self, g: int) -> list[int]:
        """Workers that do not hold a segment."""
        held = set(self.plan.holders_of(g))
        return [w for w in self._others() if w not in held]

    def _sharers(self, group: TiedGroup, g: int) -> list[int]:
        """Workers that hold another layer of the group, but not this segment."""
        holders = {w for index in group.layers() for w in self.plan.holders_of(self._segment_of(index))}
        return [w for w in self._without(g) if w in holders]

    def _tell(self, step: int, name: str, value: Tensor, workers: Iterable[int]) -> None:
        for worker in workers:
            self.executor.transport.send(self.epoch.members[worker].address, self._key(step, name), [value])

    def _tell_both(self, step: int, name: str, value: Tensor, second: Tensor, workers: Iterable[int]) -> None:
        copy = value.detach().to("cpu", copy=True)  # the sum is cleared before the frame may have left
        for worker in workers:
            self.executor.transport.send(self.epoch.members[worker].address, self._key(step, name), [copy, second])

    async def _hear(self, step: int, name: str) -> tuple[Tensor, ...]:
        found = await self.executor.transport.receive(self._key(step, name))
        return tuple(value for value in found if value is not None)

    def _key(self, step: int, name: str) -> Key:
        return Key(self.epoch.number, step, name)
