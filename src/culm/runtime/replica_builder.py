"""Build the layers of stages, or load them from a checkpoint, in a thread: the worker keeps handling messages."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import torch

from culm.errors import CulmError
from culm.runtime.checkpoint_io import load_with_retries
from culm.runtime.compute.device import activate_device
from culm.runtime.worker_state import StageReplica
from culm.schedule import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch, LayerInput
    from culm.runtime.worker_state import WorkerState


async def build_replica(
    clock: Clock,
    job: Job,
    segments: Sequence[tuple[int, int]],
    stages: int,
    stage: int,
    device: torch.device,
    version: int,
    layer_inputs: Sequence[Sequence[LayerInput]] = (),
) -> StageReplica:
    """Build a replica of a stage in a thread: it may take long, and a worker that sends no heartbeat is taken for hung.
    With `layer_inputs` (`Epoch.layer_inputs`) its layers are compiled, too.

    A caller that is cancelled waits for the thread nevertheless: the thread draws from the global random generators,
    which all other code uses, too.
    """
    layer_ranges = {g: range(*span) for g, span in enumerate(segments) if g % stages == stage}
    building = asyncio.ensure_future(
        clock.run_in_thread(_build, job, stage, layer_ranges, device, version, layer_inputs)
    )
    # A cancelled caller never reads the result: mark its exception as retrieved.
    building.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        return await asyncio.shield(building)
    finally:
        await asyncio.wait([building])


def _build(
    job: Job,
    stage: int,
    layer_ranges: dict[int, range],
    device: torch.device,
    version: int,
    layer_inputs: Sequence[Sequence[LayerInput]],
) -> StageReplica:
    activate_device(device)
    replica = StageReplica(job, stage, layer_ranges, device, version)
    if layer_inputs:
        for g, segment in replica.segments.items():
            with contextlib.suppress(CulmError):  # the first action raises it, if it is not due to the invented values
                segment.compile_layers([layer_inputs[layer] for layer in layer_ranges[g]])
    return replica


async def build_missing_replicas(worker_state: WorkerState, epoch: Epoch, slot: int, clock: Clock) -> None:
    """Build each stage that a slot runs or shadows and the worker does not hold, or load it from the checkpoint that
    the epoch starts from. Stages that are complete when this is cancelled stay."""
    plan = Plan.from_text(epoch.plan)
    shadowed = [shadow.stage for shadow in epoch.shadows if shadow.slot == slot and not shadow.needs_copy]
    for stage in (*plan.stages_of(slot), *shadowed):
        if stage not in worker_state.replicas:
            replica = await build_replica(
                clock,
                worker_state.job,
                epoch.segments,
                plan.stages,
                stage,
                worker_state.device,
                epoch.start,
                epoch.layer_inputs,
            )
            if epoch.resume_step is not None:
                assert epoch.resume_from is not None
                await load_with_retries(replica.state, epoch.resume_from, epoch.resume_step, clock)
            worker_state.replicas[stage] = replica
