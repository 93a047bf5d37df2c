"""The interpreter of plans: one loop for all schedules.

A worker's list of actions is compiled once per epoch (`compiled_ops`); each step runs the compiled list. Frames are
received in the background, so the loop waits only where the schedule has a bubble.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
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
from culm.transport.interface import FrameKey, Tensors

if TYPE_CHECKING:
    from culm.runtime.compute.segment import Segment
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.grad_reduce import SegmentGradientReducer
    from culm.runtime.shadow_replicas import ShadowReplicas
    from culm.transport.interface import FrameSource

_F, _I, _B = Kind.F, Kind.I, Kind.B
"""Looking up a member of an enum takes as long as a call."""
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
        self._ops = _before_optimizer_step(compile_ops(context.plan, context.epoch, context.slot, context.segments))
        self._shared_segments = {
            g for g in range(self._plan.segments) if context.epoch.shadows or len(self._plan.holders_of(g)) > 1
        }
        """Segments whose layers other workers hold, too."""
        self._prefetcher = MicroBatchPrefetcher(
            context.job, context.state.device, self._clock, _input_micro_batches(self._ops), self._copies
        )
        self._uses_idle_time = bool(_input_micro_batches(self._ops)) or shadows is not None
        self._clock_has_hooks = context.clock.has_action_hooks
        self._tapes = [segment.tapes for segment in context.segments.values()]
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
                await self.run_action(step, op, self._transport)
        finally:
            self._transport.set_computing(False)
        await self.wait_until_complete()
        await self._reducer.wait_until_reduced(step, self._segments)

    async def run_action(self, step: int, op: CompiledOp, frames: FrameSource) -> None:
        """Run one action: wait for its input, compute, and send its output. `frames`: where input frames come from.

        Whatever does not change from step to step is in `op`: for a small model this method is most of a step.
        """
        micro = op.micro
        if micro is None:  # R
            await self._reducer.start_reduce(step, op.segment_number, self._plan.holders_of(op.segment_number))
            return
        start = self._clock.now()
        if start - self._last_yield > _YIELD_S:
            await asyncio.sleep(0)
            self._last_yield = start = self._clock.now()
        if self._launched is not None:
            await self._launched.wait_for_room()
            start = self._clock.now()
        inputs = self._take_inputs(step, op, frames)
        if inputs is None:
            inputs = await self._wait_for_inputs(step, op, frames)
            start = self._clock.now()
        if op.reads_data and self._prefetcher.must_wait(step, micro):
            self.current_action = step, op
            await self._wait_for_loader(step, micro)
            start = self._clock.now()
        self.current_action = step, op
        is_compiling = self._compiles and op.kind is _F and op.segment not in self._compiled_segments
        if not is_compiling:
            outputs = self._compute(step, micro, op, inputs)
        else:
            outputs = await self._compile_and_run_forward(step, micro, op, inputs)
        if self._clock_has_hooks:
            self._clock.during_action(self._node, step, op.label)
        self.current_action = None
        if op.adds_to_sum:
            stats = self._state.stats_for(step, op.segment_number, op.segment)
            stats.count_backward(micro, op.segment.take_additions())
        if self._launched is not None:
            self._register_launch(step, op, outputs, self._clock.now() if is_compiling else start)
            op.segment.free_last_tape()
            await self._clock.after_action(self._node, step, f"launch {op.label}")
            return
        if self._clock_has_hooks or self._keeps_outputs or op.is_used:
            await self._send_output(step, op, outputs)
        op.segment.free_last_tape()
        end = self._clock.now()
        self._state.spans.append((step, op.label, start, end))
        self._state.open_steps[step].record_work(op.work_name, end - start)
        self.actions_done += 1
        if end - start > self.slowest_action_s and not is_compiling:
            self.slowest_action_s = end - start

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
        if op.micro is not None:
            clears_sum = op.adds_to_sum and not op.output_only
            self._state.discard_action(step, op.segment_number, op.micro, clears_sum=clears_sum)
        return step, op.label

    def _compute(self, step: int, micro: int, op: CompiledOp, inputs: Any) -> Sequence[Tensor | None]:
        if op.kind is _F:
            return self._forward(step, micro, op, inputs)
        if op.kind is _I:
            return op.segment.backward_input(step, micro, inputs)
        if op.kind is _B:
            return op.segment.backward(step, micro, inputs)
        op.segment.backward_weight(step, micro)
        return ()

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

    def _take_inputs(self, step: int, op: CompiledOp, frames: FrameSource) -> Any:
        """The input tensors of an action, if they are here: from a frame, or from an earlier action of this worker.
        None: `_wait_for_inputs` has to get them."""
        if op.input_frame is not None:
            frame = frames.try_receive(FrameKey(self._epoch_number, step, op.input_frame))
            return None if frame is None else self._copies.to_device(frame)
        return () if op.local_input is None else self._local_outputs.pop(op.local_input, None)

    async def _wait_for_inputs(self, step: int, op: CompiledOp, frames: FrameSource) -> Any:
        """Wait for the frame of an action, or take what an earlier action of this worker has kept for it."""
        if op.input_frame is not None:
            key = FrameKey(self._epoch_number, step, op.input_frame)
            return self._copies.to_device(await self._wait_for_frame(step, key, frames))
        assert op.local_input is not None
        if self._launched is not None:
            await self._launched.wait_until_complete()  # an earlier action of this worker may be about to keep it
        return self._copies.to_device(self._state.open_steps[step].outputs[op.local_input])

    async def _wait_for_frame(self, step: int, key: FrameKey, frames: FrameSource) -> Tensors:
        """Wait for a frame. Until it arrives, use the bubble for work that has to be done anyway."""
        began = self._clock.now()
        if self._keeps_outputs:
            for replica in self._state.replicas.values():
                replica.save_weights_early()
        if self._uses_idle_time:
            frame = await self._use_idle_time(step, key, frames, began)
            if frame is not None:
                self.waited_s += self._clock.now() - began
                return frame
        frame = await frames.receive(key)
        self._last_yield = self._clock.now()
        self.waited_s += self._last_yield - began
        if self._uses_idle_time:
            self._record_wait(key.name, self._last_yield - began)
        return frame

    async def _use_idle_time(self, step: int, key: FrameKey, frames: FrameSource, began: float) -> Tensors | None:
        """Do optional work for as long as the wait for a frame is expected to last. Returns the frame if it arrives
        meanwhile."""
        last_checked = began  # the frame had not arrived at this time
        while await self._run_idle_work(step, self._expected_wait_s(key.name) - (last_checked - began)):
            frame = frames.try_receive(key)
            if frame is not None:
                self._record_wait(key.name, last_checked - began)
                return frame
            last_checked = self._clock.now()
        return None

    async def _run_idle_work(self, step: int, idle_s: float) -> bool:
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
        if op.reads_data:
            batch, target, fetched = self._prefetcher.take(step, micro)
            if op.segment_number == 0:
                inputs = batch
            samples = SampleDigests(fetched, expected_samples(self._state.job, step, micro))
        outputs, result = op.segment.forward(step, micro, inputs, target, splits_backward=op.splits_backward)
        if op.segment_number in self._shared_segments:
            for layer in op.segment.layers:
                layer.guard.check_weights()
        if not op.output_only:
            self._state.stats_for(step, op.segment_number, op.segment).record_forward(micro, result, samples)
            self.peak_tapes = max(self.peak_tapes, sum(map(len, self._tapes)))
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
        name, frame = op.output_name, tuple(values)
        if name is not None and op.keep_local:
            self._local_outputs[name] = frame
        if name is not None and self._keeps_outputs:
            self._state.keep_output(step, name, frame)
        if self._clock_has_hooks:
            await self._clock.after_action(self._node, step, op.label)
        if name is not None:
            for address in op.target_addresses:
                self._transport.send(address, FrameKey(self._epoch_number, step, name), frame)


def _before_optimizer_step(ops: Iterable[CompiledOp]) -> list[CompiledOp]:
    return list(itertools.takewhile(lambda op: op.kind is not Kind.S, ops))


def _input_micro_batches(ops: Iterable[CompiledOp]) -> list[int]:
    """The micro-batches whose input or target the compiled list needs, in its order."""
    return [op.micro for op in ops if op.reads_data and op.micro is not None]
