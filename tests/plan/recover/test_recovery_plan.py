"""Recovery from any interrupted run: carried out without tensors, it completes every open step."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.recover.interrupted_run import RecoveredRun, interrupt_and_recover, replay_recovery

from culm.plan.recover.lineage import WorkerInventory, WorkKey, find_missing_work
from culm.plan.recover.recovery_plan import RecoveryProblem, find_discarded_sums, plan_recovery
from culm.schedule import Kind, generate_plan

SHAPES = [(1, 2, 2), (1, 3, 3), (2, 2, 4), (2, 3, 4), (3, 2, 5)]


@st.composite
def recovered_runs(draw: st.DrawFn) -> RecoveredRun:
    """A plan, a strategy that leaves a holder for lost layers, and a point of interruption."""
    D, P, M = draw(st.sampled_from(SHAPES))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb", "interleaved"]))
    strategy = draw(st.sampled_from(["shadow", "shadow-lazy"] if D == 1 else ["shadow", "shadow-lazy", "reroute"]))
    M += -M % (D * P) if schedule == "interleaved" else 0
    plan = generate_plan(schedule, pipelines=D, stages=P, micro_batches=M, ranges=2 if schedule == "interleaved" else 1)
    return interrupt_and_recover(plan, Random(draw(st.integers(0, 2**32 - 1))), strategy)


@given(recovered_runs())
def test_lists_are_runnable_with_kept_and_sent_tensors_and_every_gradient_is_added_once(
    case: RecoveredRun,
) -> None:
    workers = replay_recovery(case)
    complete = {(step, g) for step, g, _ in case.recovery.complete_sums}
    for step, g in product(case.recovery.steps, range(case.plan.segments)):
        if (step, g) in complete:
            continue
        runners = case.recovery.runners[step][g]
        before = [case.inventories[slot].accumulated_grads for slot in runners]
        after = [workers[slot].accumulated_grads for slot in runners]
        keys = [key for some in (*before, *after) for key in some if (key.step, key.segment) == (step, g)]
        added = Counter(key.micro for key in keys)
        assert added == Counter(range(case.plan.micro_batches)), (step, g, added)


@given(recovered_runs())
def test_only_holders_run_anything_and_only_runners_add_to_sums(case: RecoveredRun) -> None:
    for slot, row in enumerate(case.recovery.task_lists):
        for task in case.recovery.tasks_of(slot) if row else ():
            stage = task.action.segment % case.plan.stages
            assert stage in case.inventories[slot].weight_versions
            assert task.output_only or slot in case.recovery.runners[task.step][task.action.segment]


@given(recovered_runs())
def test_every_reduced_sum_has_a_contribution(case: RecoveredRun) -> None:
    for step, by_segment in case.recovery.runners.items():
        for g, adding in enumerate(by_segment):
            assert set(adding) <= set(case.problem.runners[g % case.plan.stages])
            for slot in adding if len(adding) > 1 else ():
                tasks = case.recovery.tasks_of(slot)
                ran = [t.action.segment for t in tasks if t.step == step and t.action.kind in (Kind.W, Kind.B)]
                before = [key.segment for key in case.inventories[slot].accumulated_grads if key.step == step]
                assert g in (*ran, *before)


@given(recovered_runs())
def test_exactly_the_missing_items_are_run_each_once_by_one_worker_in_order(case: RecoveredRun) -> None:
    """Tapes and sums of shadows that are not needed do not count."""
    usable = {slot: _usable_inventory(case, slot) for slot in case.inventories}
    requested = partial(find_missing_work, segments=case.plan.segments, micro_batches=case.plan.micro_batches)
    wanted = [
        Counter(
            (item.key, item.kinds, item.output_only)
            for item in requested(usable, case.recovery.steps, split=split).items
        )
        for split in {case.problem.split, True}
    ]
    result: Counter[tuple[WorkKey, tuple[Kind, ...], bool]] = Counter()
    for slot in case.inventories:
        by_lot: dict[tuple[WorkKey, bool], list[Kind]] = {}
        for step, action, again in case.recovery.tasks_of(slot):
            key = WorkKey(step, action.segment, action.micro or 0)
            by_lot.setdefault((key, again), []).append(action.kind)
        result.update((key, tuple(kinds), again) for (key, again), kinds in by_lot.items())
    assert result in wanted


def _usable_inventory(case: RecoveredRun, slot: int) -> WorkerInventory:
    def run(keys: tuple[WorkKey, ...]) -> tuple[WorkKey, ...]:
        return tuple(c for c in keys if slot in case.problem.runners[c.segment % case.plan.stages])

    have = case.inventories[slot]
    return WorkerInventory(
        weight_versions=have.weight_versions,
        tapes_after_forward=run(have.tapes_after_forward),
        tapes_after_input_grad=run(have.tapes_after_input_grad),
        accumulated_grads=run(have.accumulated_grads),
        outputs=have.outputs,
        input_grads=have.input_grads,
        complete_sums=have.complete_sums,
    )


@given(recovered_runs())
def test_a_worker_without_a_sum_gets_it_from_the_reduction_a_holder_or_its_shadow_source(case: RecoveredRun) -> None:
    recovery = case.recovery
    replicas = {(replica.slot, replica.stage): replica for replica in case.roles.shadows if not replica.needs_copy}
    for step, g in product(recovery.steps, range(case.plan.segments)):
        stage = g % case.plan.stages
        giver, lacking = recovery.holder_of_sum(step, g), recovery.slots_missing_sum(step, stage)
        if giver is not None:
            assert (step, g) in case.inventories[giver].complete_sums
            continue
        adding = recovery.runners[step][g]
        assert set(adding) <= set(lacking), "workers that reduce have not stepped yet"
        for slot in set(lacking) - set(case.problem.runners[stage]):
            assert replicas[slot, stage].source in case.problem.runners[stage]


@given(recovered_runs())
def test_no_forward_of_a_step_comes_before_the_gradients_of_the_step_before_in_its_stage(case: RecoveredRun) -> None:
    for slot in case.inventories:
        newest: dict[int, int] = {}
        for step, action, again in case.recovery.tasks_of(slot):
            stage = action.segment % case.plan.stages
            if not again:
                assert step >= newest.get(stage, step), f"slot {slot} goes back to step {step}"
                newest[stage] = step


@given(recovered_runs())
def test_the_recovery_is_deterministic(case: RecoveredRun) -> None:
    """Every leader computes the same recovery, also if the reports arrive in another order."""
    assert plan_recovery(case.problem, dict(reversed(case.inventories.items()))) == case.recovery


def test_of_overlapping_sums_the_larger_counts_and_the_rest_of_the_other_is_redone() -> None:
    """Slot 0 stood in, slot 2 recomputed its part, and now both run stage 0. Slot 4 has no part of it twice."""
    problem = RecoveryProblem(
        stages=2, segments=2, slot_count=6, micro_batches=6, runners={0: (0, 2, 4), 1: (1,)}, first_open_step=5
    )
    summed = {0: (0, 1), 2: (1, 2, 3), 4: (4,)}
    inventories = {
        slot: WorkerInventory(weight_versions={0: 5}, accumulated_grads=_cells(0, *micros))
        for slot, micros in summed.items()
    }
    inventories[1] = WorkerInventory(
        weight_versions={1: 5}, accumulated_grads=_cells(1, *range(6)), input_grads=_cells(1, *range(6))
    )
    result = plan_recovery(problem, inventories)
    assert result.discarded == ((5, 0, 0),)
    run = sorted(action for row in result.task_lists for _, action, _ in row if action.startswith("0W"))
    assert run == ["0W0", "0W5"]


def test_the_sum_of_an_unused_shadow_is_kept() -> None:
    """Slot 2 holds stage 0 and does not run it: if slot 0 is lost, its sum counts again."""
    problem = RecoveryProblem(stages=1, segments=1, slot_count=3, micro_batches=2, runners={0: (0,)}, first_open_step=5)
    inventories = {slot: WorkerInventory(weight_versions={0: 5}, accumulated_grads=_cells(0, 0)) for slot in (0, 2)}
    result = plan_recovery(problem, inventories)
    assert result.discarded == ()
    assert result.runners == {5: ((0,),)}


@pytest.mark.parametrize("micros", [(0, 1), (1,)])
def test_a_leaving_worker_sends_no_sum_that_others_have_recomputed(micros: tuple[int, ...]) -> None:
    problem = RecoveryProblem(
        stages=1, segments=1, slot_count=3, micro_batches=3, runners={0: (0,)}, first_open_step=5, leaving_slots=[2]
    )
    inventories = {
        0: WorkerInventory(weight_versions={0: 5}, accumulated_grads=_cells(0, 0, 1)),
        2: WorkerInventory(weight_versions={0: 5}, accumulated_grads=_cells(0, *micros)),
    }
    result = plan_recovery(problem, inventories)
    assert result.discarded == ((5, 0, 2),)
    assert result.partial_sum_transfers == ()


def test_a_sum_that_contains_a_micro_batch_twice_is_discarded() -> None:
    """The worker's own micro-batches and a sum that it received before it could clear its own."""
    inventories = {0: WorkerInventory(accumulated_grads=_cells(0, 0, 1, 1))}
    assert find_discarded_sums(inventories, inventories, {}) == {(5, 0, 0)}


