"""S: from complete sums to the next weights, on one worker, with what it must hear from others.

Most jobs need to hear nothing: each worker divides by M and steps. Only a loss with weights (their sum is known where
the loss is), clipping or skipping (norms of all layers) and tied parameters (sums of their other layers) make it wait.
The speaker of a segment, its holder in the first pipeline, tells everyone who needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.errors import LayerFailed
from culm.runtime.desk import Closed
from culm.runtime.state import layer_of
from culm.runtime.update import (
    apply_statistics,
    check_finite,
    check_loss,
    clip_factor,
    finish_layers,
    layer_norms,
    lr_factor,
    scale,
)
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.runtime.desk import Holding
    from culm.runtime.executor import Executor
    from culm.runtime.state import HeldLayer, TiedGroup


class Closing:
    """Ends the steps of an executor's epoch."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.job, self.desk = executor.job, executor.desk
        self.plan, self.epoch = executor.plan, executor.epoch
        self.last = self.plan.segments - 1
        self.asks_totals = self.epoch.weighted or self.job.nonfinite == "skip"
        self.asks_norms = self.job.clip_norm is not None or self.job.nonfinite == "skip"

    async def close(self, step: int, holdings: Sequence[Holding], told: Collection[int] | None = None) -> None:
        """Divide, clip, step and move the statistics of some stages held here; their sums are complete.

        `told` are the slots that have still to end the step, and so have to hear what only others know: all, unless
        this is a recovery. May be broken off at any wait: then nothing has moved, and it can be done again.
        """
        told = self._everyone() if told is None else told
        open_step = self.desk.step(step)
        settled = open_step.settled.get(self.last)
        if settled is not None:
            check_loss(self.job, step, settled.loss_sum, settled.weight_sum)
        loss_sum, divisor = await self._totals(step, told)
        for holding in holdings:
            self._load_sums(step, holding)
        self._tell_tied(step, told)
        for holding in holdings:
            # before the sums of the layers, which are divided in place
            for group in (group for group in holding.state.tied.values() if group.trains):
                await self._finish_tied(step, group, divisor)
            open_step.loaded -= set(holding.segments)
            finish_layers(holding.state.layers.values(), divisor)
        norm, factor = await self._norm(step, holdings, told)
        skipped = self.job.nonfinite == "skip" and not (math.isfinite(loss_sum) and math.isfinite(norm or 0.0))
        await self._moment(step, holdings, "S")
        for holding in holdings:
            self._step(step, holding, factor, skipped)
        open_step.closed = open_step.closed or Closed(norm, skipped)
        await self._moment(step, holdings, "S+")

    async def _moment(self, step: int, holdings: Sequence[Holding], what: str) -> None:
        """Named as in the plan: by segment, of which a stage may have several."""
        for g in (g for holding in holdings for g in holding.segments):
            await self.executor.clock.work(self.executor.node, step, f"{g}{what}")

    def _step(self, step: int, holding: Holding, factor: Tensor | None, skipped: bool) -> None:
        """From gradients to weights, in one go: whoever is stopped is stopped before it, or after."""
        layers, state = list(holding.state.layers.values()), holding.state
        assert holding.version == step, (holding.version, step)
        if factor is not None and self.job.clip_norm is not None:
            scale(state, layers, state.tied.values(), factor)
        if self.epoch.kept:
            holding.remember()
        if not skipped:
            check_finite(step, layers, state.tied.values())
            state.step(lr_factor(self.job, step))
            settled = self.desk.step(step).settled
            for g in holding.segments:
                for layer in holding.segments[g].layers:
                    if layer.moving:
                        apply_statistics(layer, settled[g].statistics.get(layer.index, ()))
        for layer in layers:
            layer.accumulator.clear()
        holding.stepped()

    def _load_sums(self, step: int, holding: Holding) -> None:
        """Start from the complete sums that were kept, where they do not lie in the layers: they came from another
        holder, or a close that was broken off has divided them."""
        open_step = self.desk.step(step)
        for g, segment in holding.segments.items():
            if g in open_step.loaded:
                continue
            total = open_step.sums[g]
            trained = [layer for layer in segment.layers if layer.trained]
            for layer, value in zip(trained, total.totals, strict=True):
                layer.accumulator.total.copy_(value)
            book = self.desk.book(step, g, segment)
            open_step.settled[g] = book.settle(total.rider, self.epoch.drops(step))
            open_step.loaded.add(g)

    async def _totals(self, step: int, told: Collection[int]) -> tuple[float, float]:
        """Sum of the losses (where known) and what the sums are divided by: M, or the weights that the loss gave."""
        open_step = self.desk.step(step)
        if open_step.totals is None:
            settled = open_step.settled.get(self.last)
            divisor = float(self.job.micro_batches - len(self.epoch.drops(step)))
            if settled is not None:
                if not self.epoch.weighted and settled.weight_sum != divisor:
                    raise LayerFailed(
                        f"the loss returned a mean at first, and (sum, weight) in step {step}: always return the same"
                    )
                open_step.totals = settled.loss_sum, settled.weight_sum if self.epoch.weighted else divisor
            elif not self.asks_totals:
                return 0.0, divisor
            else:
                (heard,) = await self._hear(step, "totals")
                open_step.totals = float(heard[0]), float(heard[1])
        if self.asks_totals and self._speaks(step, self.last):
            value = torch.tensor(open_step.totals, dtype=torch.float64)
            self._tell(step, "totals", [value], self._without(step, self.last, told))
        return open_step.totals

    async def tell(self, step: int, told: Collection[int]) -> None:
        """In a recovery: this worker has ended the step, others have not and need what it knows."""
        await self._totals(step, told)
        self._tell_tied(step, told)
        self._tell_norms(step, told)

    def _tell_norms(self, step: int, told: Collection[int]) -> None:
        for g, norms in self.desk.step(step).norms.items():
            if self._speaks(step, g):
                self._tell(step, f"norms {g}", [norms], told)

    async def _norm(
        self, step: int, holdings: Sequence[Holding], told: Collection[int]
    ) -> tuple[float | None, Tensor | None]:
        """The global norm over all layers in order, and what gradients are to be multiplied by."""
        if not self.asks_norms:
            return None, None
        norms = self.desk.step(step).norms
        for holding in holdings:
            for g, segment in holding.segments.items():
                if g not in norms and self._speaks(step, g):
                    norms[g] = torch.cat([layer_norms(layer, holding.state.tied).cpu() for layer in segment.layers])
        self._tell_norms(step, told)
        for g in range(self.plan.segments):
            if g not in norms:
                (norms[g],) = await self._hear(step, f"norms {g}")
        norm, factor = clip_factor(self.job, [norms[g] for g in range(self.plan.segments)])
        return norm, factor

    def _tell_tied(self, step: int, told: Collection[int]) -> None:
        """The sums of tied parameters that this worker speaks for, to those who hold another layer of the group."""
        for names in self.job.tied:
            for name in names:
                g = self._segment_of(layer_of(name))
                if self._speaks(step, g) and name in self._layer(name, g).trained:
                    total, bound = self._own_sum(step, name, g)
                    self._tell(step, f"tied {name}", [total, bound], self._sharers(step, names, g, told))

    def _own_sum(self, step: int, name: str, g: int) -> tuple[Tensor, Tensor]:
        """The complete sum of one parameter and its bound, as they were before anything was divided."""
        holding, layer = self.desk.holdings[g % self.plan.stages], self._layer(name, g)
        total = self.desk.step(step).sums.get(g)
        if total is None:
            copy = layer.sums()[name].detach().to("cpu", copy=True)  # it is cleared before the frame may have left
            return copy, torch.tensor([layer.accumulator.bound])
        trained = [each for each in holding.segments[g].layers if each.trained]
        sizes = [p.numel() for p in layer.trained.values()]
        own = dict(zip(layer.trained, total.totals[trained.index(layer)].split(sizes), strict=True))[name]
        return own, torch.tensor([self.desk.step(step).settled[g].bounds[layer.index]])

    def _layer(self, name: str, g: int) -> HeldLayer:
        return self.desk.holdings[g % self.plan.stages].state.layers[layer_of(name)]

    async def _finish_tied(self, step: int, group: TiedGroup, divisor: float) -> None:
        sums, bounds = [], []
        for name in group.names:
            g = self._segment_of(layer_of(name))
            if g in self.desk.step(step).settled and self._undivided(step, g):
                total, bound = self._own_sum(step, name, g)
            else:
                total, bound = await self._hear_once(step, f"tied {name}")
            sums.append(total.to(group.gradient.device))
            bounds.append(int(bound))
        group.finish(sums, bounds, divisor)

    def _undivided(self, step: int, g: int) -> bool:
        """Whether the sum can still be read here: it is kept, or its layers have not been divided yet."""
        return g in self.desk.step(step).sums or self.desk.holdings[g % self.plan.stages].version == step

    def _segment_of(self, layer: int) -> int:
        return next(g for g, (low, high) in enumerate(self.epoch.segments) if low <= layer < high)

    def _runners(self, step: int, g: int) -> tuple[int, ...]:
        """Who adds to the sum of a segment in a step: in a recovery, those that ran it until then."""
        recovery = self.epoch.recovery
        return recovery.runners[step][g] if step in recovery.steps else self.executor.runners(g)

    def _speaks(self, step: int, g: int) -> bool:
        return self._runners(step, g)[0] == self.executor.slot

    def _everyone(self) -> list[int]:
        return self.epoch.staying

    def _without(self, step: int, g: int, told: Collection[int]) -> list[int]:
        """Of some workers those that do not run a segment."""
        return [slot for slot in told if slot not in self._runners(step, g)]

    def _sharers(self, step: int, names: Iterable[str], g: int, told: Collection[int]) -> list[int]:
        """Workers that hold another layer of a tied group, but not this segment."""
        holders = {w for name in names for w in self._holders(step, self._segment_of(layer_of(name)))}
        return [slot for slot in told if slot in holders and slot not in self._runners(step, g)]

    def _holders(self, step: int, g: int) -> set[int]:
        stage, recovery = g % self.plan.stages, self.epoch.recovery
        if step in recovery.steps:
            return {slot for slot, held in enumerate(recovery.versions) if stage in held}
        return {*self.executor.runners(g), *(s.slot for s in self.epoch.shadows if s.stage == stage)}

    def _tell(self, step: int, name: str, values: list[Tensor], slots: Iterable[int]) -> None:
        for slot in slots:
            if slot != self.executor.slot:
                self.executor.transport.send(self.epoch.address(slot), self._key(step, name), values)

    async def _hear(self, step: int, name: str) -> tuple[Tensor, ...]:
        found = await self.executor.transport.receive(self._key(step, name))
        return tuple(value for value in found if value is not None)

    async def _hear_once(self, step: int, name: str) -> tuple[Tensor, ...]:
        """Several stages held here may ask for the same: it comes once."""
        heard = self.desk.step(step).heard
        if name not in heard:
            heard[name] = await self._hear(step, name)
        return heard[name]

    def _key(self, step: int, name: str) -> Key:
        return Key(self.epoch.number, step, name)
