"""The interpreter of plans: one loop for all schedules.

A worker's list is compiled once an epoch: sends and receives are derived from the placement (culm.schedule.lower).
Then each step walks the list. Frames are received ahead, so the loop waits only where the schedule has a bubble.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from culm.plan.recover import Wiring, made, needed
from culm.runtime.data import Values, evaluation_batch, evaluation_share, micro_batch
from culm.runtime.desk import Sum
from culm.runtime.estate import absorb
from culm.schedule import Action, Kind, Plan, lower
from culm.transport.base import Group, Key, Tensors

if TYPE_CHECKING:
    from culm.job import Job
    from culm.plan.edges import Task
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Desk
    from culm.runtime.epoch import Epoch
    from culm.runtime.estate import Inheritance
    from culm.runtime.segment import Segment
    from culm.runtime.shadow import Shadows
    from culm.transport.base import Transport

_BUCKET = 25 << 20
"""Bytes that are added up over the pipelines at once: large enough for the wire, small enough to copy."""
_WAITS = 6
"""How many steps back a wait is looked at: a bubble that was too short once is left alone for so long."""
_YIELD_S = 0.02
"""How long the loop may run without letting letters in."""


@dataclass(slots=True)
class Op:
    """An action with its communication resolved."""

    action: Action
    segment: Segment
    label: str
    name: str | None
    """What its output goes by: 2F0, or 1I3 for a gradient, whether I or B made it."""
    source: str | None
    """Name of the frame that it waits for; None: found at home, or made from data."""
    home: str | None
    """Name of the value that lies here: an earlier action of this worker left it, or it was kept."""
    targets: tuple[str, ...]
    """Addresses that its output goes to."""
    keeps: bool
    """Whether a later action of this worker takes its output."""
    again: bool = False
    """Run for its output alone: nothing is counted and no tape stays."""


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
        self.program = self._compile(self.plan)
        self.groups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self.wiring = Wiring(epoch.recovery, self.plan.segments)
        self.shadows: Shadows | None = None
        self.inheritance: Inheritance | None = None
        self.done = 0
        """Actions that were run: whoever waits for nothing more moves this."""
        self.slowest_s = 0.0
        self.tapes_peak = 0
        self.waited_s = 0.0
        self.spans: collections.deque[tuple[int, str, float, float]] = collections.deque(maxlen=4096)
        self._home: dict[str, Values | Tensors] = {}
        self._reducing: dict[tuple[int, int], asyncio.Task[None]] = {}
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
        """Meet those that run the same segments: in the plan and, where they differ, in the recovery."""
        wanted = {(g, self.runners(g)) for g in self.segments}
        for stage, runners in enumerate(self.epoch.recovery.runners):
            if self.slot in runners:
                wanted |= {(g, runners) for g in range(stage, self.plan.segments, self.plan.stages)}
        for g, runners in sorted(wanted):
            holders = [self.epoch.address(w) for w in runners]
            name = f"group {g} of {','.join(map(str, runners))}"
            self.groups[g, runners] = self.transport.group(Key(self.epoch.number, 0, name), holders)
        await asyncio.gather(*(group.join() for group in self.groups.values()))

    def leave(self) -> None:
        """The epoch is over here: nothing of it goes on."""
        for task in self._reducing.values():
            task.cancel()
        if self.inheritance is not None:
            self.inheritance.close()
        for group in self.groups.values():
            group.close()

    def _compile(self, plan: Plan) -> list[Op]:
        ops = []
        for action, receives, sends in lower(plan)[self.slot] if self.slot < len(plan.workers) else ():
            needs, makes = needed(action, plan.segments), made(action)
            taken = makes is not None and (
                action.segment + 1 < plan.segments if action.kind is Kind.F else action.segment > 0
            )
            ops.append(
                Op(
                    action=action,
                    segment=self.segments[action.segment],
                    label=str(action),
                    name=None if makes is None else str(makes),
                    source=str(needs) if receives else None,
                    home=str(needs) if needs is not None and not receives else None,
                    targets=tuple(self.epoch.address(edge.target) for edge in sends),
                    keeps=taken and not sends,
                )
            )
        return ops

    async def step(self, step: int) -> None:
        """Run the list of one step. Afterwards its complete sums are here, settled."""
        self._home.clear()
        for g, segment in self.segments.items():
            self.desk.book(step, g, segment)
        self.transport.busy(True)
        try:
            for op in self.program:
                if op.action.kind is Kind.S:
                    break
                await self._run(step, op)
        finally:
            self.transport.busy(False)
        await self.reduced(step, self.segments)

    async def tasks(self, step: int, tasks: Sequence[Task], segments: dict[int, Segment]) -> None:
        """Run what a recovery asks of this worker for one step, and begin to add up what is complete here."""
        recovery = self.epoch.recovery
        ops = self._compile_tasks(step, tasks, segments)
        for g, segment in segments.items():
            self.desk.book(step, g, segment)
        last = {op.action.segment: number for number, op in enumerate(ops) if not op.again}
        due = [g for g in segments if recovery.giver(step, g) is None]
        for g in due:
            if g not in last:
                await self.start_reduce(step, g, recovery.runners[g % self.plan.stages])
        for number, op in enumerate(ops):
            await self._run(step, op)
            g = op.action.segment
            if g in due and last.get(g) == number:
                await self.start_reduce(step, g, recovery.runners[g % self.plan.stages])
        await self.reduced(step, due)

    async def end_begun(self, step: int, tasks: Sequence[Task], segments: dict[int, Segment]) -> None:
        """Run what a recovery asks of this worker for one step, and leave the sums as they are."""
        for op in self._compile_tasks(step, tasks, segments):
            await self._run(step, op)

    def _compile_tasks(self, step: int, tasks: Sequence[Task], segments: dict[int, Segment]) -> list[Op]:
        wiring = self.wiring
        ghosts: dict[int, Segment] = {}
        for stage in {task.action.segment % self.plan.stages for task in tasks if task.again}:
            ghosts |= self.desk.holdings[stage].ghost(step)
        ops = []
        for task in tasks:
            action = task.action
            needs, makes = needed(action, self.plan.segments), made(action)
            source = None if needs is None else wiring.source(step, needs, self.slot)
            takers = [] if makes is None else wiring.takers(step, makes)
            ops.append(
                Op(
                    action=action,
                    segment=ghosts[action.segment] if task.again else segments[action.segment],
                    label=str(action),
                    name=None if makes is None else str(makes),
                    source=str(needs) if source is not None and source != self.slot else None,
                    home=str(needs) if source == self.slot else None,
                    targets=tuple(self.epoch.address(w) for w in takers if w != self.slot),
                    keeps=self.slot in takers,
                    again=task.again,
                )
            )
        return ops

    def resend(self, step: int) -> None:
        """Send what was kept here of an open step to those who need it and have nobody else to take it from."""
        outputs = self.desk.step(step).outputs
        for name, takers in self.wiring.resends(step, self.slot):
            for taker in takers:
                self.transport.send(self.epoch.address(taker), Key(self.epoch.number, step, name), outputs[name])

    async def _run(self, step: int, op: Op) -> None:
        micro = op.action.micro
        kind = op.action.kind
        if kind is Kind.R:
            await self.start_reduce(step, op.action.segment, self.runners(op.action.segment))
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
        end = self.clock.now()
        self.spans.append((step, op.label, start, end))
        self.done += 1
        self.slowest_s = max(self.slowest_s, end - start)

    async def _given(self, step: int, op: Op) -> Any:
        """The tensors that an action starts from: from a frame, or left at home by an action of this worker."""
        if op.source is not None:
            key = Key(self.epoch.number, step, op.source)
            found = self.transport.arrived(key) if self.inheritance is None else None
            if found is None:
                found = await self._wait(step, key)
            return _placed(found, self.desk.device)
        if op.home is None:
            return ()
        left = self._home.pop(op.home, None)
        return left if left is not None else _placed(self.desk.step(step).outputs[op.home], self.desk.device)

    async def _wait(self, step: int, key: Key) -> Tensors:
        """A bubble: look after replicas, if there are any, until the frame has come."""
        began = self.clock.now()
        inherited = self.inheritance.get(key) if self.inheritance is not None else None
        if inherited is not None:
            return await inherited
        for holding in self.desk.holdings.values() if self.epoch.kept else ():
            holding.remember_early()
        quiet = began  # until then, at least, the frame had not come
        while self.shadows is not None and await self.shadows.spare(step, self._room(key.name) - (quiet - began)):
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

    def _room(self, name: str) -> float:
        """Seconds that a wait for a frame is known to last at the least: what takes longer would hold the step up."""
        return min(self._waits.get(name, (-1.0,)))

    def _note_wait(self, name: str, seconds: float) -> None:
        self._waits.setdefault(name, collections.deque(maxlen=_WAITS)).append(seconds)

    def _forward(self, step: int, micro: int, op: Op, inputs: Values) -> Values:
        target = None
        first = op.action.segment == 0
        if first or op.segment.last:
            fresh, target = micro_batch(self.job, step, micro, self.desk.device)
            inputs = fresh if first else inputs
        outputs, outcome = op.segment.forward(step, micro, inputs, target)
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

    async def start_reduce(self, step: int, g: int, runners: tuple[int, ...]) -> None:
        """R: begin to add up a segment over its runners, and go on with other work meanwhile."""
        await self.clock.work(self.node, step, f"{g}R")
        self._reducing[step, g] = asyncio.create_task(self._reduce(step, g, runners))
        if len(runners) > 1:
            await asyncio.sleep(0)  # lets the task start its first bucket

    async def reduced(self, step: int, segments: Iterable[int]) -> None:
        """Until the sums of these segments are complete."""
        for g in segments:
            await self._reducing.pop((step, g))

    async def _reduce(self, step: int, g: int, runners: tuple[int, ...]) -> None:
        """Sum on copies: an accumulator holds its own sum, or the complete one, never something between."""
        if self.inheritance is not None:
            await self.inheritance.parts(step, g)
        absorb(self, step, g)
        segment = self.desk.holdings[g % self.plan.stages].segments[g]
        book = self.desk.book(step, g, segment)
        rider = book.rider()
        totals = [layer.accumulator.total for layer in segment.layers if layer.trained]
        if len(runners) > 1:
            buckets = list(_buckets(totals))
            copies = [torch.cat([t.reshape(-1) for t in bucket]).cpu() for bucket in buckets]
            group = self.groups[g, runners]
            await asyncio.gather(*(group.all_reduce(copy) for copy in (*copies, rider)))
            parts = [
                part
                for bucket, copy in zip(buckets, copies, strict=True)
                for part in copy.split([t.numel() for t in bucket])
            ]
            for total, part in zip(totals, parts, strict=True):
                total.copy_(part)
        elif self.epoch.kept:
            parts = [total.to("cpu", copy=True) for total in totals]
        else:
            parts = []
        self.desk.step(step).loaded.add(g)
        self._complete(step, g, Sum(parts, rider))
        for slot in self._followers(step, g, runners):
            self.give(step, g, slot)

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
        segment = self.desk.holdings[g % self.plan.stages].segments[g]
        book = self.desk.book(step, g, segment)
        open_step.settled[g] = book.settle(total.rider, self.epoch.drops(step))
        if self.epoch.kept:
            open_step.sums[g] = total

    def give(self, step: int, g: int, slot: int) -> None:
        """Send a complete sum to another holder."""
        segment = self.desk.holdings[g % self.plan.stages].segments[g]
        total = self.desk.step(step).sums[g]
        frame = [*total.totals, total.rider, *self.desk.book(step, g, segment).template()]
        self.transport.send(self.epoch.address(slot), Key(self.epoch.number, step, f"sum {g}"), frame)

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
        key = Key(self.epoch.number, step, f"sum {g}")
        inherited = self.inheritance.get(key) if self.inheritance is not None else None
        if inherited is not None:
            await inherited
        else:
            self.taken(step, g, await self.transport.receive(key))

    def taken(self, step: int, g: int, frame: Tensors) -> None:
        values = [value for value in frame if value is not None]
        segment = self.desk.holdings[g % self.plan.stages].segments[g]
        trained = sum(1 for layer in segment.layers if layer.trained)
        self.desk.book(step, g, segment).learn(values[trained + 1 :])
        self._complete(step, g, Sum(values[:trained], values[trained]))

    async def evaluate(self, step: int) -> list[tuple[int, float, float]]:
        """Run the F-only plan over the evaluation set: (micro-batch, loss, weight) of each that ends on this worker."""
        assert self.epoch.evaluation is not None
        found: list[tuple[int, float, float]] = []
        for op in self._compile(Plan.from_text(self.epoch.evaluation)):
            micro = op.action.micro
            assert micro is not None
            key = Key(self.epoch.number, step, f"evaluate {op.source}")
            given: Any = _placed(await self.transport.receive(key), self.desk.device) if op.source else ()
            if op.home is not None:
                given = self._home.pop(f"evaluate {op.home}")
            target: Any = None
            if op.action.segment == 0 or op.segment.last:
                fresh, target = evaluation_batch(self.job, micro, self.desk.device)
                given = fresh if op.action.segment == 0 else given
            outputs, outcome = op.segment.evaluate(micro, given, target)
            await self.clock.work(self.node, step, f"evaluate {op.label}")
            for address in op.targets:
                self.transport.send(address, Key(self.epoch.number, step, f"evaluate {op.label}"), outputs)
            if op.keeps:
                self._home[f"evaluate {op.label}"] = outputs
            if outcome.loss is not None:
                found.append((micro, *evaluation_share(self.job, micro, outcome.loss, outcome.weight)))
        return found


def _buckets(tensors: Sequence[Tensor]) -> Any:
    """Neighbours, up to the size of a bucket; a larger one goes alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _placed(tensors: Tensors, device: torch.device) -> Tensors:
    if device.type == "cpu":
        return tensors
    return tuple(
        None if t is None else t.detach().to(device, non_blocking=True).requires_grad_(t.requires_grad) for t in tensors
    )