def _cells(segment: int, *micros: int) -> tuple[WorkKey, ...]:
    return tuple(WorkKey(5, segment, micro) for micro in micros)


def test_without_a_started_step_there_is_nothing_to_complete() -> None:
    problem = RecoveryProblem(
        stages=2, segments=2, slot_count=2, micro_batches=2, runners={0: (0,), 1: (1,)}, first_open_step=5
    )
    result = plan_recovery(
        problem, {0: WorkerInventory(weight_versions={0: 5}), 1: WorkerInventory(weight_versions={1: 5})}
    )
    assert (result.steps, result.task_lists, result.redone_actions) == ((), ((), ()), 0)


def test_redone_actions_are_those_finished_before() -> None:
    """One of two stages is lost after its forward: that forward is run again; its backward had not been run."""
    key = WorkKey(0, 0, 0)
    problem = RecoveryProblem(
        stages=2, segments=2, slot_count=4, micro_batches=1, runners={0: (2,), 1: (1, 3)}, first_open_step=0
    )
    left = {
        1: WorkerInventory(
            weight_versions={1: 0}, tapes_after_forward=(key._replace(segment=1),), outputs=(key._replace(segment=1),)
        ),
        2: WorkerInventory(weight_versions={0: 0}),
        3: WorkerInventory(weight_versions={1: 0}),
    }
    result = plan_recovery(problem, left)
    assert [str(task.action) for slot in range(4) for task in result.tasks_of(slot)] == [
        "1I0",
        "1W0",
        "0F0",
        "0I0",
        "0W0",
    ]
    assert result.redone_actions == 1
