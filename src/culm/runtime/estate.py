"""The estate of a worker that has notice: its sums and what it kept, given to those that stay.

Who leaves ends what it has begun and sends everything off. Who stays takes all of it in as it comes, whatever it is
doing, and says so when it is complete: from then on those that leave may vanish at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from culm.errors import EpochClosed
from culm.plan.recover import needed
from culm.runtime.desk import Sum
from culm.transport.base import Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from culm.runtime.epoch import Epoch
    from culm.runtime.executor import Executor
    from culm.runtime.summing import Summing
    from culm.transport.base import Tensors


def hand_over(summing: Summing, step: int) -> None:
    """For a worker that leaves and has ended what it had begun of a step: give its sums away. What is given is no
    longer here: whatever becomes of this worker, no gradient is in two sums."""
    for at, g, giver, taker in summing.epoch.recovery.parts:
        if (at, giver) == (step, summing.slot):
            _give(summing, step, g, taker)


def _give(summing: Summing, step: int, g: int, taker: int) -> None:
    desk, segment = summing.desk, summing.segment(g)
    absorb(summing, step, g)
    book = desk.book(step, g, segment)
    trained = [layer.accumulator for layer in segment.layers if layer.trained]
    frame = [*(each.total.to("cpu", copy=True) for each in trained), book.rider(), *book.template()]
    summing.transport.send(summing.epoch.address(taker), _part(summing.epoch, step, g, summing.slot), frame)
    for layer in segment.layers:
        layer.accumulator.clear()
    del desk.step(step).books[g]


def absorb(summing: Summing, step: int, g: int) -> None:
    """Add the sums that others have given to those here."""
    segment = summing.segment(g)
    book = summing.desk.book(step, g, segment)
    for part in summing.desk.step(step).parts.pop(g, ()):
        for layer, total in zip((layer for layer in segment.layers if layer.trained), part.totals, strict=True):
            layer.accumulator.total.add_(total.to(layer.accumulator.total.device))
        book.absorb(part.rider)


def _take_part(summing: Summing, step: int, g: int, frame: Tensors) -> None:
    """The sums of a worker that leaves have come: they count as this worker's own from now on."""
    values = [value for value in frame if value is not None]
    segment = summing.segment(g)
    trained = sum(1 for layer in segment.layers if layer.trained)
    summing.desk.book(step, g, segment).learn(values[trained + 1 :])
    summing.desk.step(step).parts.setdefault(g, []).append(Sum(values[:trained], values[trained]))


class Inheritance:
    """What a worker that stays has from those that leave. `told` is called once all of it is here."""

    def __init__(self, executor: Executor, told: Callable[[], None]) -> None:
        self.executor = executor
        self._coming = {key: asyncio.create_task(self._take(key)) for key in set(_expected(executor))}
        self._telling = asyncio.create_task(self._tell(told))

    def get(self, key: Key) -> asyncio.Task[Tensors] | None:
        """A frame that comes from somebody who leaves; None: this one does not."""
        return self._coming.get(key)

    async def parts(self, step: int, g: int) -> None:
        """Until all that is given to the sum of a segment is here."""
        for at, segment, giver, taker in self.executor.epoch.recovery.parts:
            if (at, segment, taker) == (step, g, self.executor.slot):
                await self._coming[_part(self.executor.epoch, step, g, giver)]

    def close(self) -> None:
        for task in (*self._coming.values(), self._telling):
            task.cancel()

    async def _take(self, key: Key) -> Tensors:
        """One frame. It is on the desk before anything else happens: the epoch may end at any moment."""
        frame = await self.executor.transport.receive(key)
        keep_frame(self.executor.summing, key, frame)
        return frame

    async def _tell(self, told: Callable[[], None]) -> None:
        with contextlib.suppress(EpochClosed):
            await asyncio.gather(*self._coming.values())
            told()


def keep_frame(summing: Summing, key: Key, frame: Tensors) -> None:
    """Lay a frame on the desk, under what it is."""
    kind, _, rest = key.name.partition(" ")
    if kind == "part":
        _take_part(summing, key.step, int(rest.split()[0]), frame)
    elif kind == "sum":
        _take_sum(summing, key.step, int(rest), frame)
    else:
        summing.desk.keep(key.step, key.name, frame)


def _take_sum(summing: Summing, step: int, g: int, frame: Tensors) -> None:
    """A complete sum may come while the layers still have a step before it to end: their bounds are those of that."""
    holding = summing.desk.holdings[g % summing.plan.stages]
    sums = [layer.accumulator for layer in holding.segments[g].layers]
    before = [(each, each.bound, each.finite) for each in sums] if holding.version != step else []
    summing.taken(step, g, frame)
    for each, bound, finite in before:
        each.bound, each.finite = bound, finite


def _expected(executor: Executor) -> Iterator[Key]:
    """The frames that this worker will have from those that leave."""
    epoch, slot, recovery = executor.epoch, executor.slot, executor.epoch.recovery
    for step, action, _ in recovery.tasks(slot) if recovery.steps else ():
        needs = needed(action, executor.plan.segments)
        if needs is not None and executor.wiring.source(step, needs, slot) in epoch.leaving:
            yield Key(epoch.number, step, str(needs))
    for step, g, giver in recovery.sums:
        if giver in epoch.leaving and slot in recovery.lacking(step, g % executor.plan.stages):
            yield Key(epoch.number, step, f"sum {g}")
    for step, g, giver, taker in recovery.parts:
        if taker == slot:
            yield _part(epoch, step, g, giver)


def _part(epoch: Epoch, step: int, g: int, giver: int) -> Key:
    return Key(epoch.number, step, f"part {g} of {giver}")
