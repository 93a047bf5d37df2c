"""Hand-off: a worker whose node got a preemption notice gives its gradient sums and kept outputs to those that stay.

The leaving worker completes its actions of the epoch and sends everything. Each staying worker receives it in the
background and reports to the leader when it has all of it. From then on the leaving nodes may end at any moment.

All of this happens while open steps are replayed (`replay`). Steps that begin later never call this module.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from culm.errors import EpochClosed
from culm.plan.recover.recovery_plan import required_tensor
from culm.runtime.grad_reduce import reduced_frame_name, split_sum_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from culm.plan.recover.recovery_plan import RecoveryTransfers
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.grad_reduce import SegmentGradientReducer
    from culm.transport.interface import FrameKey, Tensors


async def send_partial_sums(context: EpochContext, step: int) -> None:
    """On a leaving worker that has completed its actions of a step: send its gradient sums to their recipients.

    A sum that was sent is cleared here. So no gradient is in two sums, whatever happens to this worker.
    """
    recovery = context.epoch.recovery
    for sum_step, g, sender, receiver in recovery.partial_sum_transfers:
        if (sum_step, sender) == (step, context.slot):
            await context.state.stats_for(step, g, context.segment(g)).read_device(context.state.copies)
            _send_partial_sum(context, step, g, receiver)


def _send_partial_sum(context: EpochContext, step: int, g: int, receiver: int) -> None:
    add_handed_off_sums(context, step, g)
    segment = context.segment(g)
    stats = context.state.stats_for(step, g, segment)
    totals = [layer.accumulator.copy_total_to_cpu() for layer in segment.layers if layer.trainable]
    frame = [*totals, stats.metadata(), *stats.statistics_template()]
    context.send(receiver, step, _partial_sum_name(g, context.slot), frame)
    context.state.discard(step, g)


def add_handed_off_sums(context: EpochContext, step: int, g: int) -> None:
    """Add the sums that other workers handed off to this worker's own."""
    segment = context.segment(g)
    stats = context.state.stats_for(step, g, segment)
    trained = [layer.accumulator for layer in segment.layers if layer.trainable]
    for part in context.state.take_handed_off_sums(step, g):
        for accumulator, total in zip(trained, part.totals, strict=True):
            accumulator.add_total(total)
        stats.add_metadata(part.metadata)


def store_partial_sum(context: EpochContext, step: int, g: int, frame: Tensors) -> None:
    """Store the sum that a leaving worker sent. From now on it counts as this worker's own."""
    gradient_sum, statistics_template = split_sum_frame(context, g, frame)
    context.state.stats_for(step, g, context.segment(g)).load_statistics_template(statistics_template)
    context.state.add_handed_off_sum(step, g, gradient_sum)


class HandoffReceiver:
    """Receives what leaving workers send to this one. Exists only in an epoch in which a node leaves.

    It is the source of input frames for the replay: a frame from a leaving worker is stored in the worker state as
    soon as it arrives; every other frame comes from the transport.
    """

    def __init__(
        self,
        context: EpochContext,
        reducer: SegmentGradientReducer,
        transfers: RecoveryTransfers,
        on_complete: Callable[[], None],
    ) -> None:
        """`on_complete` is called once, when everything has arrived."""
        self._context, self._reducer = context, reducer
        self._state, self._transport = context.state, context.transport
        self._frame_tasks = {
            key: asyncio.create_task(self._receive_and_store(key)) for key in set(_expected_frames(context, transfers))
        }
        self._notify_task = asyncio.create_task(self._notify_when_complete(on_complete))

    def try_receive(self, key: FrameKey) -> Tensors | None:
        """See FrameSource."""
        task = self._frame_tasks.get(key)
        if task is None:
            return self._transport.try_receive(key)
        return task.result() if task.done() else None

    async def receive(self, key: FrameKey) -> Tensors:
        """See FrameSource."""
        task = self._frame_tasks.get(key)
        return await (self._transport.receive(key) if task is None else task)

    async def receive_reduced_gradient(self, step: int, g: int) -> None:
        """Wait until the complete sum of a segment is stored, whether a leaving or a staying worker sends it."""
        task = self._frame_tasks.get(self._context.frame_key(step, reduced_frame_name(g)))
        if task is None:
            await self._reducer.receive_reduced_gradient(step, g)
        else:
            await task

    async def wait_for_partial_sums(self, step: int, g: int) -> None:
        """Wait until all sums that are handed to this worker for a segment are stored."""
        context = self._context
        recovery = context.epoch.recovery
        for sum_step, segment, sender, receiver in recovery.partial_sum_transfers:
            if (sum_step, segment, receiver) == (step, g, context.slot):
                await self._frame_tasks[context.frame_key(step, _partial_sum_name(g, sender))]

    def close(self) -> None:
        """Stop receiving. Called when the epoch ends."""
        for task in (*self._frame_tasks.values(), self._notify_task):
            task.cancel()

    async def _receive_and_store(self, key: FrameKey) -> Tensors:
        """Receive one frame. It is stored before anything else can run: the epoch may end at any moment."""
        frame = await self._transport.receive(key)
        kind, _, rest = key.name.partition(" ")
        if kind == "part":
            store_partial_sum(self._context, key.step, int(rest.split()[0]), frame)
        elif kind == "sum":
            self._store_complete_sum(key.step, int(rest), frame)
        else:
            self._state.keep_output(key.step, key.name, frame)
        return frame

    def _store_complete_sum(self, step: int, g: int, frame: Tensors) -> None:
        """Store a complete sum. It may arrive while its layers have not made the step before it: their accumulators
        then keep the bounds of that step."""
        replica = self._context.replica_of(g)
        accumulators = [layer.accumulator for layer in replica.segments[g].layers]
        bounds = [(each, each.bound, each.is_finite) for each in accumulators] if replica.version != step else []
        self._reducer.store_received_gradient(step, g, frame)
        for accumulator, bound, is_finite in bounds:
            accumulator.set_bound(bound, is_finite=is_finite)

    async def _notify_when_complete(self, on_complete: Callable[[], None]) -> None:
        with contextlib.suppress(EpochClosed):
            await asyncio.gather(*self._frame_tasks.values())
            on_complete()


def _expected_frames(context: EpochContext, transfers: RecoveryTransfers) -> Iterator[FrameKey]:
    """The keys of the frames that leaving workers send to this one."""
    epoch, slot, plan = context.epoch, context.slot, context.plan
    recovery = epoch.recovery
    for step, action, _ in recovery.tasks_of(slot) if recovery.steps else ():
        needs = required_tensor(action, plan.segments)
        if needs is not None and transfers.source_of(step, needs, slot) in epoch.leaving_slots:
            yield context.frame_key(step, str(needs))
    for step, g, sender in recovery.complete_sums:
        if sender in epoch.leaving_slots and slot in recovery.slots_missing_sum(step, g % plan.stages):
            yield context.frame_key(step, reduced_frame_name(g))
    for step, g, sender, receiver in recovery.partial_sum_transfers:
        if receiver == slot:
            yield context.frame_key(step, _partial_sum_name(g, sender))


def _partial_sum_name(g: int, sender: int) -> str:
    return f"part {g} of {sender}"
