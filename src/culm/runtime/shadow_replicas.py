"""Shadow replicas on this worker: copies of stages that other workers run, updated with their reduced gradients.

All of this is done where the worker would otherwise wait: step a replica when its reduced gradient has arrived, restore
the copy that a fresh shadow starts from and, if shadows are eager, run the forward of the replica in advance, so that
after a loss only its backward is left. A replica is at most one step behind the layers that are run here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from culm.runtime.compute.batch_loading import NO_SAMPLES, SampleDigests, expected_samples, load_micro_batch
from culm.runtime.compute.snapshot import pack_snapshot, unpack_snapshot
from culm.runtime.launched_actions import LaunchedAction
from culm.runtime.replica_builder import build_replica
from culm.runtime.shadow_tapes import ShadowTapes
from culm.schedule import Kind

if TYPE_CHECKING:
    from culm.runtime.epoch import Shadow
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.grad_reduce import SegmentGradientReducer
    from culm.runtime.optimizer_step import OptimizerStep
    from culm.runtime.worker_state import StageReplica
    from culm.transport.interface import Tensors

_IDLE_MARGIN = 1.25
"""A bubble must be longer by this factor than the work that is run in it, because step times vary."""


class ShadowReplicas:
    """The shadow replicas of one worker in one epoch.

    A *fresh* shadow starts without a copy, or with a stale one. It becomes *current* when its copy has caught up: from
    then on no step is reported before the copy has made it.
    """

    def __init__(
        self,
        context: EpochContext,
        reducer: SegmentGradientReducer,
        optimizer_step: OptimizerStep,
        on_caught_up: Callable[[Shadow], None],
        on_memory_full: Callable[[int], None],
    ) -> None:
        """`on_caught_up` is called when a fresh shadow becomes current, `on_memory_full` once with the bytes that a
        forward leaves, if there is no page-locked memory for them."""
        self._context, self._reducer, self._optimizer_step = context, reducer, optimizer_step
        self._state, self._clock, self._transport = context.state, context.clock, context.transport
        self._epoch, self._plan = context.epoch, context.plan
        self._on_caught_up = on_caught_up
        own = [shadow for shadow in self._epoch.shadows if shadow.slot == context.slot]
        self.is_building = False
        """Whether the layers of a replica are being built and compiled."""
        self.is_empty = not own
        """Whether this worker has no shadow replica in this epoch."""
        self.current_shadows = {shadow.stage: shadow for shadow in own if not shadow.needs_copy}
        self.fresh_shadows = {shadow.stage: shadow for shadow in own if shadow.needs_copy}
        self._stale_stages = {stage for stage in self.fresh_shadows if stage in self._state.replicas}
        """Stages whose copy here is no longer counted as a holder and will be replaced by a new one."""
        self._update_copying_step()
        self._tapes: ShadowTapes | None = None
        """None: the device is a CPU, or kernels expect tensors where they were; tapes stay there."""
        copies = context.state.copies
        if not copies.is_synchronous and not _may_use_cuda_graphs(context.job.compile):
            self._tapes = ShadowTapes(copies, context.clock, context.job.micro_batches, on_memory_full)
        self.eager_forwards_run = self.eager_forwards_due = 0
        self._eager_forward_s: dict[int, float] = {}
        """By segment: seconds of the last forward that was run in advance."""
        self._eager_queues: dict[int, tuple[int, collections.deque[tuple[int, int]]]] = {}
        """By stage: (step, the (segment, micro-batch) pairs whose forward is still to be run)."""

    async def run_idle_work(self, step: int, idle_s: float) -> bool:
        """Do one piece of work for a replica while the worker waits in a step; False: there was none.

        Work that has to be done anyway is always done; an eager forward only if it takes at most `idle_s` seconds.
        """
        for stage in (*self.current_shadows, *self.fresh_shadows):
            if await self._try_restore_copy(stage):
                return True
            replica = self._state.replicas.get(stage)
            if replica is None or stage in self._stale_stages:
                continue
            if replica.version < step and self._try_receive_gradients(replica):
                await self._step_replica(replica)
                return True
        if step < self._epoch.start:  # in a recovery other workers wait for this one
            return False
        return self._epoch.eager_shadows and await self._try_eager_forward(step, idle_s)

    async def catch_up(self, step: int) -> None:
        """Wait until every current shadow has made all steps before this one."""
        for stage in self.current_shadows:
            replica = self._state.replicas[stage]
            while replica.version < step:
                await self._receive_gradients(replica)
                await self._step_replica(replica)

    async def follow_steps(self, step: int) -> None:
        """On a worker that runs no stage yet: restore the copies, and make all steps up to and including this one with
        the reduced gradients that arrive for them."""
        start = self._epoch.start
        for stage in self.fresh_shadows:
            if stage not in self._state.replicas:
                key = self._context.frame_key(start, _copy_frame_name(stage))
                await self._restore_copy(stage, await self._transport.receive(key))
                await self._context.after_action(start, "copy")
        for stage in (*self.current_shadows, *self.fresh_shadows):
            replica = self._state.replicas[stage]
            while replica.version <= step:
                await self._receive_gradients(replica)
                await self._optimizer_step.run(replica.version, [replica], receivers=())
        self._update_copying_step()

    def promote_if_committed(self, committed_steps: int) -> None:
        """On a worker that runs no stage yet: make the fresh shadows current once they have made every committed step.
        They do not contain the steps that were open when the copy was made."""
        behind = [stage for stage in self.fresh_shadows if self._state.replicas[stage].version < committed_steps]
        if committed_steps >= self._epoch.start and not behind:
            for shadow in [*self.fresh_shadows.values()]:
                self._promote(shadow)

    async def _receive_gradients(self, replica: StageReplica) -> None:
        for g in replica.segments:
            if g not in self._state.open_steps[replica.version].reduced_gradients:
                await self._reducer.receive_reduced_gradient(replica.version, g)

    async def _step_replica(self, replica: StageReplica) -> None:
        await self._optimizer_step.run(replica.version, [replica], receivers=())
        self._promote_if_caught_up(replica)

    def _promote_if_caught_up(self, replica: StageReplica) -> None:
        fresh = self.fresh_shadows.get(replica.stage)
        if fresh is None:
            return
        self._update_copying_step()
        newest_version = max((r.version for r in self._state.replicas.values()), default=0)
        if replica.version >= newest_version:
            self._promote(fresh)

    def _promote(self, shadow: Shadow) -> None:
        """Make a fresh shadow current: no step is reported from now on that it has not made."""
        self.current_shadows[shadow.stage] = self.fresh_shadows.pop(shadow.stage)
        self._update_copying_step()
        self._on_caught_up(shadow)

    def _update_copying_step(self) -> None:
        """Keep the records of a step as long as a copy on its way here has to make that step."""
        copies = {
            stage: self._state.replicas.get(stage) for stage in self.fresh_shadows if stage not in self._stale_stages
        }
        restored = [replica.version for replica in copies.values() if replica is not None]
        awaited = [self._epoch.start] * (len(self.fresh_shadows) - len(restored))
        self._state.set_copying_step(min((*restored, *awaited), default=None))

    def _try_receive_gradients(self, replica: StageReplica) -> bool:
        """Store the reduced gradients that have arrived; whether all of them have."""
        version = replica.version
        reduced = self._state.open_steps[version].reduced_gradients
        return all(g in reduced or self._reducer.try_receive_reduced_gradient(version, g) for g in replica.segments)

    async def _try_restore_copy(self, stage: int) -> bool:
        """Restore the copy that a fresh shadow starts from, if it has arrived from its source."""
        if stage not in self.fresh_shadows or stage in self._state.replicas:
            return False
        frame = self._transport.try_receive(self._context.frame_key(self._epoch.start, _copy_frame_name(stage)))
        if frame is None:
            return False
        self._promote_if_caught_up(await self._restore_copy(stage, frame))
        return True

    async def _restore_copy(self, stage: int, frame: Tensors) -> StageReplica:
        epoch, state = self._epoch, self._state
        self.is_building = True
        try:
            replica = await build_replica(
                self._clock,
                state.job,
                epoch.segments,
                self._plan.stages,
                stage,
                state.device,
                epoch.start,
                epoch.layer_inputs,
            )
        finally:
            self.is_building = False
        replica.state.restore(unpack_snapshot(frame))
        self._state.replicas[stage] = replica
        return replica

    def drop_stale(self) -> None:
        """Delete the stale copies. The open steps must be complete: until then they may be needed."""
        for stage in self._stale_stages:
            del self._state.replicas[stage]
        self._stale_stages = set()

    async def _try_eager_forward(self, step: int, idle_s: float) -> bool:
        """Run the forward of a replica for a micro-batch whose input is here, if the bubble is long enough."""
        if self._tapes is not None and not self._tapes.may_run_forward():
            return False
        for stage, shadow in self.current_shadows.items():
            replica = self._state.replicas[stage]
            if replica.version != step:
                continue
            queue = self._eager_queue(step, shadow, replica)
            if queue:
                g, micro = queue[0]
                inputs = self._stored_input(step, g, micro)
                if inputs is not None and _IDLE_MARGIN * self._eager_forward_s.get(g, 0.0) <= idle_s:
                    queue.popleft()
                    await self._run_eager_forward(step, replica, g, micro, inputs)
                    return True
        return False

    def _eager_queue(self, step: int, shadow: Shadow, replica: StageReplica) -> collections.deque[tuple[int, int]]:
        """The forwards that the source runs in a step and are not run here yet, in the source's order."""
        known = self._eager_queues.get(shadow.stage)
        if known is None or known[0] != step:
            actions = self._plan.workers[shadow.source]
            forwards = [a for a in actions if a.kind is Kind.F and a.segment in replica.segments]
            known = step, collections.deque((action.segment, action.micro or 0) for action in forwards)
            self._eager_queues[shadow.stage] = known
            self.eager_forwards_due += len(known[1])
        return known[1]

    def _stored_input(self, step: int, g: int, micro: int) -> Any:
        """The input of a forward, () for the first segment; None: it is not here."""
        return () if g == 0 else self._state.open_steps[step].outputs.get(f"{g - 1}F{micro}")

    async def _run_eager_forward(self, step: int, replica: StageReplica, g: int, micro: int, inputs: Any) -> None:
        segment, target, samples = replica.segments[g], None, NO_SAMPLES
        began = self._clock.now()
        if g == 0 or segment.is_last:
            batch, target, fetched = load_micro_batch(self._context.job, step, micro, self._state.device)
            inputs = batch if g == 0 else inputs
            samples = SampleDigests(fetched, expected_samples(self._context.job, step, micro))
        copies, launched = self._state.copies, self._context.launched
        on_device = inputs if g == 0 else copies.to_device(inputs)
        values = tuple(value.detach().requires_grad_(value.requires_grad) for value in on_device if value is not None)
        saved = None if self._tapes is None else self._tapes.note_forward(segment)
        with nullcontext() if saved is None else saved.noting():
            outputs, result = segment.forward(step, micro, values, target)
        self._state.stats_for(step, g, segment).record_forward(micro, result, samples)
        self.eager_forwards_run += 1
        name = f"{g}F{micro}"
        if launched is None:
            self._state.keep_output(step, name, outputs)
            await self._context.after_action(step, name)
        else:
            copy = copies.to_host(outputs)
            action = LaunchedAction(
                step=step,
                label=name,
                work=None,
                launched_at=began,
                event=copy.event,
                computed=copy.computed,
                output_name=name,
                output=copy,
                keeps_output=True,
            )
            launched.add(action)
            if self._tapes is not None and saved is not None:
                self._tapes.add(segment, segment.tapes[step, micro], saved)
            await launched.wait_until_complete()
        self._eager_forward_s[g] = self._clock.now() - began


def _may_use_cuda_graphs(compiles: bool | Mapping[str, Any]) -> bool:
    """Whether torch.compile may replay graphs that read saved tensors at fixed addresses."""
    return isinstance(compiles, Mapping) and bool({"mode", "options"} & compiles.keys())


def send_shadow_copies(context: EpochContext) -> None:
    """At the start of an epoch: send the state of a stage run here to each fresh shadow that starts from it."""
    epoch = context.epoch
    for shadow in epoch.shadows:
        if shadow.needs_copy and shadow.source == context.slot:
            state = context.state.replicas[shadow.stage].state
            context.send(shadow.slot, epoch.start, _copy_frame_name(shadow.stage), pack_snapshot(state.snapshot_all()))


def _copy_frame_name(stage: int) -> str:
    return f"state {stage}"
