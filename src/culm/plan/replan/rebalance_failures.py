"""Failure normalization: the best distribution of failures over the stages, and the moves that lead to it.

Two failures in one stage cost much more than two in different stages. A worker that copies the layers of another stage
from a peer moves a failure from that stage to its own, so the survivors can choose where the empty slots are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from culm.errors import PlanError
from culm.plan.replan.plan_case import Slot
from culm.plan.replan.step_bound import stage_lower_bound
from culm.text_format import count_noun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from culm.plan.replan.plan_case import PlanCase

FailuresByStage: TypeAlias = tuple[int, ...]
"""How many workers each stage has lost."""

_Cost: TypeAlias = tuple[float, ...]
_StageCost: TypeAlias = Callable[[int, int], _Cost]
"""(stage, failures there) -> the cost; an empty tuple if not allowed."""
_CombineCosts: TypeAlias = Callable[[_Cost, _Cost], _Cost]

_ROUNDING = 1 + 1e-9


class SlotMove(NamedTuple):
    """The worker of slot `source` leaves it and fills `target`, whose layers it copies from a peer there."""

    source: Slot
    target: Slot


@dataclass(frozen=True)
class RebalancedFailures:
    """The failures after moving them to where they cost least."""

    failures_by_stage: FailuresByStage
    moves: tuple[SlotMove, ...]
    """The fewest moves that lead there; each transfers the state of one stage."""
    failed: frozenset[Slot]
    """The empty slots after the moves."""
    lower_bound: float
    """Lower bound of the step with this distribution; no other distribution has a smaller one."""


def rebalance_failures(case: PlanCase) -> RebalancedFailures:
    """Move the failed slots of a case to where the step can be shortest, with the fewest moves."""
    lost = count_failures_by_stage(case.failed, case.stages)
    best = optimal_spread(case, sum(lost), current=lost)
    moves = _slot_moves(case, lost, best)
    left = case.failed.difference(move.target for move in moves).union(move.source for move in moves)
    return RebalancedFailures(best, moves, frozenset(left), _spread_bound(case, best))


def optimal_spread(case: PlanCase, failures: int, *, current: Sequence[int] | None = None) -> FailuresByStage:
    """The best distribution of this many failures, at most D - 1 per stage, by the lower bound of the step.

    Ties: the fewest moves from the distribution `current`, then the most even. The failed slots of the case are
    ignored. Raises PlanError if there are more failures than the stages can lose.
    """
    _check_failure_count(case, failures)
    start = tuple(current or (0,) * case.stages)

    @cache
    def step(stage: int, lost: int) -> _Cost:
        return (stage_lower_bound(_with_stage_failures(case, stage, lost), stage),)

    shortest, _ = _cheapest_spread(case, failures, step, max)

    def effort(stage: int, lost: int) -> _Cost:
        within = step(stage, lost)[0] <= shortest[0] * _ROUNDING
        return (max(0, lost - start[stage]) if current else 0, lost * lost) if within else ()

    return _cheapest_spread(case, failures, effort, _add_costs)[1]


def count_failures_by_stage(failed: Iterable[Slot], stages: int) -> FailuresByStage:
    """How many of the slots are in each stage."""
    lost = Counter(slot.stage for slot in failed)
    return tuple(lost[stage] for stage in range(stages))


def with_failures_by_stage(case: PlanCase, failures_by_stage: Sequence[int]) -> PlanCase:
    """The case with this many failures in each stage, all in the last pipelines. Plans are cached in this form."""
    D = case.pipelines
    return replace(
        case, failed=frozenset(Slot(D - 1 - n, s) for s, many in enumerate(failures_by_stage) for n in range(many))
    )


def _cheapest_spread(
    case: PlanCase, failures: int, stage_cost: _StageCost, combine: _CombineCosts
) -> tuple[_Cost, FailuresByStage]:
    """Dynamic program from the last stage backwards: ahead[n] is the best way to place n failures in later stages."""
    ahead: dict[int, tuple[_Cost, FailuresByStage]] = {0: ((-math.inf,), ())} if combine is max else {0: ((0, 0), ())}
    for stage in reversed(range(case.stages)):
        best: dict[int, tuple[_Cost, FailuresByStage]] = {}
        for lost in range(min(failures, case.pipelines - 1) + 1):
            own_cost = stage_cost(stage, lost)
            for later, (later_cost, chosen) in ahead.items() if own_cost else ():
                candidate = (combine(own_cost, later_cost), (lost, *chosen))
                if lost + later <= failures and (lost + later not in best or candidate < best[lost + later]):
                    best[lost + later] = candidate
        ahead = best
    return ahead[failures]


def _add_costs(one: _Cost, other: _Cost) -> _Cost:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _with_stage_failures(case: PlanCase, stage: int, lost: int) -> PlanCase:
    return with_failures_by_stage(case, [lost if s == stage else 0 for s in range(case.stages)])


def _spread_bound(case: PlanCase, lost: Sequence[int]) -> float:
    return max(stage_lower_bound(_with_stage_failures(case, stage, many), stage) for stage, many in enumerate(lost))


def _slot_moves(case: PlanCase, lost: Sequence[int], best: Sequence[int]) -> tuple[SlotMove, ...]:
    """Moves from stages that can spare a worker into failed slots of stages that cannot.

    Workers leave the pipelines with the most failures, so that as many pipelines as possible stay whole.
    """
    failures_in = Counter(slot.pipeline for slot in case.failed)

    def worst_first(slot: Slot) -> tuple[int, Slot]:
        return -failures_in[slot.pipeline], slot

    sources: list[Slot] = []
    targets: list[Slot] = []
    for stage in range(case.stages):
        change = best[stage] - lost[stage]
        alive = [Slot(pipeline, stage) for pipeline in case.live_pipelines(stage)]
        sources += sorted(alive, key=worst_first)[: max(0, change)]
        holes = sorted((slot for slot in case.failed if slot.stage == stage), key=worst_first, reverse=True)
        targets += holes[: max(0, -change)]
    return tuple(SlotMove(source, target) for source, target in zip(sources, targets, strict=True))


def _check_failure_count(case: PlanCase, failures: int) -> None:
    most = case.stages * (case.pipelines - 1)
    if not 0 <= failures <= most:
        raise PlanError(
            f"failures is {failures}: {count_noun(case.stages, 'stage')} on {count_noun(case.pipelines, 'pipeline')} "
            f"can lose 0 to {most} workers, because each stage needs a holder of its layers"
        )
