"""What a worker reports to its leader: a step that it has made, its last figures, an error. Pure."""

from __future__ import annotations

import resource
import traceback
from typing import TYPE_CHECKING

from culm.errors import CulmError, LayerFailed, said
from culm.runtime.epoch import Failed, Final, StepReport

if TYPE_CHECKING:
    from culm.runtime.executor import Executor
    from culm.runtime.shadow import Shadows


def step_report(executor: Executor, step: int, at: float) -> StepReport:
    """Of a step that all copies here have made."""
    open_step = executor.desk.steps[step]
    counts = [settled.counts for settled in open_step.settled.values()]
    last = open_step.settled.get(executor.plan.segments - 1)
    assert open_step.closed is not None
    return StepReport(
        node=executor.node,
        epoch=executor.epoch.number,
        step=step,
        at=at,
        counted=tuple(map(min, *counts)) if len(counts) > 1 else tuple(counts[0]),
        counted_most=tuple(map(max, *counts)) if len(counts) > 1 else tuple(counts[0]),
        loss_sum=last.loss_sum if last is not None else None,
        weight_sum=open_step.totals[1] if last is not None and open_step.totals is not None else None,
        norm=open_step.closed.norm,
        skipped=open_step.closed.skipped,
    )


def final_report(executor: Executor, shadows: Shadows) -> Final:
    """The last of all: digests of the layers that are run or followed here, and figures."""
    digests: dict[int, tuple[str, str]] = {}
    for stage in (*executor.plan.stages_of(executor.slot), *shadows.level):
        state = executor.desk.holdings[stage].state
        digests |= state.digests(state.layers)
    return Final(
        node=executor.node,
        digests=digests,
        spans=tuple(executor.desk.spans),
        kept_bytes=executor.desk.kept_peak,
        peak_tapes=executor.tapes_peak,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        waited_s=executor.waited_s,
        eager=(shadows.eager_run, shadows.eager_due),
    )


def failure(node: int, error: BaseException) -> Failed:
    """An error as a letter: its class, its sentence, and the trace for --debug."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, CulmError):
        return Failed(node, type(error).__name__, str(error), trace)
    return Failed(node, LayerFailed.__name__, f"{type(error).__name__}{said(error)}", trace)
