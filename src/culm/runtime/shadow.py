"""Shadows on this worker: replicas of stages that others run, kept current by the complete sums these send.

All of it is done where the worker would otherwise wait: stepping a replica when its sum has come, taking in the copy
that a fresh shadow starts from and, if the shadow is eager, running the forward of the replica ahead, so that after a
loss only its backward is left to do. A replica is never more than a step behind the layers that are run here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from culm.runtime.building import built
from culm.runtime.data import micro_batch
from culm.runtime.state import Snapshot
from culm.schedule import Kind
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.runtime.closing import Closing
    from culm.runtime.desk import Holding
    from culm.runtime.epoch import Shadow
    from culm.runtime.executor import Executor
    from culm.transport.base import Tensors

_MARGIN = 1.25
"""A bubble must be longer than what is run in it by so much, as no two steps take the same time."""


class Shadows:
    """The replicas of one worker in one epoch."""

    def __init__(self, executor: Executor, closing: Closing, told: Callable[[Shadow], None]) -> None:
        self.executor, self.closing, self.desk = executor, closing, executor.desk
        self.epoch, self._told = executor.epoch, told
        mine = [shadow for shadow in self.epoch.shadows if shadow.slot == executor.slot]
        self.level = {shadow.stage: shadow for shadow in mine if not shadow.fresh}
        self.fresh = {shadow.stage: shadow for shadow in mine if shadow.fresh}
        self.stale = {stage for stage in self.fresh if stage in self.desk.holdings}
        """Copies that nobody counts on any more: new ones come in their place."""
        self._note_lag()
        self.eager_run = self.eager_due = 0
        self._took: dict[int, float] = {}
        """Seconds of the last forward that was run ahead, by segment."""
        self._eager: dict[int, tuple[int, collections.deque[tuple[int, int]]]] = {}

    async def spare(self, step: int, room: float) -> bool:
        """Do one piece of work for a replica while the worker waits in a step; False: there is none.

        `room` is how many seconds it may take if it is nothing that has to be done anyway.
        """
        for stage in (*self.level, *self.fresh):
            if await self._take_copy(stage):
                return True
            holding = self.desk.holdings.get(stage)
            if holding is None or stage in self.stale:
                continue
            if holding.version < step and self._sums_here(holding):
                await self._step(holding)
                return True
        if step < self.epoch.start:  # in a recovery others wait for this worker
            return False
        return self.epoch.eager and await self._run_ahead(step, room)

    async def catch_up(self, step: int) -> None:
        """Until every replica that counts has made all steps before this one."""
        for stage in self.level:
            holding = self.desk.holdings[stage]
            while holding.version < step:
                await self._take_sums(holding)
                await self._step(holding)

    async def follow(self, step: int) -> None:
        """For a worker that runs nothing yet: take the copies, and make all steps up to this one with the sums that
        come for them."""
        for stage in self.fresh:
            if stage not in self.desk.holdings:
                key = Key(self.epoch.number, self.epoch.start, f"state {stage}")
                await self._restore(stage, await self.executor.transport.receive(key))
                await self.executor.clock.work(self.executor.node, self.epoch.start, "copy")
        for stage in (*self.level, *self.fresh):
            holding = self.desk.holdings[stage]
            while holding.version <= step:
                await self._take_sums(holding)
                await self.closing.close(holding.version, [holding], told=())
        self._note_lag()

    def arrive(self, committed: int) -> None:
        """For a worker that runs nothing yet: once its copies have made every step that is committed they count, and
        the next one waits for it. Steps that were open when the copy was made it knows nothing of."""
        behind = [stage for stage in self.fresh if self.desk.holdings[stage].version < committed]
        if committed >= self.epoch.start and not behind:
            for shadow in [*self.fresh.values()]:
                self._counts(shadow)

    async def _take_sums(self, holding: Holding) -> None:
        for g in holding.segments:
            if g not in self.desk.step(holding.version).sums:
                await self.executor.summing.take(holding.version, g)

    async def _step(self, holding: Holding) -> None:
        await self.closing.close(holding.version, [holding], told=())
        self._level(holding)

    def _level(self, holding: Holding) -> None:
        fresh = self.fresh.get(holding.stage)
        if fresh is None:
            return
        self._note_lag()
        ahead = max((h.version for h in self.desk.holdings.values()), default=0)
        if holding.version >= ahead:
            self._counts(fresh)

    def _counts(self, shadow: Shadow) -> None:
        """From here on a copy counts, and no step is reported that it has not made."""
        self.level[shadow.stage] = self.fresh.pop(shadow.stage)
        self._note_lag()
        self._told(shadow)

    def _note_lag(self) -> None:
        """What is known of a step stays as long as a copy on its way has yet to make it."""
        copies = {stage: self.desk.holdings.get(stage) for stage in self.fresh if stage not in self.stale}
        taken = [holding.version for holding in copies.values() if holding is not None]
        awaited = [self.epoch.start] * (len(self.fresh) - len(taken))
        self.desk.lags = min((*taken, *awaited), default=None)

    def _sums_here(self, holding: Holding) -> bool:
        """Take what has come; whether all of it has."""
        version = holding.version
        sums = self.desk.step(version).sums
        return all(g in sums or self.executor.summing.take_arrived(version, g) for g in holding.segments)

    async def _take_copy(self, stage: int) -> bool:
        """A fresh shadow begins with the copy that its source sent."""
        if stage not in self.fresh or stage in self.desk.holdings:
            return False
        frame = self.executor.transport.arrived(Key(self.epoch.number, self.epoch.start, f"state {stage}"))
        if frame is None:
            return False
        self._level(await self._restore(stage, frame))
        return True

    async def _restore(self, stage: int, frame: Tensors) -> Holding:
        executor, epoch, desk = self.executor, self.epoch, self.desk
        place = (executor.plan.stages, stage, desk.device, epoch.start)
        holding = await built(executor.clock, desk.job, epoch.segments, *place)
        holding.state.restore(unpacked(frame))
        desk.holdings[stage] = holding
        return holding

    def drop_stale(self) -> None:
        """The open steps are complete: nobody needs the old copies any more."""
        for stage in self.stale:
            del self.desk.holdings[stage]
        self.stale = set()

    async def _run_ahead(self, step: int, room: float) -> bool:
        """The forward of a replica for a micro-batch whose input lies here, if the bubble is long enough."""
        for stage, shadow in self.level.items():
            holding = self.desk.holdings[stage]
            if holding.version != step:
                continue
            queue = self._queue(step, shadow, holding)
            if queue:
                g, micro = queue[0]
                given = self._input(step, g, micro)
                if given is not None and _MARGIN * self._took.get(g, 0.0) <= room:
                    queue.popleft()
                    await self._forward(step, holding, g, micro, given)
                    return True
        return False

    def _queue(self, step: int, shadow: Shadow, holding: Holding) -> collections.deque[tuple[int, int]]:
        """What the source runs forward in a step, in its order."""
        known = self._eager.get(shadow.stage)
        if known is None or known[0] != step:
            actions = self.executor.plan.workers[shadow.source]
            forwards = [a for a in actions if a.kind is Kind.F and a.segment in holding.segments]
            known = step, collections.deque((action.segment, action.micro or 0) for action in forwards)
            self._eager[shadow.stage] = known
            self.eager_due += len(known[1])
        return known[1]

    def _input(self, step: int, g: int, micro: int) -> Any:
        return () if g == 0 else self.desk.step(step).outputs.get(f"{g - 1}F{micro}")

    async def _forward(self, step: int, holding: Holding, g: int, micro: int, given: Any) -> None:
        segment, target = holding.segments[g], None
        began = self.executor.clock.now()
        if g == 0 or segment.last:
            made, target = micro_batch(self.executor.job, step, micro, self.desk.device)
            given = made if g == 0 else given
        values = tuple(value.detach().requires_grad_(value.requires_grad) for value in given)
        outputs, outcome = segment.forward(step, micro, values, target)
        self.desk.book(step, g, segment).note(micro, outcome)
        self.desk.keep(step, f"{g}F{micro}", tuple(value.cpu() for value in outputs))
        self.eager_run += 1
        await self.executor.clock.work(self.executor.node, step, f"{g}F{micro}")
        self._took[g] = self.executor.clock.now() - began


def send_copies(executor: Executor) -> None:
    """At the start of an epoch: each fresh shadow of a stage that is run here gets the state it starts from."""
    epoch = executor.epoch
    for shadow in epoch.shadows:
        if shadow.fresh and shadow.source == executor.slot:
            holding = executor.desk.holdings[shadow.stage]
            key = Key(epoch.number, epoch.start, f"state {shadow.stage}")
            executor.transport.send(epoch.address(shadow.slot), key, packed(holding.state.whole()))


def packed(snapshot: Snapshot) -> list[Tensor]:
    """A snapshot as a frame: the names as bytes, then copies of the tensors in their order."""
    copied = snapshot.copy()
    parts = [list(copied.parameters), list(copied.buffers), list(copied.moments), copied.scalars]
    names = torch.frombuffer(bytearray(msgspec.msgpack.encode(parts)), dtype=torch.uint8)
    return [names, *copied.parameters.values(), *copied.buffers.values(), *copied.moments.values()]


def unpacked(frame: Tensors) -> Snapshot:
    values = iter([value for value in frame if value is not None])
    parts = msgspec.msgpack.decode(next(values).numpy().tobytes())
    parameters, buffers, moments = ({name: next(values) for name in names} for names in parts[:3])
    return Snapshot(parameters, buffers, moments, parts[3])
