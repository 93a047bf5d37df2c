"""R: sum a segment's gradients over the workers that run it, and send the result to the workers that only hold it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from culm.plan.rent.memory_model import SUM_BUCKET_BYTES
from culm.runtime.worker_state import GradientSum
from culm.transport.interface import Group

if TYPE_CHECKING:
    from culm.device.streams import DeviceEvent
    from culm.runtime.epoch_context import EpochContext
    from culm.transport.interface import Tensors

_ROOM_FOR_SUMS = 4
"""Sums stay on their device where it has room for this many times their size: those of two open steps, and as much
again."""
ReduceFunction: TypeAlias = Callable[[int, int, tuple[int, ...]], Coroutine[Any, Any, None]]
"""(step, segment, slots of the runners) -> a coroutine that completes the reduced gradient."""


class SegmentGradientReducer:
    """Reduces the gradients of one worker in one epoch. Reduces run as tasks, beside the actions of the step."""

    def __init__(self, context: EpochContext) -> None:
        self._context = context
        self._state, self._epoch, self._slot = context.state, context.epoch, context.slot
        self._plan, self._transport, self._copies = context.plan, context.transport, context.state.copies
        self._groups: dict[tuple[int, tuple[int, ...]], Group] = {}
        """By segment and slots of its runners."""
        self._reduce_tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        """By step and segment."""
        self._sending: set[asyncio.Task[None]] = set()
        self._stays_on_device: dict[int, bool] = {}
        """By segment: whether there is room for its sums. Decided once."""

    async def join_groups(self) -> None:
        """Create a group with the runners of each segment: those of the plan and, where they differ, those of the
        recovery. Returns when all members have joined."""
        context, recovery = self._context, self._epoch.recovery
        wanted = {(g, self._plan.holders_of(g)) for g in context.segments}
        for runners_by_segment in recovery.runners.values():
            wanted |= {(g, runners) for g, runners in enumerate(runners_by_segment) if self._slot in runners}
        sums = self._copies.sums if self._epoch.reduces_on_devices else None
        for g, runners in sorted(wanted):
            members = [self._epoch.address(slot) for slot in runners]
            name = f"group {g} of {','.join(map(str, runners))}"
            self._groups[g, runners] = self._transport.group(context.frame_key(0, name), members, sums)
        if sums is None:
            await asyncio.gather(*(group.join() for group in self._groups.values()))
            return
        for group in self._groups.values():  # one at a time, at all workers in the same order: NCCL connects in threads
            await group.join()
        sums.kept.abort_rest()

    @property
    def is_connecting(self) -> bool:
        """Whether a group connects: NCCL takes seconds the first time."""
        return any(group.is_connecting for group in self._groups.values())

    def describe_groups(self) -> tuple[str, str]:
        """(what makes the sums, why they are not made on the devices); empty where no other worker takes part."""
        shared = [group for (_, runners), group in self._groups.items() if len(runners) > 1]
        libraries = sorted({group.library for group in shared})
        return ", ".join(libraries), next((g.fallback_reason for g in shared if g.fallback_reason), "")

    def close(self) -> None:
        """Cancel all reduces and leave the groups. Called when the epoch ends."""
        for task in (*self._reduce_tasks.values(), *self._sending):
            task.cancel()
        for group in self._groups.values():
            group.close()

    async def start_reduce(
        self, step: int, g: int, runners: tuple[int, ...], reduce: ReduceFunction | None = None
    ) -> None:
        """Start to reduce a segment's gradient over its runners, as a task; `wait_until_reduced` waits for it.

        `reduce`: what the task runs instead of `self.reduce`. A recovery uses it to add handed-off sums first.
        """
        await self._context.after_action(step, f"{g}R")
        self._reduce_tasks[step, g] = asyncio.create_task((reduce or self.reduce)(step, g, runners))
        if len(runners) > 1:
            await asyncio.sleep(0)  # lets the task start its first bucket

    async def wait_until_reduced(self, step: int, segments: Iterable[int]) -> None:
        """Wait until the reduces that were started for these segments are complete."""
        for g in segments:
            await self._reduce_tasks.pop((step, g))

    async def reduce(self, step: int, g: int, runners: tuple[int, ...]) -> None:
        """Complete the sum of a segment, and send it to the shadows that this worker is the source of.

        The all-reduce works on copies: an accumulator holds this worker's own sum or the complete one, never anything
        between, so that a reduce that fails can be repeated.
        """
        segment = self._context.segment(g)
        stats = self._state.stats_for(step, g, segment)
        for layer in segment.layers:
            layer.accumulator.collect_grads()
        totals = [layer.accumulator.total for layer in segment.layers if layer.trainable]
        await stats.read_device(self._copies)
        metadata = stats.metadata()
        if len(runners) > 1:
            reduced = await self._all_reduce(self._groups[g, runners], g, totals, metadata)
        else:
            reduced = self._copy_sums(g, totals, metadata)
        self._state.open_steps[step].loaded_segments.add(g)
        self._store_reduced(step, g, reduced)
        self.send_reduced_gradient(step, g, self._receiver_slots(step, g, runners))

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # of the device, which the next wait for it raises, too

    def _copy_sums(self, g: int, totals: Sequence[Tensor], metadata: Tensor) -> GradientSum:
        """What is kept of a sum that only this worker has a part in. The totals are divided in place later."""
        return self._keep(g, [total.clone() for total in totals] if self._epoch.keeps_outputs else [], metadata)

    def _keep(self, g: int, sums: Sequence[Tensor], metadata: Tensor) -> GradientSum:
        """What is kept of a complete sum that was made here, and that nobody changes any more. It stays on the device
        if there is room: only a recovery needs it elsewhere."""
        if not self._epoch.keeps_outputs:
            return GradientSum([], metadata)
        if self._copies.is_synchronous:
            return GradientSum(list(sums), metadata)
        kept = GradientSum(list(sums), metadata, on_device=True)
        if g not in self._stays_on_device:
            self._stays_on_device[g] = self._copies.has_room(_ROOM_FOR_SUMS * kept.nbytes)
        return kept if self._stays_on_device[g] else self._queue_copies(kept)

    def _queue_copies(self, kept: GradientSum) -> GradientSum:
        """Copy sums to host memory, for which the step does not wait."""
        copy = self._copies.to_host(kept.totals, later=True)
        return GradientSum([value for value in copy.tensors if value is not None], kept.metadata, copy.event)

    async def _all_reduce(self, group: Group, g: int, totals: Sequence[Tensor], metadata: Tensor) -> GradientSum:
        """Replace `totals` and `metadata` by the sums over all runners, without a wait between the first and the last.
        Returns what is kept of them."""
        buckets = list(_buckets(totals))
        copies = [torch.cat([t.reshape(-1) for t in bucket]) for bucket in buckets]
        if group.on_device:
            (summed,) = self._copies.to_device((metadata.clone(),))  # it is replaced by its sum below
            assert summed is not None
            await group.all_reduce(*copies, summed)
            sums, on_host = _parts(copies, buckets), self._copies.to_host([summed])
            kept = self._keep(g, sums, metadata)
            await on_host.event.wait()
            assert on_host.tensors[0] is not None
            metadata.copy_(on_host.tensors[0])
        else:
            on_host_copies = await self._copies.read(copies)
            await group.all_reduce(*on_host_copies, metadata)
            kept = GradientSum(_parts(on_host_copies, buckets), metadata)
            sums = [value for value in self._copies.to_device(tuple(kept.totals)) if value is not None]
        for total, value in zip(totals, sums, strict=True):
            total.copy_(value)
        return kept

    def _receiver_slots(self, step: int, g: int, runners: tuple[int, ...]) -> list[int]:
        """The slots that hold a segment without running it, and get its reduced gradient from this worker."""
        stage, recovery = g % self._plan.stages, self._epoch.recovery
        if step in recovery.steps:
            others = [slot for slot in recovery.slots_missing_sum(step, stage) if slot not in runners]
            return others if runners[0] == self._slot else []
        return [s.slot for s in self._epoch.shadows if s.source == self._slot and s.stage == stage]

    def _store_reduced(self, step: int, g: int, gradient_sum: GradientSum) -> None:
        """Store the totals of a complete sum and, where outputs are kept until the commit, the sum itself."""
        open_step = self._state.open_steps[step]
        stats = self._state.stats_for(step, g, self._context.segment(g))
        open_step.segment_totals[g] = stats.read_totals(gradient_sum.metadata, self._epoch.dropped_in(step))
        if self._epoch.keeps_outputs:
            open_step.reduced_gradients[g] = gradient_sum

    def send_reduced_gradient(self, step: int, g: int, slots: Sequence[int]) -> None:
        """Send a complete sum to other holders of the segment, once it is in host memory. Nothing here waits for
        that."""
        if not slots:
            return
        sums = self._state.open_steps[step].reduced_gradients
        if sums[g].on_device:
            sums[g] = self._queue_copies(sums[g])
        stats = self._state.stats_for(step, g, self._context.segment(g))
        # Now: the step may be committed before the frame is sent.
        frame = [*sums[g].totals, sums[g].metadata, *stats.statistics_template()]
        if sums[g].event.is_complete():
            self._send_sum(step, g, slots, frame)
            return
        sending = asyncio.create_task(self._send_when_copied(step, g, slots, frame, sums[g].event))
        self._sending.add(sending)
        sending.add_done_callback(self._on_sent)

    async def _send_when_copied(
        self, step: int, g: int, slots: Sequence[int], frame: Sequence[Tensor], copied: DeviceEvent
    ) -> None:
        await copied.wait()
        self._send_sum(step, g, slots, frame)

    def _send_sum(self, step: int, g: int, slots: Sequence[int], frame: Sequence[Tensor]) -> None:
        for slot in slots:
            self._context.send(slot, step, reduced_frame_name(g), frame)

    def send_missing_gradients(self, step: int) -> None:
        """In a recovery: send the complete sums that this worker was chosen to send to all holders that lack them."""
        recovery, stages = self._epoch.recovery, self._plan.stages
        for sum_step, g, sender in recovery.complete_sums:
            if sum_step == step and sender == self._slot:
                missing = recovery.slots_missing_sum(step, g % stages)
                self.send_reduced_gradient(step, g, [slot for slot in missing if slot != self._slot])

    async def receive_reduced_gradient(self, step: int, g: int) -> None:
        """Wait for the complete sum of a segment from a worker that has it, and store it."""
        key = self._context.frame_key(step, reduced_frame_name(g))
        self.store_received_gradient(step, g, await self._transport.receive(key))

    def try_receive_reduced_gradient(self, step: int, g: int) -> bool:
        """Store a complete sum if it has arrived; False: it has not."""
        frame = self._transport.try_receive(self._context.frame_key(step, reduced_frame_name(g)))
        if frame is not None:
            self.store_received_gradient(step, g, frame)
        return frame is not None

    def store_received_gradient(self, step: int, g: int, frame: Tensors) -> None:
        """Store a complete sum that arrived as a frame of `send_reduced_gradient`."""
        gradient_sum, statistics_template = split_sum_frame(self._context, g, frame)
        self._state.stats_for(step, g, self._context.segment(g)).load_statistics_template(statistics_template)
        self._store_reduced(step, g, gradient_sum)


def reduced_frame_name(g: int) -> str:
    """Name of the frame that carries the complete sum of a segment."""
    return f"sum {g}"


def split_sum_frame(context: EpochContext, g: int, frame: Tensors) -> tuple[GradientSum, list[Tensor]]:
    """The sum in a frame (one tensor per trained layer, then the metadata), and the statistics template after it."""
    values = [value for value in frame if value is not None]
    trained = sum(1 for layer in context.segment(g).layers if layer.trainable)
    return GradientSum(values[:trained], values[trained]), values[trained + 1 :]


def _parts(flat: Sequence[Tensor], buckets: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The parts of flat buckets, one for each tensor that was put into them."""
    return [
        part
        for bucket, values in zip(buckets, flat, strict=True)
        for part in values.split([tensor.numel() for tensor in bucket])
    ]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors, grouped up to the bucket size. A tensor larger than that is a bucket alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > SUM_BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
