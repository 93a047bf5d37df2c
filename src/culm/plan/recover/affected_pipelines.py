"""Partial placement: in a large cluster, a loss touches few pipelines. Only their work is placed anew. Pure.

The other pipelines have lost nothing: each of their workers runs what is missing of its usual list, in the usual order,
which cannot deadlock because every action still follows its inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from culm.plan.recover.task_dependencies import StepTask
from culm.schedule import Action, Kind
from culm.schedule.plan_timing import action_costs

if TYPE_CHECKING:
    from culm.plan.recover.lineage import WorkItem
    from culm.plan.recover.place_work import RunnerPool
    from culm.schedule import Plan

LARGE_RECOVERY_ACTIONS = 6_000
"""Recoveries with more actions are placed only in part."""
MAX_HELPING_PIPELINES = 4
"""This many undamaged pipelines share the work of a lost worker in a large cluster."""


@dataclass(frozen=True)
class SplitRecovery:
    """The work items of a recovery, divided into those to place and those that run as usual."""

    items: Sequence[WorkItem]
    """The actions that are to be placed on `pool`."""
    pool: RunnerPool
    """The workers of the affected pipelines."""
    usual_lists: Mapping[int, tuple[StepTask, ...]]
    """By slot of the other pipelines: its task list."""
    usual_work: float = 0.0
    """Time of the longest of these lists, without waits."""

    def merge(self, placed: Sequence[tuple[StepTask, ...]]) -> tuple[tuple[StepTask, ...], ...]:
        """The task lists of all slots from those that were placed."""
        return tuple(self.usual_lists.get(slot, row) for slot, row in enumerate(placed))


def split_recovery(
    items: Sequence[WorkItem], pool: RunnerPool, usual_plan: Plan | None, default_runners: Mapping[tuple[int, int], int]
) -> SplitRecovery:
    """Divide a large recovery; a small one is placed as a whole.

    `usual_plan` has every slot filled. A pipeline is affected if an item of its micro-batches cannot be run by its
    usual worker, or if a worker of it holds the tape of such an item. Undamaged pipelines with the least work left
    are added, so that several can share what was lost.
    """
    if usual_plan is None or sum(len(item.kinds) for item in items) <= LARGE_RECOVERY_ACTIONS:
        return SplitRecovery(items, pool, {})
    pipeline_of = {micro: d for d, micros in enumerate(usual_plan.micros_by_pipeline) for micro in micros}
    affected = _affected_pipelines(items, pool, usual_plan, default_runners, pipeline_of)
    if len(affected) == usual_plan.pipelines:
        return SplitRecovery(items, pool, {})
    placed = [item for item in items if pipeline_of[item.key.micro] in affected]
    usual = [item for item in items if pipeline_of[item.key.micro] not in affected]
    lists = _usual_lists(usual, usual_plan, default_runners)
    price = action_costs(pool.costs, pool.segments)
    work = max((sum(price[task.action.kind][task.action.segment] for task in row) for row in lists.values()), default=0)
    return SplitRecovery(placed, _restrict_pool(pool, affected), lists, work)


def _affected_pipelines(
    items: Sequence[WorkItem],
    pool: RunnerPool,
    plan: Plan,
    default_runners: Mapping[tuple[int, int], int],
    pipeline_of: Mapping[int, int],
) -> set[int]:
    P = plan.stages
    affected: set[int] = set()
    left: Counter[int] = Counter()
    for item in items:
        home, holder = default_runners.get((item.key.segment, item.key.micro)), item.tape_holder
        own = pipeline_of[item.key.micro]
        left[own] += len(item.kinds)
        if item.output_only or home is None or holder not in (None, home) or home // P != own:
            affected |= {own, *(slot // P for slot in (home, holder) if slot is not None)}
    affected |= {slot // P for slot in pool.leaving_workers}
    healthy = sorted(set(range(plan.pipelines)) - affected, key=lambda d: (left[d], d))
    helpers = healthy[:MAX_HELPING_PIPELINES] if affected else []
    affected |= set(helpers)
    for runners in pool.runners.values():  # every stage needs a worker that can run it
        if affected and not any(slot // P in affected for slot in runners):
            affected.add(runners[0] // P)
    return affected


def _restrict_pool(pool: RunnerPool, pipelines: set[int]) -> RunnerPool:
    def within(holders: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        return {
            stage: tuple(slot for slot in slots if slot // pool.stages in pipelines) for stage, slots in holders.items()
        }

    return replace(pool, runners=within(pool.runners), other_holders=within(pool.other_holders))


def _usual_lists(
    items: Sequence[WorkItem], plan: Plan, default_runners: Mapping[tuple[int, int], int]
) -> dict[int, tuple[StepTask, ...]]:
    """The missing actions of each worker in the order of the plan, step by step. An action that the plan runs in
    another form takes its place: I and W that of B, B that of I."""
    missing: defaultdict[int, defaultdict[int, dict[tuple[int, int], tuple[Kind, ...]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for item in items:
        step, segment, micro = item.key
        missing[default_runners[segment, micro]][step][segment, micro] = item.kinds
    return {slot: _usual_list(plan.workers[slot], by_step) for slot, by_step in missing.items()}


def _usual_list(
    row: Sequence[Action], missing_by_step: Mapping[int, Mapping[tuple[int, int], tuple[Kind, ...]]]
) -> tuple[StepTask, ...]:
    found: list[StepTask] = []
    for step in sorted(missing_by_step):
        missing = missing_by_step[step]
        for action in row:
            kinds = missing.get((action.segment, action.micro or 0)) if action.micro is not None else None
            if kinds is not None:
                found += [
                    StepTask(step, action if kind is action.kind else Action(action.segment, kind, action.micro))
                    for kind in _PLACES[action.kind]
                    if kind in kinds
                ]
    return tuple(found)


_PLACES: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.F: (Kind.F,),
    Kind.I: (Kind.I, Kind.B),
    Kind.W: (Kind.W,),
    Kind.B: (Kind.I, Kind.W, Kind.B),
}
"""By kind of a planned action: the kinds of missing actions that take its place."""
