"""Symmetry: equal pipelines are planned once, and a failure changes the plan of only a few of them.

With this a plan for a thousand workers takes tenths of a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from culm.plan.replan.fast_timing import FlatDryRun
from culm.plan.replan.plan_case import Slot
from culm.plan.replan.step_bound import step_lower_bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.plan.replan.list_schedule import EncodedRow
    from culm.plan.replan.plan_case import PlanCase

_MAX_EXTRA_HELPERS = 16
"""Up to this many more healthy pipelines than necessary help the damaged ones."""


def single_pipeline_case(case: PlanCase) -> PlanCase:
    """The fullest pipeline of a case by itself, without failures."""
    return replace(case, pipelines=1, micro_batches=len(case.micros_by_pipeline[0]), failed=frozenset())


def replicate_rows(case: PlanCase, rows: Sequence[EncodedRow]) -> list[EncodedRow]:
    """The lists of all pipelines from those of the fullest: a smaller pipeline omits the last micro-batch."""
    return [
        [3 * block.start + code for code in row if code < 3 * len(block)]
        for block in case.micros_by_pipeline
        for row in rows
    ]


def affected_pipelines(case: PlanCase, failure_free_time: float) -> list[int]:
    """The damaged pipelines, and as many healthy ones as are needed to keep the lower bound of the step unchanged.

    Healthy pipelines need `failure_free_time` per step anyway, so a bound below that gains nothing. If few are enough,
    some more are added, which makes it easier for the scheduler to find a short plan.
    """
    damaged = sorted({slot.pipeline for slot in case.failed})
    whole = [d for d in range(case.pipelines) if d not in set(damaged)]
    limit = max(failure_free_time, step_lower_bound(case)) * (1 + 1e-9)

    def too_long(helpers: int) -> bool:
        chosen = sorted(damaged + whole[:helpers])
        return not _every_stage_live(case, chosen) or step_lower_bound(restrict_to_pipelines(case, chosen)) > limit

    helpers = bisect_left(range(len(whole)), True, key=lambda many: not too_long(many))
    return sorted(damaged + whole[: max(helpers, min(2 * helpers, _MAX_EXTRA_HELPERS))])


def _every_stage_live(case: PlanCase, pipelines: Sequence[int]) -> bool:
    return all(any(Slot(d, stage) not in case.failed for d in pipelines) for stage in range(case.stages))


def restrict_to_pipelines(case: PlanCase, pipelines: Sequence[int]) -> PlanCase:
    """The case of only these pipelines, in ascending order."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    return replace(
        case,
        pipelines=len(pipelines),
        micro_batches=sum(len(case.micros_by_pipeline[d]) for d in pipelines),
        failed=frozenset(Slot(number[slot.pipeline], slot.stage) for slot in case.failed),
    )


def renumber_rows(case: PlanCase, pipelines: Sequence[int], rows: Sequence[EncodedRow]) -> dict[int, EncodedRow]:
    """The lists of a part of the pipelines, with the slot and micro-batch numbers of the whole case."""
    micro = [3 * number for d in pipelines for number in case.micros_by_pipeline[d]]
    slots = [pipeline * case.stages + stage for pipeline in pipelines for stage in range(case.stages)]
    return {slot: [micro[code // 3] + code % 3 for code in row] for slot, row in zip(slots, rows, strict=True)}


def merge_dry_runs(dry_run: FlatDryRun, second: FlatDryRun) -> FlatDryRun:
    """Two dry runs in parallel, of pipelines that share nothing but R."""
    workers, first = 1 + max(dry_run.workers), len(dry_run.workers)
    return FlatDryRun(
        dry_run.stages,
        [
            [*live, *(workers + w for w in other)]
            for live, other in zip(dry_run.live_workers, second.live_workers, strict=True)
        ],
        dry_run.update_costs,
        dry_run.workers + [workers + w for w in second.workers],
        dry_run.producers + [first + needs if needs >= 0 else -1 for needs in second.producers],
        dry_run.send_delays + second.send_delays,
        dry_run.durations + second.durations,
    )


def achievable_period(dry_run: FlatDryRun, lower_bound: float, max_tries: int = 4) -> float:
    """A time per step that the dry run can keep under the staggered optimizer: its period, or slightly more.

    Shifts stages against each other in time until the longest window of a stage stops shrinking. Much faster than the
    exact period, which needs a pass for every stage.
    """
    begin = _first_stage_starts(dry_run)
    best = math.inf
    for _ in range(max_tries):
        ends = dry_run.stage_end_times(begin)
        spent = max(end - start for end, start in zip(ends, begin, strict=True))
        if spent >= best:
            break
        best = spent
        begin = [max(start, end - lower_bound) for start, end in zip(begin, ends, strict=True)]
    return best


def _first_stage_starts(dry_run: FlatDryRun) -> list[float]:
    """When the first action of each stage starts if no stage is delayed."""
    begin = [math.inf] * dry_run.stages
    stage = {worker: stage for stage, live in enumerate(dry_run.live_workers) for worker in live}
    for worker, start in zip(dry_run.workers, dry_run.start_times([0.0] * dry_run.stages), strict=True):
        begin[stage[worker]] = min(begin[stage[worker]], start)
    return begin
