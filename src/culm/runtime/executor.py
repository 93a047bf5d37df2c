"""The interpreter of plans: one loop for all schedules.

A worker's list is compiled once an epoch: sends and receives are derived from the placement (culm.schedule.lower).
Then each step walks the list. Frames are received ahead, so the loop waits only where the schedule has a bubble.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from culm.runtime.book import Book, Settled
from culm.runtime.data import Values, evaluation_batch, evaluation_share, micro_batch
from culm.runtime.segment import Segment
from culm.runtime.update import apply_statistics
from culm.schedule import Action, Kind, Plan, lower
from culm.transport.base import Group, Key, Tensors

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch
    from culm.runtime.state import State
    from culm.transport.base import Transport

_BUCKET = 25 << 20
"""Bytes that are added up over the pipelines at once: large enough for the wire, small enough to copy."""
_YIELD_S = 0.02
"""How long the loop may run without letting letters in."""


@dataclass(slots=True)
class Op:
    """An action with its communication resolved."""

    action: Action
    segment: Segment
    label: str
    source: str | None
    """Name of the frame that it waits for; None: found at home, or made from data."""
    home: str | None
    """Name of the value that an earlier action of this worker left."""
    targets: tuple[str, ...]
    """Addresses that its output goes to."""
    keeps: bool
    """Whether a later action of this worker takes its output."""


class Executor:
    """Runs the steps of one epoch on one worker."""

    def __init__(self, job: Job, epoch: Epoch, slot: int, state: State, transport: Transport, clock: Clock) -> None:
        self.job, self.epoch, self.slot, self.state = job, epoch, slot, state
        self.transport, self.clock = transport, clock
        self.node = epoch.members[slot].node
        self.plan = Plan.from_text(epoch.plan)
        self.segments = {g: Segment(job, state, range(*epoch.segments[g])) for g in self.plan.segments_of(slot)}
        self.program = self._compile(self.plan)
        self.groups: dict[int, Group] = {}
        self.books: dict[int, Book] = {}
        self.settled: dict[int, Settled] = {}
        self.kept: dict[int, list[Tensor]] = {}
        self.kept_peak = 0
        self._kept_bytes = 0
        self.tapes_peak = 0
        self.waited_s = 0.0
        self.spans: collections.deque[tuple[int, str, float, float]] = collections.deque(maxlen=4096)
        self._home: dict[str, Values | Tensors] = {}
        self._reducing: dict[int, asyncio.Task[None]] = {}
        self._yielded = clock.now()

    async def join(self) -> None:
        """Meet the peers of each segment."""
        for g in self.segments:
            holders = [self.epoch.members[w].address for w in self.plan.holders_of(g)]
            self.groups[g] = self.transport.group(Key(self.epoch.number, 0, f"group {g}"), holders)
        await asyncio.gather(*(group.join() for group in self.groups.values()))

    def leave(self) -> None:
        """The epoch is over here: nothing of it goes on."""
        for task in self._reducing.values():
            task.cancel()
        for group in self.groups.values():
            group.close()

    def _compile(self, plan: Plan) -> list[Op]:
        placement = plan.placement()
        address = [member.address for member in self.epoch.members]
        ops = []
        for step in lower(plan)[self.slot]:
            action = step.action
            before, after = _neighbours(action, plan.segments, placement)
            ops.append(
                Op(
                    action=action,
                    segment=self.segments[action.segment],
                    label=str(action),
                    source=str(step.receives[0].producer) if step.receives else None,
                    home=str(before) if before is not None and placement[before] == self.slot else None,
                    targets=tuple(address[edge.target] for edge in step.sends),
                    keeps=after is not None and placement[after] == self.slot,
                )
            )
        return ops

    async def step(self, step: int) -> None:
        """Run the list of one step. Afterwards `settled` holds the complete sums' counts, losses and statistics."""
        self.books = {g: Book(segment, self.job.micro_batches) for g, segment in self.segments.items()}
        self.settled = {}
        self._home.clear()
        self.transport.busy(True)
        try:
            for op in self.program:
                if op.action.kind is Kind.S:
                    break
                await self._run(step, op)
        finally:
            self.transport.busy(False)
        for g in self.segments:
            await self._reducing.pop(g)

    async def _run(self, step: int, op: Op) -> None:
        micro = op.action.micro
        kind = op.action.kind
        if kind is Kind.R:
            await self._start_reduce(op.action.segment)
            return
        assert micro is not None
        given = await self._given(step, op)
        start = self.clock.now()
        if start - self._yielded > _YIELD_S:
            await asyncio.sleep(0)
            self._yielded = start
        made: Sequence[Tensor | None] = ()
        if kind is Kind.F:
            made = self._forward(step, micro, op, given)
        elif kind is Kind.B:
            made = op.segment.backward(step, micro, given)
        elif kind is Kind.I:
            made = op.segment.backward_input(step, micro, given)
        else:
            op.segment.backward_weight(step, micro)
        if kind in (Kind.B, Kind.W):
            self.books[op.action.segment].count(micro)
        await self.clock.work(self.node, op.label)
        self._hand_on(step, op, made)
        self.spans.append((step, op.label, start, self.clock.now()))

    async def _given(self, step: int, op: Op) -> Any:
        """The tensors that an action starts from: from a frame, or left at home by an action of this worker."""
        if op.source is not None:
            key = Key(self.epoch.number, step, op.source)
            found = self.transport.arrived(key)
            if found is None:
                began = self.clock.now()
                found = await self.transport.receive(key)
                self._yielded = self.clock.now()
                self.waited_s += self._yielded - began
            return _placed(found, self.state.device)
        return self._home.pop(op.home) if op.home is not None else ()

    def _forward(self, step: int, micro: int, op: Op, inputs: Values) -> Values:
        target = None
        first = op.action.segment == 0
        if first or op.segment.last:
            made, target = micro_batch(self.job, step, micro, self.state.device)
            inputs = made if first else inputs
        outputs, outcome = op.segment.forward(step, micro, inputs, target)
        self.books[op.action.segment].note(micro, outcome)
        self.tapes_peak = max(self.tapes_peak, sum(len(s.tapes) for s in self.segments.values()))
        return outputs

    def _hand_on(self, step: int, op: Op, values: Sequence[Tensor | None]) -> None:
        """Send an output where the placement says, keep it where a recovery may ask for it."""
        if op.targets:
            key = Key(self.epoch.number, step, op.label)
            sent = [None if v is None else v.cpu() for v in values]
            for address in op.targets:
                self.transport.send(address, key, sent)
            if self.epoch.kept:
                self._keep(step, sent)
        if op.keeps:
            self._home[op.label] = tuple(values)

    def _keep(self, step: int, tensors: Sequence[Tensor | None]) -> None:
        found = [t for t in tensors if t is not None]
        self.kept.setdefault(step, []).extend(found)
        self._kept_bytes += sum(t.nbytes for t in found)
        self.kept_peak = max(self.kept_peak, self._kept_bytes)

    def committed(self, step: int) -> None:
        """Every holder has the sums of this step: what was kept for it may go."""
        for old in [s for s in self.kept if s <= step]:
            self._kept_bytes -= sum(t.nbytes for t in self.kept.pop(old))

    async def _start_reduce(self, g: int) -> None:
        """R: begin to add up a segment over the pipelines, and go on with other work meanwhile."""
        self._reducing[g] = asyncio.create_task(self._reduce(g))
        if self.plan.pipelines > 1:
            await asyncio.sleep(0)  # lets the task start its first bucket

    async def _reduce(self, g: int) -> None:
        """Sum on copies: an accumulator holds its own sum, or the complete one, never something between."""
        book, group = self.books[g], self.groups[g]
        rider = book.rider()
        if self.plan.pipelines > 1:
            totals = [layer.accumulator.total for layer in book.segment.layers if layer.trained]
            buckets = list(_buckets(totals))
            copies = [torch.cat([t.reshape(-1) for t in bucket]).cpu() for bucket in buckets]
            await asyncio.gather(*(group.all_reduce(copy) for copy in (*copies, rider)))
            for bucket, copy in zip(buckets, copies, strict=True):
                for total, part in zip(bucket, copy.split([t.numel() for t in bucket]), strict=True):
                    total.copy_(part)
        self.settled[g] = book.settle(rider)

    def move_statistics(self) -> None:
        """Every holder applies the statistics of the step once, in micro-batch order."""
        for g, settled in self.settled.items():
            for layer in self.segments[g].layers:
                apply_statistics(layer, settled.statistics.get(layer.index, ()))

    async def evaluate(self, step: int) -> list[tuple[int, float, float]]:
        """Run the F-only plan over the evaluation set: (micro-batch, loss, weight) of each that ends on this worker."""
        assert self.epoch.evaluation is not None
        plan = Plan.from_text(self.epoch.evaluation)
        found: list[tuple[int, float, float]] = []
        for op in self._compile(plan) if self.slot < len(plan.workers) else ():
            micro = op.action.micro
            assert micro is not None
            key = Key(self.epoch.number, step, f"evaluate {op.source}")
            given: Any = _placed(await self.transport.receive(key), self.state.device) if op.source else ()
            if op.home is not None:
                given = self._home.pop(f"evaluate {op.home}")
            target: Any = None
            if op.action.segment == 0 or op.segment.last:
                made, target = evaluation_batch(self.job, micro, self.state.device)
                given = made if op.action.segment == 0 else given
            outputs, outcome = op.segment.evaluate(micro, given, target)
            for address in op.targets:
                self.transport.send(address, Key(self.epoch.number, step, f"evaluate {op.label}"), outputs)
            if op.keeps:
                self._home[f"evaluate {op.label}"] = outputs
            if outcome.loss is not None:
                found.append((micro, *evaluation_share(self.job, micro, outcome.loss, outcome.weight)))
        return found


def _neighbours(action: Action, segments: int, placement: dict[Action, int]) -> tuple[Action | None, Action | None]:
    """The action whose output this one takes, and the one that takes its output, in the graph of the step."""
    g, kind, micro = action
    if kind is Kind.F:
        before, after = Action(g - 1, Kind.F, micro), Action(g + 1, Kind.F, micro)
        return before if g else None, after if g + 1 < segments else None
    if kind in (Kind.I, Kind.B):
        return _backward_of(g + 1, segments, micro, placement), _backward_of(g - 1, segments, micro, placement)
    return None, None


def _backward_of(g: int, segments: int, micro: int | None, placement: dict[Action, int]) -> Action | None:
    if not 0 <= g < segments:
        return None
    split = Action(g, Kind.I, micro)
    return split if split in placement else Action(g, Kind.B, micro)


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
