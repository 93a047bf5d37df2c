"""The layers of stages, newly built or out of a checkpoint, while the worker still beats and hears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from culm.runtime.desk import Holding
from culm.runtime.saving import load_checkpoint
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Desk
    from culm.runtime.epoch import Epoch


async def built(
    clock: Clock,
    job: Job,
    segments: Iterable[tuple[int, int]],
    stages: int,
    stage: int,
    device: torch.device,
    version: int,
) -> Holding:
    """Aside: it may take long, and whoever is silent for long is taken for hung. Who is cancelled meanwhile waits for
    it: it draws from the generators that everything else draws from, too."""
    spans = {g: range(*span) for g, span in enumerate(segments) if g % stages == stage}
    building = asyncio.ensure_future(clock.aside(Holding, job, stage, spans, device, version))
    building.add_done_callback(lambda made: made.cancelled() or made.exception())  # who was cancelled does not ask
    try:
        return await asyncio.shield(building)
    finally:
        await asyncio.wait([building])


async def furnish(desk: Desk, epoch: Epoch, slot: int, clock: Clock) -> None:
    """Build what a slot is to hold and is not on the desk, or load it from the checkpoint that the epoch starts from.
    Stage by stage: what is here when this is broken off stays."""
    plan = Plan.from_text(epoch.plan)
    shadowed = [shadow.stage for shadow in epoch.shadows if shadow.slot == slot and not shadow.fresh]
    for stage in (*plan.stages_of(slot), *shadowed):
        if stage not in desk.holdings:
            place = (plan.stages, stage, desk.device, epoch.start)
            holding = await built(clock, desk.job, epoch.segments, *place)
            if epoch.resume is not None:
                assert epoch.resume_from is not None
                await clock.aside(load_checkpoint, holding.state, epoch.resume_from, epoch.resume)
            desk.holdings[stage] = holding
