"""The interpreter of plans: one loop for all schedules.

A worker's list is compiled once an epoch (program). Then each step walks it. Frames are received ahead, so the loop
waits only where the schedule has a bubble.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from culm.plan.recover import Wiring
from culm.runtime.data import Supply, Values
from culm.runtime.program import Op, compiled
from culm.runtime.summing import Summing
from culm.schedule import Kind, Plan
from culm.transport.base import Key, Tensors

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Desk
    from culm.runtime.epoch import Epoch
    from culm.runtime.estate import Inheritance
    from culm.runtime.segment import Segment
    from culm.runtime.shadow import Shadows
    from culm.transport.base import Transport

_WAITS = 6
"""How many steps back a wait is looked at: a bubble that was too short once is left alone for so long."""
_YIELD_S = 0.02
"""How long the loop may run without letting letters in."""


class Executor:
    """Runs the steps of one epoch on one worker."""

    def __init__(self, job: Job, epoch: Epoch, slot: int, desk: Desk, transport: Transport, clock: Clock) -> None:
        self.job, self.epoch, self.slot, self.desk = job, epoch, slot, desk
        self.transport, self.clock = transport, clock
        member = epoch.members[slot]
        assert member is not None
        self.node = member.node
        self.plan = Plan.from_text(epoch.plan)
        self.segments = self._run_here(self.plan.stages_of(slot))
        self.program = compiled(self.plan, epoch, slot, self.segments)
        self._shared = {g for g in range(self.plan.segments) if epoch.shadows or len(self.runners(g)) > 1}
        """Segments whose layers others hold, too."""
        self.supply = Supply(job, desk.device, clock, _fed(self.program))
        self.summing = Summing(epoch, slot, self.plan, desk, transport, clock)
        self.wiring = Wiring(epoch.recovery, self.plan.segments)
        self.shadows: Shadows | None = None
        self.inheritance: Inheritance | None = None
        self.done = 0
        """Actions that were run: whoever waits for nothing more moves this."""
        self.slowest_s = 0.0
        self.tapes_peak = 0
        self.waited_s = 0.0
        self._home: dict[str, Values | Tensors] = {}
        self._yielded = clock.now()
        self._waits: dict[str, collections.deque[float]] = {}
        """By the frame that was waited for: how long, in the last steps."""

    def _run_here(self, stages: Iterable[int]) -> dict[int, Segment]:
        found = {g: segment for stage in stages for g, segment in self.desk.holdings[stage].segments.items()}
        return dict(sorted(found.items()))

    def runners(self, g: int) -> tuple[int, ...]:
        """The slots whose workers add to the sum of a segment."""
        return self.plan.holders_of(g)

    async def join(self) -> None:
        """Meet those that run the same segments."""
        await self.summing.join(self.segments)

    def inherit(self, inheritance: Inheritance) -> None:
        """Somebody leaves: from here on frames and sums may come from its estate."""
        self.inheritance = self.summing.inheritance = inheritance

    def leave(self) -> None:
        """The epoch is over here: nothing of it goes on."""
        self.summing.leave()
        if self.inheritance is not None:
            self.inheritance.close()

    async def step(self, step: int) -> None:
        """Run the list of one step. Afterwards its complete sums are here, settled."""
        self._home.clear()
        self.supply.begin(step)
        for g, segment in self.segments.items():
            self.desk.book(step, g, segment)
        self.transport.busy(True)
        try:
            for op in self.program:
                if op.action.kind is Kind.S:
                    break
                await self.run(step, op)
        finally:
            self.transport.busy(False)
        await self.summing.ended(step, self.segments)

    async def run(self, step: int, op: Op) -> None:
        """One action: wait for what it needs, do it, and hand on what it made."""
        micro = op.action.micro
        kind = op.action.kind
        if kind is Kind.R:
            await self.summing.start(step, op.action.segment, self.plan.holders_of(op.action.segment))
            return
        assert micro is not None
        start = self.clock.now()
        if start - self._yielded > _YIELD_S:
            await asyncio.sleep(0)
            self._yielded = start
        given = await self._given(step, op)
        start = self.clock.now()
        values: Sequence[Tensor | None] = ()
        if kind is Kind.F:
            values = self._forward(step, micro, op, given)
        elif kind is Kind.B:
            values = op.segment.backward(step, micro, given)
        elif kind is Kind.I:
            values = op.segment.backward_input(step, micro, given)
        else:
            op.segment.backward_weight(step, micro)
        if kind in (Kind.B, Kind.W):
            self.desk.book(step, op.action.segment, op.segment).count(micro)
        await self._hand_on(step, op, values)
        op.segment.spent = None
        end = self.clock.now()
        self.desk.spans.append((step, op.label, start, end))
        self.done += 1
        self.slowest_s = max(self.slowest_s, end - start)

    async def _given(self, step: int, op: Op) -> Any:
        """The tensors that an action starts from: from a frame, or left at home by an action of this worker."""
        if op.source is not None:
            key = Key(self.epoch.number, step, op.source)
            found = self.transport.arrived(key) if self.inheritance is None else None
            if found is None:
                found = await self._wait(step, key)
            return placed(found, self.desk.device)
        if op.home is None:
            return ()
        left = self._home.pop(op.home, None)
        return left if left is not None else placed(self.desk.step(step).outputs[op.home], self.desk.device)

    async def _wait(self, step: int, key: Key) -> Tensors:
        """A bubble: do what has to be done anyway, until the frame has come."""
        began = self.clock.now()
        inherited = self.inheritance.get(key) if self.inheritance is not None else None
        if inherited is not None:
            return await inherited
        for holding in self.desk.holdings.values() if self.epoch.kept else ():
            holding.remember_early()
        quiet = began  # until then, at least, the frame had not come
        while await self._spare(step, self._room(key.name) - (quiet - began)):
            found = self.transport.arrived(key)
            if found is not None:
                self._note_wait(key.name, quiet - began)
                self.waited_s += self.clock.now() - began
                return found
            quiet = self.clock.now()
        found = await self.transport.receive(key)
        self._yielded = self.clock.now()
        self.waited_s += self._yielded - began
        self._note_wait(key.name, self._yielded - began)
        return found

    async def _spare(self, step: int, room: float) -> bool:
        """Make a micro-batch ahead or look after a replica, if that takes no longer than the room there is."""
        return self.supply.ahead(room) or (self.shadows is not None and await self.shadows.spare(step, room))

    def _room(self, name: str) -> float:
        """Seconds that a wait for a frame is known to last at the least: what takes longer would hold the step up."""
        return min(self._waits.get(name, (-1.0,)))

    def _note_wait(self, name: str, seconds: float) -> None:
        self._waits.setdefault(name, collections.deque(maxlen=_WAITS)).append(seconds)

    def _forward(self, step: int, micro: int, op: Op, inputs: Values) -> Values:
        target = None
        first = op.action.segment == 0
        if first or op.segment.last:
            fresh, target = self.supply.take(step, micro)
            inputs = fresh if first else inputs
        outputs, outcome = op.segment.forward(step, micro, inputs, target, halves=op.halves)
        if op.action.segment in self._shared:
            for layer in op.segment.layers:
                layer.guard.check_weights()
        if not op.again:
            self.desk.book(step, op.action.segment, op.segment).note(micro, outcome)
            self.tapes_peak = max(self.tapes_peak, sum(len(s.tapes) for s in self.segments.values()))
        return outputs

    async def _hand_on(self, step: int, op: Op, values: Sequence[Tensor | None]) -> None:
        """Keep an output where a recovery may ask for it, and send it where the placement says."""
        if op.name is None or not (op.targets or op.keeps or self.epoch.kept):
            await self.clock.work(self.node, step, op.label)
            return
        if op.keeps:
            self._home[op.name] = tuple(values)
        sent = tuple(None if v is None else v.cpu() for v in values)
        if self.epoch.kept:
            self.desk.keep(step, op.name, sent)
        await self.clock.work(self.node, step, op.label)
        for address in op.targets:
            self.transport.send(address, Key(self.epoch.number, step, op.name), sent)


def _fed(program: Iterable[Op]) -> list[int]:
    """Micro-batches of which a program needs input or target, in its order."""
    forwards = [op for op in program if op.action.kind is Kind.F and (op.action.segment == 0 or op.segment.last)]
    return [op.action.micro for op in forwards if op.action.micro is not None]


def placed(tensors: Tensors, device: torch.device) -> Tensors:
    """A frame where it is computed with."""
    if device.type == "cpu":
        return tensors
    return tuple(
        None if t is None else t.detach().to(device, non_blocking=True).requires_grad_(t.requires_grad) for t in tensors
    )
