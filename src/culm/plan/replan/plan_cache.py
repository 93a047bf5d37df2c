"""Plan cache: a case that was planned before, or that differs from such a case only by the names of its pipelines, is
not planned again."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from culm.plan.replan.greedy_planner import PlanSolution, plan_greedy
from culm.plan.replan.plan_case import PlanCase, Slot
from culm.plan.replan.rebalance_failures import (
    RebalancedFailures,
    optimal_spread,
    rebalance_failures,
    with_failures_by_stage,
)
from culm.schedule import Action

if TYPE_CHECKING:
    from collections.abc import Sequence


_cached_greedy = functools.lru_cache(maxsize=256)(plan_greedy)
"""Plans are values, so a process plans each case once: in a simulation many leaders share this cache."""


class PlanCache:
    """Plans of the cases asked for so far, each computed once. `hits` and `misses` count the lookups.

    Each leader owns one; it is not global. `solve` computes a plan, by default with the greedy planner.
    """

    def __init__(
        self, solve: Callable[[PlanCase], PlanSolution] = _cached_greedy, max_solutions: int | None = None
    ) -> None:
        """`max_solutions`: how many plans are kept; None: all."""
        self._solve, self._max_solutions = solve, max_solutions
        self._solutions: dict[PlanCase, PlanSolution] = {}
        self.hits = 0
        self.misses = 0

    def plan_for(self, case: PlanCase) -> PlanSolution:
        """The plan for exactly the failed slots of the case."""
        order = _canonical_order(case)
        return _restore_names(self._canonical_plan(case, order), case, order)

    def _canonical_plan(self, case: PlanCase, order: Sequence[int]) -> PlanSolution:
        """The plan of a case with its pipelines in this order. Planned once."""
        canonical = replace(case, failed=frozenset(_rename_slots(case.failed, order)))
        solution = self._solutions.pop(canonical, None)
        if solution is not None:
            self.hits += 1
        else:
            self.misses += 1
            solution = self._solve(canonical)
            if self._max_solutions is not None and len(self._solutions) >= self._max_solutions:
                self._solutions.pop(next(iter(self._solutions)), None)  # another thread may have dropped it
        self._solutions[canonical] = solution  # the last one that was used is the last one to be dropped
        return solution

    def plan_after_moves(self, case: PlanCase) -> tuple[PlanSolution, RebalancedFailures]:
        """The plan after rebalancing the failures, and the moves that lead to it; no moves if moving gains nothing."""
        rebalanced = rebalance_failures(case)
        in_place, after_moves = self.plan_for(case), self.plan_for(replace(case, failed=rebalanced.failed))
        if after_moves.step_time < in_place.step_time * (1 - 1e-9):
            return after_moves, rebalanced
        lost = tuple(case.pipelines - len(case.live_pipelines(stage)) for stage in range(case.stages))
        return in_place, RebalancedFailures(lost, (), case.failed, in_place.lower_bound)

    def plan_failure_counts(self, case: PlanCase, failures: int) -> Iterator[PlanSolution]:
        """The plans for 1, 2, ... failures, each optimally spread: those that a cluster may need next.

        A generator, so that the caller can do other work between two plans.
        """
        for lost in range(1, failures + 1):
            yield self.plan_for(with_failures_by_stage(case, optimal_spread(case, lost)))

    def plan_next_losses(
        self, case: PlanCase, slots_by_node: Iterable[Collection[Slot]] | None = None
    ) -> Iterator[PlanSolution]:
        """The plans for the loss of any one more node, with their pipelines in canonical order. Losses that are equal
        up to names have one plan, and are looked up without renaming it.

        `slots_by_node`: the slots that are lost together; default: each slot alone.
        """
        single = [(Slot(pipeline, stage),) for pipeline in range(case.pipelines) for stage in range(case.stages)]
        for slots in single if slots_by_node is None else slots_by_node:
            lost = Counter(slot.stage for slot in slots if slot not in case.failed)
            if lost and all(len(case.live_pipelines(stage)) > count for stage, count in lost.items()):
                after = replace(case, failed=case.failed.union(slots))
                yield self._canonical_plan(after, _canonical_order(after))


def _canonical_order(case: PlanCase) -> tuple[int, ...]:
    """The pipelines in canonical order: by size, then damaged ones last. order[i] is the pipeline that becomes i."""
    damaged: list[list[int]] = [[] for _ in case.micros_by_pipeline]
    for slot in sorted(case.failed):
        damaged[slot.pipeline].append(slot.stage)
    return tuple(sorted(range(case.pipelines), key=lambda d: (-len(case.micros_by_pipeline[d]), damaged[d], d)))


def _rename_slots(failed: frozenset[Slot], order: Sequence[int]) -> Iterator[Slot]:
    place = {pipeline: index for index, pipeline in enumerate(order)}
    return (Slot(place[slot.pipeline], slot.stage) for slot in failed)


def _restore_names(solution: PlanSolution, case: PlanCase, order: Sequence[int]) -> PlanSolution:
    """The plan of the canonical case with the pipeline and micro-batch names of `case`."""
    if list(order) == sorted(order):
        return solution
    P, plan = case.stages, solution.plan
    micro: dict[int | None, int | None] = {None: None}
    for index, pipeline in enumerate(order):
        micro.update(zip(case.micros_by_pipeline[index], case.micros_by_pipeline[pipeline], strict=True))
    slots = [order[worker // P] * P + worker % P for worker in range(len(plan.workers))]
    rows = {slots[worker]: tuple(Action(s, k, micro[m]) for s, k, m in row) for worker, row in enumerate(plan.workers)}
    peaks = dict(zip(slots, solution.peak_activations, strict=True))
    everyone = range(len(slots))
    renamed = replace(
        plan, workers=tuple(rows[w] for w in everyone), failed=tuple(sorted(slots[worker] for worker in plan.failed))
    )
    return replace(solution, case=case, plan=renamed, peak_activations=tuple(peaks[w] for w in everyone))
