"""Reports of a worker to the leader: a completed step, the end of the run, an error."""

from __future__ import annotations

import resource
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import culm
from culm.data.stream import Stream
from culm.errors import CulmError, LayerFailed, message_suffix
from culm.runtime.clock import InjectedError
from culm.runtime.compute.device import device_identifier, empty_cache, is_out_of_memory
from culm.runtime.messages import FailedAction, FailureReport, FinalReport, StepReport, count_runs

if TYPE_CHECKING:
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.executor import Executor
    from culm.runtime.shadow_replicas import ShadowReplicas

_LIBRARIES = tuple(str(Path(library.__file__ or "").parent) for library in (culm, torch))
"""Folders whose code is not the job's."""


def build_step_report(context: EpochContext, step: int, reported_at: float) -> StepReport:
    """Report a step that every replica on this worker has completed."""
    open_step = context.state.open_steps[step]
    observed = [totals.observed for totals in open_step.segment_totals.values()]
    last = open_step.segment_totals.get(context.plan.segments - 1)
    assert open_step.outcome is not None
    return StepReport(
        worker=context.worker,
        epoch=context.epoch.number,
        step=step,
        reported_at=reported_at,
        counts=count_runs(
            map(min, zip(*(one.least for one in observed), strict=True)),
            map(max, zip(*(one.most for one in observed), strict=True)),
        ),
        loss_sum=last.loss_sum if last is not None else None,
        weight_sum=open_step.loss_totals[1] if last is not None and open_step.loss_totals is not None else None,
        grad_norm=open_step.outcome.norm,
        skipped=open_step.outcome.skipped,
        values=last.values if last is not None else {},
        busy_s=open_step.busy_s,
        actions=dict(open_step.actions),
        stream_digest=_stream_digest(context, step),
    )


def _stream_digest(context: EpochContext, step: int) -> str | None:
    data = context.job.data
    return data.block_digest(step * data.block) if isinstance(data, Stream) else None


def build_final_report(context: EpochContext, executor: Executor, shadows: ShadowReplicas) -> FinalReport:
    """The last report of a worker: digests of the layers that it runs or shadows, trace spans and memory."""
    digests: dict[int, tuple[str, str]] = {}
    copies = context.state.copies
    for stage in (*context.plan.stages_of(context.slot), *shadows.current_shadows):
        state = context.state.replicas[stage].state
        digests |= state.digests(state.layers)
    return FinalReport(
        worker=context.worker,
        digests=digests,
        spans=tuple(context.state.spans),
        kept_bytes=context.state.peak_kept_bytes,
        peak_tapes=executor.peak_tapes,
        peak_device_bytes=copies.peak_device_bytes,
        peak_slab_bytes=copies.peak_slab_bytes,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        waited_s=executor.waited_s,
        eager_forwards=(shadows.eager_forwards_run, shadows.eager_forwards_due),
    )


def build_failure_report(
    worker: int,
    error: BaseException,
    epoch: int,
    failed: tuple[int, str] | None,
    device: torch.device | None,
) -> FailureReport:
    """Describe an error as a message: class, sentence, and the traceback for --debug. `failed`: the step and the action
    that raised it, if it was one. If the device is out of memory, its cache is emptied."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, CulmError) and not isinstance(error, LayerFailed):
        return FailureReport(worker, type(error).__name__, str(error), trace)
    cause = _first_exception(error)
    out_of_memory = is_out_of_memory(cause)
    if out_of_memory:
        empty_cache(device)
    step, action = failed or (-1, "")
    found = FailedAction(
        epoch, step, action, type(cause).__name__, _location(cause), device_identifier(device), out_of_memory
    )
    message = str(error) if isinstance(error, LayerFailed) else f"{type(error).__name__}{message_suffix(error)}"
    return FailureReport(worker, LayerFailed.__name__, message, trace, action=found)


def _first_exception(error: BaseException) -> BaseException:
    """The exception that an error of culm was raised from."""
    while isinstance(error, CulmError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _location(error: BaseException) -> str:
    """FILE:LINE of the innermost frame of the job's code or, without one, of any code."""
    if isinstance(error, InjectedError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    innermost = (own or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}" for frame in innermost)
