"""The layers of a stage, newly built, while the worker still beats and hears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from culm.runtime.desk import Holding

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock


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
    building.add_done_callback(lambda made: made.exception())  # who was cancelled does not ask for it
    try:
        return await asyncio.shield(building)
    finally:
        await asyncio.wait([building])
