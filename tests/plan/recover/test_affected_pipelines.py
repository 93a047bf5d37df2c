"""Partial placement: in a large recovery only the affected pipelines are placed anew, and every action is run once."""

from __future__ import annotations

from collections import Counter

import pytest

from culm.plan.recover import affected_pipelines
from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.plan.recover.recovery_plan import RecoveryPlan, RecoveryProblem, plan_recovery
from culm.schedule import Kind, Plan, generate_plan
from culm.schedule.plan_timing import time_plan

D, P, M = 8, 2, 32
LOST = 5


def inventories(plan: Plan, progress: float) -> dict[int, WorkerInventory]:
    """What the survivors hold after a share of the step."""
    timeline = time_plan(plan)
    found = {}
    for slot, spans in enumerate(timeline.spans):
        now = progress * timeline.makespan
        done = [span.action for span in spans if span.end <= now and span.action.micro is not None]
        keys = {kind: tuple(WorkKey(0, a.segment, a.micro or 0) for a in done if a.kind is kind) for kind in Kind}
        summed = (*keys[Kind.W], *keys[Kind.B])
        found[slot] = WorkerInventory(
            weight_versions={slot % P: 0},
            tapes_after_forward=tuple(key for key in keys[Kind.F] if key not in (*keys[Kind.I], *summed)),
            tapes_after_input_grad=tuple(key for key in keys[Kind.I] if key not in summed),
            accumulated_grads=summed,
            outputs=keys[Kind.F],
            input_grads=tuple(key for key in (*keys[Kind.I], *keys[Kind.B]) if key.segment),
        )
    del found[LOST]
    return found


def recover(plan: Plan, progress: float) -> RecoveryPlan:
    runners = {stage: tuple(slot for slot in range(stage, D * P, P) if slot != LOST) for stage in range(P)}
    homes = {
        (g, m): d * P + g
        for d, micros in enumerate(plan.micros_by_pipeline)
        for m in micros
        for g in range(P)
        if d * P + g != LOST
    }
    problem = RecoveryProblem(
        stages=P,
        segments=P,
        slot_count=D * P,
        micro_batches=M,
        runners=runners,
        first_open_step=0,
        default_runners=homes,
        usual_plan=plan,
    )
    return plan_recovery(problem, inventories(plan, progress))


@pytest.mark.parametrize("schedule", ["zb", "1f1b"], ids=["split", "whole backwards"])
@pytest.mark.parametrize("progress", [0.1, 0.5, 0.9])
def test_the_same_actions_are_run_as_if_all_were_placed(
    schedule: str, progress: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = generate_plan(schedule, pipelines=D, stages=P, micro_batches=M)
    whole = recover(plan, progress)
    monkeypatch.setattr(affected_pipelines, "LARGE_RECOVERY_ACTIONS", 0)
    monkeypatch.setattr(affected_pipelines, "MAX_HELPING_PIPELINES", 2)
    parts = recover(plan, progress)
    assert _actions(parts) == _actions(whole)
    moved = {
        slot // P
        for slot, row in enumerate(parts.task_lists)
        for _, action, _ in row
        if _pipeline(plan, action) != slot // P
    }
    assert len(moved) <= 2, "only the helpers take work of the lost worker"
    _check_order(parts)


def _actions(plan: RecoveryPlan) -> Counter[tuple[int, str, bool]]:
    return Counter(task for row in plan.task_lists for task in row)


def _pipeline(plan: Plan, action: str) -> int:
    micro = int(action[2:])
    return next(d for d, micros in enumerate(plan.micros_by_pipeline) if micro in micros)


def _check_order(plan: RecoveryPlan) -> None:
    """Every list can be run: repeatedly, some worker can run its next action."""
    pending = [list(row) for row in plan.task_lists]
    to_run = set(_actions(plan))
    progress = True
    while progress:
        progress = False
        for row in pending:
            while row and not any(need in to_run for need in _needs(row[0])):
                to_run.discard(row.pop(0))
                progress = True
    assert not any(pending), "the lists wait for each other"


def _needs(task: tuple[int, str, bool]) -> list[tuple[int, str, bool]]:
    step, action, output_only = task
    segment, kind, micro = int(action[0]), action[1], action[2:]
    names = {"F": [f"{segment - 1}F{micro}"], "I": [f"{segment}F{micro}", f"{segment + 1}I{micro}"]}.get(
        kind, [f"{segment}I{micro}"]
    )
    return [(step, name, only) for name in names for only in (False, True) if (name, only) != (action, output_only)]
