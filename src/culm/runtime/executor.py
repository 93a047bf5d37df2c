"""The interpreter of plans: one loop for all schedules.

A worker's list of actions is compiled once per epoch (`compiled_ops`); each step runs the compiled list. Frames are
received in the background, so the loop waits only where the schedule has a bubble.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from culm.runtime.compiled_ops import CompiledOp, compile_ops
from culm.runtime.compute.batch_loading import (
    NO_SAMPLES,
    Activations,
    MicroBatchPrefetcher,
    SampleDigests,
    expected_samples,
)
from culm.runtime.compute.device import activate_device
from culm.runtime.launched_actions import LaunchedAction
from culm.schedule import Kind
from culm.schedule.action import WEIGHT_GRAD_KINDS
from culm.transport.interface import FrameKey, Tensors

if TYPE_CHECKING:
    from culm.runtime.compute.segment import Segment
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.grad_reduce import SegmentGradientReducer
    from culm.runtime.shadow_replicas import ShadowReplicas
    from culm.transport.interface import FrameSource

_WAIT_HISTORY_STEPS = 6
"""Number of past steps whose waits are remembered per frame. A bubble that was too short once is not used for that
many steps."""
_YIELD_S = 0.02
"""Longest time that the loop runs without yielding to the event loop, which delivers control messages."""


class Executor:
    """Runs the actions of one epoch on one worker, and hands each reduce to the gradient reducer."""

    def __init__(
        self, context: EpochContext, reducer: SegmentGradientReducer, shadows: ShadowReplicas | None = None
    ) -> None:
        """`shadows`: the shadow replicas that are updated while the worker waits for a frame; None: there are none."""
        self._reducer, self._shadows = reducer, shadows
        self._state, self._segments = context.state, context.segments
        self._transport, self._clock, self._node = context.transport, context.clock, context.node
        self._plan, self._epoch_number = context.plan, context.epoch.number
        self._keeps_outputs, self._copies = context.epoch.keeps_outputs, context.state.copies
        self._launched = context.launched
        self._ops = compile_ops(context.plan, context.epoch, context.slot, context.segments)
        self._shared_segments = {
            g for g in range(self._plan.segments) if context.epoch.shadows or len(self._plan.holders_of(g)) > 1
        }
        """Segments whose layers other workers hold, too."""
        self._prefetcher = MicroBatchPrefetcher(
            context.job, context.state.device, self._clock, _input_micro_batches(self._ops), self._copies
        )
        self._compiles = bool(context.job.compile)
        self._compiled_segments: list[Segment] = []
        """Segments that have run a forward in this epoch."""
        self._compiling = False
        self._waits_for_loader = False
        self.current_action: tuple[int, CompiledOp] | None = None
        """(step, action) of the action that computes; after an exception: of the one that raised it."""
        self.actions_done = 0
        """Number of actions run. It grows as long as the worker makes progress (see `Heartbeat`)."""
        self.slowest_action_s = 0.0
        self.peak_tapes = 0
        self.waited_s = 0.0
        self._local_outputs: dict[str, Activations | Tensors] = {}
        self._last_yield = self._clock.now()
        self._wait_history: dict[str, collections.deque[float]] = {}
        """By frame name: the length of the wait for it in each of the last steps."""

    @property
    def progress(self) -> tuple[int, float]:
        """(number of complete actions, seconds of the slowest one) in this epoch. While a layer is being built or
        compiled, NCCL connects, or a loader process has its own limit, every call counts as one more action."""
        is_building = self._shadows is not None and self._shadows.is_building
        self.actions_done += self._compiling or self._waits_for_loader or is_building or self._reducer.is_connecting
        if self._launched is None:
            return self.actions_done, self.slowest_action_s
        return self.actions_done + self._launched.actions_done, self._launched.slowest_action_s

    def close(self) -> None:
        """End the loader processes of this epoch, and send nothing any more."""
        self._prefetcher.close()
        if self._launched is not None:
            self._launched.close()

    async def wait_until_complete(self) -> None:
        """Wait until the actions that were launched are complete, and their outputs are kept and sent."""
        if self._launched is not None:
            await self._launched.wait_until_complete()

    async def run_step(self, step: int) -> None:
        """Run all actions of a step up to the optimizer step. Afterwards the reduced gradients of all segments run
        here are complete, and their totals are in the worker state."""
        self._local_outputs.clear()
        self._prefetcher.start_step(step)
        for g, segment in self._segments.items():
            self._state.stats_for(step, g, segment)
        self._transport.set_computing(True)
        try:
            for op in self._ops:
                if op.action.kind is Kind.S:
                    break
                await self.run_action(step, op, self._transport)
        finally:
            self._transport.set_computing(False)
        await self.wait_until_complete()
        await self._reducer.wait_until_reduced(step, self._segments)

    async def run_action(self, step: int, op: CompiledOp, frames: FrameSource) -> None:
        """Run one action: wait for its input, compute, and send its output. `frames`: where input frames come from."""
        micro = op.action.micro
        kind = op.action.kind
        if kind is Kind.R:
            g = op.action.segment
            await self._reducer.start_reduce(step, g, self._plan.holders_of(g))
            return
        assert micro is not None
        start = self._clock.now()
        if start - self._last_yield > _YIELD_S:
            await asyncio.sleep(0)
            self._last_yield = start
        if self._launched is not None:
            await self._launched.wait_for_room()
        inputs = await self._receive_inputs(step, op, frames)
        if kind is Kind.F and op.reads_data and self._prefetcher.must_wait(step, micro):
            self.current_action = step, op
            await self._wait_for_loader(step, micro)
        start = self._clock.now()
        self.current_action = step, op
        outputs: Sequence[Tensor | None] = ()
        was_compiled = kind is Kind.F and self._compiles and op.segment not in self._compiled_segments
        if was_compiled:
            outputs = await self._compile_and_run_forward(step, micro, op, inputs)
        elif kind is Kind.F:
            outputs = self._forward(step, micro, op, inputs)
        elif kind is Kind.B:
            outputs = op.segment.backward(step, micro, inputs)
        elif kind is Kind.I:
            outputs = op.segment.backward_input(step, micro, inputs)
        else:
            op.segment.backward_weight(step, micro)
        self._clock.during_action(self._node, step, op.label)
        self.current_action = None
        if kind in (Kind.B, Kind.W):
            self._state.stats_for(step, op.action.segment, op.segment).count_backward(
                micro, op.segment.take_additions()
            )
        if self._launched is not None:
            self._register_launch(step, op, outputs, self._clock.now() if was_compiled else start)
            op.segment.free_last_tape()
            await self._clock.after_action(self._node, step, f"launch {op.label}")
            return
        await self._send_output(step, op, outputs)
        op.segment.free_last_tape()
        end = self._clock.now()
        self._state.spans.append((step, op.label, start, end))
        self._state.open_step(step).record_work(op.work_name, end - start)
        self.actions_done += 1
        if not was_compiled:
            self.slowest_action_s = max(self.slowest_action_s, end - start)

    @property
    def failed_action(self) -> tuple[int, str] | None:
        """After an exception: (step, action) of the action that raised it; None: no action was computing."""
        if self.current_action is None:
            return None
        step, op = self.current_action
        return step, op.label

    def discard_failed_action(self) -> tuple[int, str] | None:
        """After an exception: discard what the action that raised it has left half done. Returns (step, action); None:
        no action was computing."""
        if self.current_action is None:
            return None
        step, op = self.current_action
        clears_sum = op.action.kind in WEIGHT_GRAD_KINDS and not op.output_only
        if op.action.micro is not None:
            self._state.discard_action(step, op.action.segment, op.action.micro, clears_sum=clears_sum)
        return step, op.label

    async def _compile_and_run_forward(self, step: int, micro: int, op: CompiledOp, inputs: Activations) -> Activations:
        """The first F of a compiled segment. It runs in a thread: it compiles, and a worker that sends no heartbeat for
        that long is taken for hung. A caller that is cancelled waits for the thread, which changes the tapes."""
        self._compiled_segments.append(op.segment)
        self._compiling = True
        running = asyncio.ensure_future(self._clock.run_in_thread(self._forward_in_thread, step, micro, op, inputs))
        running.add_done_callback(lambda task: task.cancelled() or task.exception())  # a cancelled caller reads neither
        try:
            return await asyncio.shield(running)
        finally:
            await asyncio.wait([running])
            self._compiling = False

    async def _wait_for_loader(self, step: int, micro: int) -> None:
        """Wait for a loader process, in a thread. Job.loader_timeout is the limit: until then the heartbeats report
        progress. A caller that is cancelled ends the loaders, and waits for the thread, which uses them."""
        waiting = asyncio.ensure_future(self._clock.run_in_thread(self._prefetcher.wait, step, micro))
        waiting.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._waits_for_loader = True
        try:
            await asyncio.shield(waiting)
        finally:
            if not waiting.done():
                self._prefetcher.interrupt_wait()
                await asyncio.wait([waiting])
            self._waits_for_loader = False

    async def _receive_inputs(self, step: int, op: CompiledOp, frames: FrameSource) -> Any:
        """The input tensors of an action: from a frame, or from an earlier action of this worker."""
        if op.input_frame is not None:
            key = FrameKey(self._epoch_number, step, op.input_frame)
            frame = frames.try_receive(key)
            if frame is None:
                frame = await self._wait_for_frame(step, key, frames)
            return self._copies.to_device(frame)
        if op.local_input is None:
            return ()
        local = self._local_outputs.pop(op.local_input, None)
        if local is not None:
            return local
        if self._launched is not None:
            await self._launched.wait_until_complete()  # an earlier action of this worker may be about to keep it
        return self._copies.to_device(self._state.open_step(step).outputs[op.local_input])

    async def _wait_for_frame(self, step: int, key: FrameKey, frames: FrameSource) -> Tensors:
        """Wait for a frame. Until it arrives, use the bubble for work that has to be done anyway."""
        began = self._clock.now()
        if self._keeps_outputs:
            for replica in self._state.replicas.values():
                replica.save_weights_early()
        last_checked = began  # the frame had not arrived at this time
        while await self._use_idle_time(step, self._expected_wait_s(key.name) - (last_checked - began)):
            frame = frames.try_receive(key)
            if frame is not None:
                self._record_wait(key.name, last_checked - began)
                self.waited_s += self._clock.now() - began
                return frame
            last_checked = self._clock.now()
        frame = await frames.receive(key)
        self._last_yield = self._clock.now()
        self.waited_s += self._last_yield - began
        self._record_wait(key.name, self._last_yield - began)
        return frame

    async def _use_idle_time(self, step: int, idle_s: float) -> bool:
        """Load a micro-batch in advance or update a shadow replica, if that takes at most `idle_s` seconds. False: no
        work was done."""
        if self._prefetcher.prefetch(idle_s):
            return True
        return self._shadows is not None and await self._shadows.run_idle_work(step, idle_s)

    def _expected_wait_s(self, name: str) -> float:
        """The shortest recent wait for a frame, in seconds. Optional work that takes longer could delay the step.
        Negative for a frame that was never waited for."""
        return min(self._wait_history.get(name, (-1.0,)))

    def _record_wait(self, name: str, seconds: float) -> None:
        self._wait_history.setdefault(name, collections.deque(maxlen=_WAIT_HISTORY_STEPS)).append(seconds)

    def _forward_in_thread(self, step: int, micro: int, op: CompiledOp, inputs: Activations) -> Activations:
        activate_device(self._state.device)
        return self._forward(step, micro, op, inputs)

    def _forward(self, step: int, micro: int, op: CompiledOp, inputs: Activations) -> Activations:
        target, samples = None, NO_SAMPLES
        is_first = op.action.segment == 0
        if is_first or op.segment.is_last:
            batch, target, fetched = self._prefetcher.take(step, micro)
            inputs = batch if is_first else inputs
            samples = SampleDigests(fetched, expected_samples(self._state.job, step, micro))
        outputs, result = op.segment.forward(step, micro, inputs, target, splits_backward=op.splits_backward)
        if op.action.segment in self._shared_segments:
            for layer in op.segment.layers:
                layer.guard.check_weights()
        if not op.output_only:
            self._state.stats_for(step, op.action.segment, op.segment).record_forward(micro, result, samples)
            self.peak_tapes = max(self.peak_tapes, sum(len(s.tapes) for s in self._segments.values()))
        return outputs

    def _register_launch(self, step: int, op: CompiledOp, values: Sequence[Tensor | None], began: float) -> None:
        """Queue the copy of an output to the host behind its action. It is kept and sent when it is complete."""
        assert self._launched is not None
        name = op.output_name
        if name is not None and op.keep_local:
            self._local_outputs[name] = tuple(values)
        if name is None or not (op.target_addresses or self._keeps_outputs):
            event = self._copies.compute_event()
            action = LaunchedAction(
                step=step, label=op.label, work=op.work_name, launched_at=began, event=event, computed=event
            )
            self._launched.add(action)
            return
        output = self._copies.to_host(values)
        action = LaunchedAction(
            step=step,
            label=op.label,
            work=op.work_name,
            launched_at=began,
            event=output.event,
            computed=output.computed,
            output_name=name,
            output=output,
            keeps_output=self._keeps_outputs,
            target_addresses=op.target_addresses,
        )
        self._launched.add(action)

    async def _send_output(self, step: int, op: CompiledOp, values: Sequence[Tensor | None]) -> None:
        """Send an output to the workers that need it. Keep it, too, where a recovery may need it until the commit."""
        if op.output_name is None or not (op.target_addresses or op.keep_local or self._keeps_outputs):
            await self._clock.after_action(self._node, step, op.label)
            return
        if op.keep_local:
            self._local_outputs[op.output_name] = tuple(values)
        frame = tuple(values)
        if self._keeps_outputs:
            self._state.keep_output(step, op.output_name, frame)
        await self._clock.after_action(self._node, step, op.label)
        for address in op.target_addresses:
            self._transport.send(address, FrameKey(self._epoch_number, step, op.output_name), frame)


def _input_micro_batches(ops: Iterable[CompiledOp]) -> list[int]:
    """The micro-batches whose input or target the compiled list needs, in its order."""
    return [op.action.micro for op in ops if op.reads_data and op.action.micro is not None]
