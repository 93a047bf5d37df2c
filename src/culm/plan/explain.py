"""Why a plan with failed slots takes as long as it does, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.plan.bound import stage_bound
from culm.plan.failures import absorbed
from culm.plan.partition import count

if TYPE_CHECKING:
    from culm.plan.failures import Case
    from culm.plan.greedy import Rerouted


def explain(found: Rerouted) -> tuple[str, ...]:
    """What the failures add to each stage, which stage decides, and whether a shorter plan can exist."""
    case = found.case
    hurt = sorted({slot.stage for slot in case.failed})
    return (*(_burden(case, stage) for stage in hurt), _decisive(case), _quality(found))


def _burden(case: Case, stage: int) -> str:
    more = case.load(stage) - len(case.blocks[0])
    room = case.stages - 1
    fits = "has room for them" if absorbed(case, stage) else f"has room for {room} only"
    alive = f"{len(case.live(stage))} of {count(case.pipelines, 'worker')}"
    load = f"up to {count(case.load(stage), 'micro-batch')} each, {more} more than without a failure"
    return f"stage {stage} runs on {alive}: {load}; with equal times the bubble of 1F1B {fits}"


def _decisive(case: Case) -> str:
    stage = max(range(case.stages), key=lambda stage: stage_bound(case, stage))
    what = "its work, and the ways to it and back" if case.stages > 1 else "its work"
    return f"the bound of {stage_bound(case, stage):.6g} comes from stage {stage}: {what}"


def _quality(found: Rerouted) -> str:
    if not found.gap:
        return "the plan meets the bound: no plan is shorter"
    least = f"but not below {found.bound:.6g}"
    return f"the plan is {found.gap:.1%} above the bound: a shorter one may exist, {least}"
