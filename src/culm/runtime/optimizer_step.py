"""S: turn reduced gradients into the next weights, on one worker.

Most jobs need nothing from other workers here: each worker divides by the number of micro-batches and steps. A worker
has to wait for others in three cases only: the loss returns weights (their sum is known where the loss is computed),
the job clips or skips (norms of all layers), or it ties parameters (sums of the other layers of the group). For each
segment its first runner sends these values to all workers that need them; with many pipelines, norms travel over one
worker of each pipeline (norm_routes).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.errors import LayerFailed
from culm.runtime.compute.model_state import layer_index
from culm.runtime.compute.weight_update import (
    apply_statistics,
    check_finite,
    check_loss,
    clip_factor,
    clip_values,
    finalize_gradients,
    gradient_sums,
    layer_norms,
    scale_gradients,
)
from culm.runtime.norm_routes import next_receivers
from culm.runtime.worker_state import StepOutcome

if TYPE_CHECKING:
    from culm.runtime.compute.model_state import LayerReplica, TiedGroup
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.worker_state import StageReplica


class OptimizerStep:
    """Ends the steps of one epoch on one worker."""

    def __init__(self, context: EpochContext) -> None:
        self._context, self._copies = context, context.state.copies
        self._job, self._state, self._slot = context.job, context.state, context.slot
        self._transport = context.transport
        self._plan, self._epoch = context.plan, context.epoch
        self._last_segment = self._plan.segments - 1
        self._needs_loss_totals = self._epoch.weighted_loss or self._job.nonfinite == "skip"
        self._needs_norms = self._job.clip_norm is not None or self._job.nonfinite == "skip"

    async def run(self, step: int, replicas: Sequence[StageReplica], receivers: Collection[int] | None = None) -> None:
        """Divide, clip, step and update the buffers of some stages held here. Their reduced gradients are complete.

        `receivers`: the slots that have not ended the step yet and may need values from this worker; None: all slots
        (in a recovery there can be fewer). May be cancelled at any wait: then no weight has changed, and the call can
        be repeated.
        """
        receivers = self._epoch.staying_slots if receivers is None else receivers
        open_step = self._state.open_steps[step]
        totals = open_step.segment_totals.get(self._last_segment)
        if totals is not None:
            check_loss(self._job, step, totals.loss_sum, totals.weight_sum)
        loss_sum, divisor = await self._loss_totals(step, receivers)
        for replica in replicas:
            await self._load_reduced_gradients(step, replica)
        await self._send_tied_sums(step, receivers)
        for replica in replicas:
            # Before the sums of the layers, which are divided in place.
            for group in (group for group in replica.state.tied.values() if group.requires_grad):
                await self._finalize_tied(step, group, divisor)
            open_step.loaded_segments.difference_update(replica.segments)
            finalize_gradients(replica.state.layers.values(), divisor)
        finite_sums = await self._read_device(step, replicas)
        norm, factor = await self._global_norm(step, replicas, receivers)
        skipped = self._job.nonfinite == "skip" and not (math.isfinite(loss_sum) and math.isfinite(norm or 0.0))
        await self._notify_clock(step, replicas, "S")
        for replica in replicas:
            self._step_replica(step, replica, factor, skipped, finite_sums.get(replica.stage))
        open_step.set_outcome(StepOutcome(norm, skipped))
        await self._notify_clock(step, replicas, "S+")

    async def _notify_clock(self, step: int, replicas: Sequence[StageReplica], suffix: str) -> None:
        """One action per segment, as in the plan: a stage may have several segments."""
        for g in (g for replica in replicas for g in replica.segments):
            await self._context.after_action(step, f"{g}{suffix}")

    async def _read_device(self, step: int, replicas: Sequence[StageReplica]) -> dict[int, Tensor]:
        """On a device: read everything that the host has to know before the step, in one copy. These are the norms that
        this worker sends, which are stored, and by stage the sums that tell whether all gradients are finite, which are
        returned. On a CPU nothing is read in advance."""
        if self._copies.is_synchronous:
            return {}
        pieces = self._own_norms(step, replicas) if self._needs_norms else {}
        tensors = [norm for parts in pieces.values() for norm in parts]
        for replica in replicas:
            tensors.append(gradient_sums(replica.state.layers.values(), replica.state.tied.values()))
        host = iter(await self._copies.read(tensors))
        norms = self._state.open_steps[step].grad_norms
        for g, parts in pieces.items():
            norms[g] = torch.cat([next(host).clone() for _ in parts])
        return {replica.stage: next(host).clone() for replica in replicas}

    def _own_norms(self, step: int, replicas: Sequence[StageReplica]) -> dict[int, list[Tensor]]:
        """By segment: the norms of its layers, where this worker sends them and does not know them yet."""
        norms = self._state.open_steps[step].grad_norms
        return {
            g: [layer_norms(layer, replica.state.tied) for layer in segment.layers]
            for replica in replicas
            for g, segment in replica.segments.items()
            if g not in norms and self._is_sender(step, g)
        }

    def _step_replica(
        self, step: int, replica: StageReplica, factor: Tensor | None, skipped: bool, finite_sums: Tensor | None
    ) -> None:
        """Update the weights of a replica from its gradients. Contains no wait: a worker that is stopped is stopped
        before the update or after it. `finite_sums`: of `_read_device`."""
        layers, state = list(replica.state.layers.values()), replica.state
        assert replica.version == step, (replica.version, step)
        if factor is not None and self._job.clip_norm is not None:
            scale_gradients(state, layers, state.tied.values(), factor)
        if self._epoch.keeps_outputs:
            replica.save_weights()
        self._context.during_action(step, f"{min(replica.segments)}S")
        if not skipped:
            check_finite(step, layers, state.tied.values(), finite_sums)
            clip_values(self._job, layers, state.tied.values())
            with self._state.dropping_on_error(replica):
                state.step(step)
            totals = self._state.open_steps[step].segment_totals
            for g, segment in replica.segments.items():
                for layer in segment.layers:
                    if layer.moving_modules:
                        apply_statistics(layer, totals[g].statistics.get(layer.index, ()))
        for layer in layers:
            layer.accumulator.clear()
        replica.advance_version()

    async def _load_reduced_gradients(self, step: int, replica: StageReplica) -> None:
        """Copy the kept reduced gradients into the accumulators that do not contain them. They may come from another
        holder, or an optimizer step that was cancelled has divided them."""
        open_step = self._state.open_steps[step]
        for g, segment in replica.segments.items():
            if g in open_step.loaded_segments:
                continue
            gradient_sum = open_step.reduced_gradients[g]
            await gradient_sum.event.wait()
            trained = [layer for layer in segment.layers if layer.trainable]
            for layer, total in zip(trained, gradient_sum.totals, strict=True):
                layer.accumulator.load_total(total if gradient_sum.on_device else self._on_device(total))
            stats = self._state.stats_for(step, g, segment)
            open_step.segment_totals[g] = stats.read_totals(gradient_sum.metadata, self._epoch.dropped_in(step))
            open_step.loaded_segments.add(g)

    def _on_device(self, value: Tensor) -> Tensor:
        """A tensor in host memory, on the device of the replicas. On a CPU the tensor itself."""
        (moved,) = self._copies.to_device((value,))
        assert moved is not None
        return moved

    async def _loss_totals(self, step: int, receivers: Collection[int]) -> tuple[float, float]:
        """(sum of the losses, divisor of the gradient sums). The divisor is the number of micro-batches, or the sum of
        the weights that the loss returned. The sum of the losses is 0 where it is neither known nor needed."""
        open_step = self._state.open_steps[step]
        loss_totals = open_step.loss_totals
        if loss_totals is None:
            totals = open_step.segment_totals.get(self._last_segment)
            divisor = float(self._job.micro_batches - len(self._epoch.dropped_in(step)))
            if totals is not None:
                if not self._epoch.weighted_loss and totals.weight_sum != divisor:
                    raise LayerFailed(
                        f"Job.loss returned a mean before, and (sum, weight) in step {step}: always return the same"
                    )
                loss_totals = totals.loss_sum, totals.weight_sum if self._epoch.weighted_loss else divisor
            elif not self._needs_loss_totals:
                return 0.0, divisor
            else:
                (received,) = await self._receive(step, "totals")
                loss_totals = float(received[0]), float(received[1])
            open_step.set_loss_totals(loss_totals)
        if self._needs_loss_totals and self._is_sender(step, self._last_segment):
            value = torch.tensor(loss_totals, dtype=torch.float64)
            self._send(step, "totals", [value], self._non_runners(step, self._last_segment, receivers))
        return loss_totals

    async def send_step_values(self, step: int, receivers: Collection[int]) -> None:
        """In a recovery, on a worker that has ended the step: send its values to the workers that have not."""
        await self._loss_totals(step, receivers)
        await self._send_tied_sums(step, receivers)
        self._send_norms(step, receivers)

    def _send_norms(self, step: int, receivers: Collection[int]) -> None:
        """Send the norms of the segments that this worker is the first runner of."""
        for g in self._state.open_steps[step].grad_norms:
            if self._is_sender(step, g):
                self._send_or_forward(step, g, receivers)

    def _send_or_forward(self, step: int, g: int, receivers: Collection[int]) -> None:
        """Send the norms of a segment to the workers that get them from this one. In a recovered step the first runner
        sends them to all: others may have ended the step."""
        runners, norms = self._context.runner_slots(step, g), self._state.open_steps[step].grad_norms[g]
        slots = (
            receivers if self._is_recovered(step) else next_receivers(self._slot, runners, receivers, self._plan.stages)
        )
        self._send(step, f"norms {g}", [norms], slots)

    def _is_recovered(self, step: int) -> bool:
        recovery = self._epoch.recovery
        return step in recovery.steps

    async def _global_norm(
        self, step: int, replicas: Sequence[StageReplica], receivers: Collection[int]
    ) -> tuple[float | None, Tensor | None]:
        """(global norm over all layers in order, factor for all gradients). (None, None) where no norm is needed."""
        if not self._needs_norms:
            return None, None
        norms = self._state.open_steps[step].grad_norms
        for g, parts in self._own_norms(step, replicas).items():
            norms[g] = torch.cat(parts)
        self._send_norms(step, receivers)
        own = [g for g in range(self._plan.segments) if self._slot in self._context.runner_slots(step, g)]
        for g in dict.fromkeys((*own, *range(self._plan.segments))):  # its own first: others wait for them
            if g not in norms:
                (norms[g],) = await self._receive(step, f"norms {g}")
                if g in own and not self._is_recovered(step):
                    self._send_or_forward(step, g, receivers)
        norm, factor = clip_factor(self._job, [norms[g] for g in range(self._plan.segments)])
        return norm, factor

    async def _send_tied_sums(self, step: int, receivers: Collection[int]) -> None:
        """Send the sums of the tied parameters that this worker is the sender of, to the holders of another layer of
        the group."""
        for names in self._job.tied:
            for name in names:
                g = self._segment_of(layer_index(name))
                if self._is_sender(step, g) and name in self._layer_replica(name, g).trainable:
                    holders = self._tied_holders(step, names, g, receivers)
                    if holders:
                        self._send(step, f"tied {name}", await self._local_tied_sum(step, name, g), holders)

    async def _local_tied_sum(self, step: int, name: str, g: int) -> tuple[Tensor, Tensor]:
        """The complete sum of one parameter and its bound in host memory, as they were before anything was divided."""
        replica, layer = self._context.replica_of(g), self._layer_replica(name, g)
        open_step = self._state.open_steps[step]
        gradient_sum = open_step.reduced_gradients.get(g)
        if gradient_sum is None:
            # A copy: the accumulator may be cleared before the frame is sent.
            (copy,) = await self._copies.read([layer.gradient_sums()[name].detach().clone()])
            return copy, torch.tensor([layer.accumulator.bound])
        await gradient_sum.event.wait()
        trained = [each for each in replica.segments[g].layers if each.trainable]
        sizes = [p.numel() for p in layer.trainable.values()]
        own = dict(zip(layer.trainable, gradient_sum.totals[trained.index(layer)].split(sizes), strict=True))[name]
        if gradient_sum.on_device:
            (own,) = await self._copies.read([own])
        return own, torch.tensor([open_step.segment_totals[g].bounds[layer.index]])

    def _layer_replica(self, name: str, g: int) -> LayerReplica:
        return self._context.replica_of(g).state.layers[layer_index(name)]

    async def _finalize_tied(self, step: int, group: TiedGroup, divisor: float) -> None:
        sums, bounds = [], []
        for name in group.names:
            g = self._segment_of(layer_index(name))
            if g in self._state.open_steps[step].segment_totals and self._sum_available(step, g):
                total, bound = await self._local_tied_sum(step, name, g)
            else:
                total, bound = await self._receive_once(step, f"tied {name}")
            sums.append(self._on_device(total))
            bounds.append(int(bound))
        group.finalize_gradient(sums, bounds, divisor)

    def _sum_available(self, step: int, g: int) -> bool:
        """Whether the sum can still be read here: it is kept, or its layers have not been divided yet."""
        is_kept = g in self._state.open_steps[step].reduced_gradients
        return is_kept or self._context.replica_of(g).version == step

    def _segment_of(self, layer: int) -> int:
        return next(g for g, (low, high) in enumerate(self._epoch.segments) if low <= layer < high)

    def _is_sender(self, step: int, g: int) -> bool:
        return self._context.runner_slots(step, g)[0] == self._slot

    def _non_runners(self, step: int, g: int, slots: Collection[int]) -> list[int]:
        """Those of `slots` that do not run a segment."""
        return [slot for slot in slots if slot not in self._context.runner_slots(step, g)]

    def _tied_holders(self, step: int, names: Iterable[str], g: int, slots: Collection[int]) -> list[int]:
        """Those of `slots` that hold a layer of a tied group but do not run segment `g`."""
        holders = {w for name in names for w in self._holder_slots(step, self._segment_of(layer_index(name)))}
        return [slot for slot in self._non_runners(step, g, slots) if slot in holders]

    def _holder_slots(self, step: int, g: int) -> set[int]:
        stage, recovery = g % self._plan.stages, self._epoch.recovery
        if step in recovery.steps:
            return {slot for slot, held in enumerate(recovery.weight_versions) if stage in held}
        return {*self._plan.holders_of(g), *(s.slot for s in self._epoch.shadows if s.stage == stage)}

    def _send(self, step: int, name: str, values: Sequence[Tensor], slots: Iterable[int]) -> None:
        for slot in slots:
            if slot != self._slot:
                self._context.send(slot, step, name, values)

    async def _receive(self, step: int, name: str) -> tuple[Tensor, ...]:
        frame = await self._transport.receive(self._context.frame_key(step, name))
        return tuple(value for value in frame if value is not None)

    async def _receive_once(self, step: int, name: str) -> tuple[Tensor, ...]:
        """Receive a frame that several stages held here may need: it is sent once, so it is stored."""
        received = self._state.open_steps[step].received_values
        if name not in received:
            received[name] = await self._receive(step, name)
        return received[name]
