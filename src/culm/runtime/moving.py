"""Layers on their way: when the shape of a run changes, every worker takes those that it lacks from another one.

Parameters, buffers and optimizer state go together, a frame a layer, as they are for the step that comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from culm.runtime.building import built
from culm.runtime.shadow import packed, unpacked
from culm.runtime.state import Snapshot
from culm.schedule import Plan
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Desk, Holding
    from culm.runtime.epoch import Epoch
    from culm.transport.base import Transport


def give_layers(epoch: Epoch, slot: int, desk: Desk, transport: Transport) -> None:
    """Send what others are to have from here. It is copied: what is here may move on."""
    for move in epoch.moves:
        if move.source == slot:
            for layer in move.layers:
                state = desk.holder(layer, epoch.committed)
                assert state is not None, f"layer {layer} is not here for step {epoch.committed}"
                transport.send(epoch.address(move.target), _key(epoch, layer), packed(state.part(layer)))


async def take_layers(
    epoch: Epoch, slot: int, desk: Desk, transport: Transport, clock: Clock, told: Callable[[int], None]
) -> dict[int, Holding]:
    """The holdings of a worker in a new shape, by stage: of what lies here, and of what others give.

    `told` hears after each layer how many have come. What was here stays as it was: it may be given to others, and gone
    back to.
    """
    plan = Plan.from_text(epoch.plan)
    awaited = {layer for move in epoch.moves if move.target == slot for layer in move.layers}
    found: dict[int, Holding] = {}
    came = 0
    for stage in plan.stages_of(slot):
        holding = await built(clock, desk.job, epoch.segments, plan.stages, stage, desk.device, epoch.committed)
        whole = Snapshot()
        for layer in holding.state.layers:
            if layer in awaited:
                whole.update(unpacked(await transport.receive(_key(epoch, layer))))
                came += 1
                told(came)
            else:
                state = desk.holder(layer, epoch.committed)
                assert state is not None, f"layer {layer} is not here for step {epoch.committed}"
                whole.update(state.part(layer))
        holding.state.restore(whole)
        found[stage] = holding
    return found


def _key(epoch: Epoch, layer: int) -> Key:
    return Key(epoch.number, epoch.committed, f"layer {layer}")
