"""Pipelines that are alike are planned once: one healthy pipeline stands for all, and a failure concerns a few.

That makes a plan for a thousand workers a matter of tenths of a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from culm.plan.bound import bound
from culm.plan.failures import Slot
from culm.plan.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.plan.failures import Case
    from culm.plan.listing import Row

_MANY = 16
"""Helpers beyond what is needed are taken up to this number."""


def solo(case: Case) -> Case:
    """The fullest pipeline of a case by itself, with all of its workers."""
    return replace(case, pipelines=1, micro_batches=len(case.blocks[0]), failed=frozenset())


def copied(case: Case, rows: Sequence[Row]) -> list[Row]:
    """The lists of all pipelines, out of those of the fullest: a smaller one does without the last micro-batch."""
    return [[3 * block.start + code for code in row if code < 3 * len(block)] for block in case.blocks for row in rows]


def concerned(case: Case, healthy: float) -> list[int]:
    """The hurt pipelines, and as many whole ones as it takes to keep the bound of the step where it is.

    Whole pipelines need `healthy` for a step in any case, so a bound below that gains nothing. Where few would do,
    some more are taken: that makes the work of the scheduler easier.
    """
    hurt = sorted({slot.pipeline for slot in case.failed})
    whole = [d for d in range(case.pipelines) if d not in set(hurt)]
    enough = max(healthy, bound(case)) * (1 + 1e-9)

    def too_long(helpers: int) -> bool:
        chosen = sorted(hurt + whole[:helpers])
        return not _alive(case, chosen) or bound(part(case, chosen)) > enough

    helpers = bisect_left(range(len(whole)), True, key=lambda many: not too_long(many))
    return sorted(hurt + whole[: max(helpers, min(2 * helpers, _MANY))])


def _alive(case: Case, pipelines: Sequence[int]) -> bool:
    return all(any(Slot(d, stage) not in case.failed for d in pipelines) for stage in range(case.stages))


def part(case: Case, pipelines: Sequence[int]) -> Case:
    """The case of some of the pipelines, in ascending order, alone."""
    number = {pipeline: index for index, pipeline in enumerate(pipelines)}
    return replace(
        case,
        pipelines=len(pipelines),
        micro_batches=sum(len(case.blocks[d]) for d in pipelines),
        failed=frozenset(Slot(number[slot.pipeline], slot.stage) for slot in case.failed),
    )


def renumbered(case: Case, pipelines: Sequence[int], rows: Sequence[Row]) -> dict[int, Row]:
    """The lists of a part by slot number, under the numbers that slots and micro-batches have in the whole."""
    micro = [3 * number for d in pipelines for number in case.blocks[d]]
    slots = [pipeline * case.stages + stage for pipeline in pipelines for stage in range(case.stages)]
    return {slot: [micro[code // 3] + code % 3 for code in row] for slot, row in zip(slots, rows, strict=True)}


def beside(turns: Turns, healthy: Turns) -> Turns:
    """Two dry runs side by side, of pipelines that meet in R alone."""
    workers, first = 1 + max(turns.workers), len(turns.workers)
    return Turns(
        turns.stages,
        [[*live, *(workers + w for w in other)] for live, other in zip(turns.live, healthy.live, strict=True)],
        turns.finish,
        turns.workers + [workers + w for w in healthy.workers],
        turns.needs + [first + needs if needs >= 0 else -1 for needs in healthy.needs],
        turns.lags + healthy.lags,
        turns.prices + healthy.prices,
    )


def windows(turns: Turns, least: float, tries: int = 4) -> float:
    """A time per step that the dry run can keep under the staggered optimizer: its period, or a little more.

    Stages are shifted against each other in time until the longest window of a stage shrinks no more. Much less work
    than the exact period, which needs a run for every stage.
    """
    begin = _first(turns)
    best = math.inf
    for _ in range(tries):
        ends = turns.ends(begin)
        spent = max(end - start for end, start in zip(ends, begin, strict=True))
        if spent >= best:
            break
        best = spent
        begin = [max(start, end - least) for start, end in zip(begin, ends, strict=True)]
    return best


def _first(turns: Turns) -> list[float]:
    """When the first action of each stage starts, if nothing is held back."""
    begin = [math.inf] * turns.stages
    stage = {worker: stage for stage, live in enumerate(turns.live) for worker in live}
    for worker, start in zip(turns.workers, turns.starts([0.0] * turns.stages), strict=True):
        begin[stage[worker]] = min(begin[stage[worker]], start)
    return begin
