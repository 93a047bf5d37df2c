"""R: the sums of segments, added up over those that run them, and given to those that only hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.runtime.desk import Sum
from culm.runtime.estate import absorb
from culm.transport.base import Group, Key

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Desk
    from culm.runtime.epoch import Epoch
    from culm.runtime.estate import Inheritance
    from culm.runtime.segment import Segment
    from culm.schedule import Plan
    from culm.transport.base import Tensors, Transport

_BUCKET = 25 << 20
"""Bytes that are added up over the pipelines at once: large enough for the wire, small enough to copy."""


class Summing:
    """The sums of one worker in one epoch."""

    def __init__(self, epoch: Epoch, slot: int, plan: Plan, desk: Desk, transport: Transport, clock: Clock) -> None:
        self.epoch, self.slot, self.plan, self.desk = epoch, slot, plan, desk
        self.transport, self.clock = transport, clock
        member = epoch.members[slot]
        assert member is not None
        self.node = member.node
        self.inheritance: Inheritance | None = None
        self._groups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self._adding: dict[tuple[int, int], asyncio.Task[None]] = {}
        """By step and segment."""

    def segment(self, g: int) -> Segment:
        """A segment that is held here."""
        return self.desk.holdings[g % self.plan.stages].segments[g]

    async def join(self, segments: Iterable[int]) -> None:
        """Meet those that run the same segments: in the plan and, where they differ, in the recovery."""
        wanted = {(g, self.plan.holders_of(g)) for g in segments}
        for adding in self.epoch.recovery.runners.values():
            wanted |= {(g, runners) for g, runners in enumerate(adding) if self.slot in runners}
        for g, runners in sorted(wanted):
            holders = [self.epoch.address(w) for w in runners]
            name = f"group {g} of {','.join(map(str, runners))}"
            self._groups[g, runners] = self.transport.group(Key(self.epoch.number, 0, name), holders)
        await asyncio.gather(*(group.join() for group in self._groups.values()))

    def leave(self) -> None:
        """The epoch is over here: nothing is added up any more."""
        for task in self._adding.values():
            task.cancel()
        for group in self._groups.values():
            group.close()

    async def start(self, step: int, g: int, runners: tuple[int, ...]) -> None:
        """Begin to add up a segment over its runners, and go on with other work meanwhile."""
        await self.clock.work(self.node, step, f"{g}R")
        self._adding[step, g] = asyncio.create_task(self._add_up(step, g, runners))
        if len(runners) > 1:
            await asyncio.sleep(0)  # lets the task start its first bucket

    async def ended(self, step: int, segments: Iterable[int]) -> None:
        """Until the sums of these segments are complete."""
        for g in segments:
            await self._adding.pop((step, g))

    async def _add_up(self, step: int, g: int, runners: tuple[int, ...]) -> None:
        """On copies: an accumulator holds its own sum, or the complete one, never something between."""
        if self.inheritance is not None:
            await self.inheritance.parts(step, g)
        absorb(self, step, g)
        segment = self.segment(g)
        rider = self.desk.book(step, g, segment).rider()
        for layer in segment.layers:
            layer.accumulator.gather()
        totals = [layer.accumulator.total for layer in segment.layers if layer.trained]
        if len(runners) > 1:
            parts = await self._over_all(self._groups[g, runners], totals, rider)
            for total, part in zip(totals, parts, strict=True):
                total.copy_(part)
        else:
            parts = [total.to("cpu", copy=True) for total in totals] if self.epoch.kept else []
        self.desk.step(step).loaded.add(g)
        self._complete(step, g, Sum(parts, rider))
        for slot in self._followers(step, g, runners):
            self.give(step, g, slot)

    async def _over_all(self, group: Group, totals: Sequence[Tensor], rider: Tensor) -> list[Tensor]:
        """The sums of all runners, one flat tensor for each of these. The rider is added up in place."""
        buckets = list(_buckets(totals))
        copies = [torch.cat([t.reshape(-1) for t in bucket]).cpu() for bucket in buckets]
        await group.all_reduce(*copies, rider)
        return [
            part
            for bucket, copy in zip(buckets, copies, strict=True)
            for part in copy.split([t.numel() for t in bucket])
        ]

    def _followers(self, step: int, g: int, runners: tuple[int, ...]) -> list[int]:
        """Who holds a segment without running it, and has its sums from here."""
        stage, recovery = g % self.plan.stages, self.epoch.recovery
        if step in recovery.steps:
            others = [slot for slot in recovery.lacking(step, stage) if slot not in runners]
            return others if runners[0] == self.slot else []
        return [s.slot for s in self.epoch.shadows if s.source == self.slot and s.stage == stage]

    def _complete(self, step: int, g: int, total: Sum) -> None:
        """A sum is complete: settle what rode along."""
        open_step = self.desk.step(step)
        book = self.desk.book(step, g, self.segment(g))
        open_step.settled[g] = book.settle(total.rider, self.epoch.drops(step))
        if self.epoch.kept:
            open_step.sums[g] = total

    def give(self, step: int, g: int, slot: int) -> None:
        """Send a complete sum to another holder."""
        total = self.desk.step(step).sums[g]
        frame = [*total.totals, total.rider, *self.desk.book(step, g, self.segment(g)).template()]
        self.transport.send(self.epoch.address(slot), self._key(step, g), frame)

    def give_lacking(self, step: int) -> None:
        """In a recovery: whoever was chosen to gives a sum that is complete to all that lack it."""
        recovery = self.epoch.recovery
        for at, g, giver in recovery.sums:
            if at == step and giver == self.slot:
                for slot in recovery.lacking(step, g % self.plan.stages):
                    if slot != self.slot:
                        self.give(step, g, slot)

    async def take(self, step: int, g: int) -> None:
        """Receive the complete sum of a segment from a worker that has it."""
        key = self._key(step, g)
        inherited = self.inheritance.get(key) if self.inheritance is not None else None
        if inherited is not None:
            await inherited
        else:
            self.taken(step, g, await self.transport.receive(key))

    def take_arrived(self, step: int, g: int) -> bool:
        """Take a complete sum if it has come; False: it has not."""
        frame = self.transport.arrived(self._key(step, g))
        if frame is not None:
            self.taken(step, g, frame)
        return frame is not None

    def taken(self, step: int, g: int, frame: Tensors) -> None:
        """A complete sum has come, as `give` sends it."""
        values = [value for value in frame if value is not None]
        segment = self.segment(g)
        trained = sum(1 for layer in segment.layers if layer.trained)
        self.desk.book(step, g, segment).learn(values[trained + 1 :])
        self._complete(step, g, Sum(values[:trained], values[trained]))

    def _key(self, step: int, g: int) -> Key:
        return Key(self.epoch.number, step, f"sum {g}")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours, up to the size of a bucket; a larger one goes alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
