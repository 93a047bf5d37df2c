"""Handoff: a worker with notice finishes what it has started, if there is time, and sends its sums to a staying one."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.recover.interrupted_run import interrupt_and_recover, replay_recovery

from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.plan.recover.recovery_plan import RecoveryPlan, RecoveryProblem, plan_recovery
from culm.schedule import generate_plan

STEP, MICRO_BATCHES = 5, 4
VERSIONS = [{0: STEP}, {1: STEP}, {0: STEP}, {1: STEP}]


def work_keys(segment: int, *micros: int) -> tuple[WorkKey, ...]:
    return tuple(WorkKey(STEP, segment, micro) for micro in micros)


def recover_with_leaver(begun: int, summed: int, patience: float = math.inf) -> RecoveryPlan:
    """2 x 2: the first worker, which is leaving, has summed some of the micro-batches of its pipeline and started
    others; everything that it sent has been used."""
    done, tapes = range(summed), range(summed, summed + begun)
    inventories = {
        0: WorkerInventory(
            weight_versions=VERSIONS[0],
            tapes_after_forward=work_keys(0, *tapes),
            accumulated_grads=work_keys(0, *done),
            outputs=work_keys(0, *done, *tapes),
            input_grads=work_keys(0, *done),
        ),
        1: WorkerInventory(
            weight_versions=VERSIONS[1],
            tapes_after_forward=work_keys(1, *tapes),
            accumulated_grads=work_keys(1, *done),
            outputs=work_keys(1, *done, *tapes),
            input_grads=work_keys(1, *done),
        ),
        2: WorkerInventory(weight_versions=VERSIONS[2]),
        3: WorkerInventory(weight_versions=VERSIONS[3]),
    }
    problem = RecoveryProblem(
        stages=2,
        segments=2,
        slot_count=4,
        micro_batches=MICRO_BATCHES,
        runners={0: (2,), 1: (1, 3)},
        first_open_step=STEP,
        leaving_slots=[0],
        time_left=patience,
    )
    return plan_recovery(problem, inventories)


def actions(recovery: RecoveryPlan, slot: int) -> list[str]:
    return [action for _, action, _ in recovery.task_lists[slot]]


@pytest.mark.parametrize(("begun", "summed"), [(b, s) for b in range(3) for s in range(3) if b + s])
def test_with_enough_time_a_leaving_worker_finishes_its_work_and_nothing_is_redone(begun: int, summed: int) -> None:
    result = recover_with_leaver(begun, summed)
    assert sorted(actions(result, 0)) == sorted(f"0{kind}{m}" for m in range(summed, summed + begun) for kind in "IW")
    assert result.redone_actions == 0
    run = sorted(action for slot in range(4) for action in actions(result, slot) if action.startswith("0W"))
    assert run == [f"0W{micro}" for micro in range(summed, MICRO_BATCHES)]


def test_inputs_of_a_leaving_worker_are_run_first() -> None:
    result = recover_with_leaver(begun=2, summed=0)
    assert {"1I0", "1I1"} == {action for action in actions(result, 1)[:4] if "I" in action}


@pytest.mark.parametrize(("begun", "summed", "given"), [(0, 1, True), (1, 0, True), (0, 0, False)])
def test_sums_of_a_leaving_worker_go_to_a_staying_runner(begun: int, summed: int, given: bool) -> None:
    assert recover_with_leaver(begun, summed).partial_sum_transfers == (((STEP, 0, 0, 2),) if given else ())


def test_without_time_started_micro_batches_are_redone_but_sums_are_still_sent() -> None:
    result = recover_with_leaver(begun=1, summed=1, patience=0.0)
    assert actions(result, 0) == []
    assert {"0F1", "0W1"} <= set(actions(result, 2))
    assert "0W0" not in actions(result, 2)
    assert result.redone_actions == 1
    assert result.partial_sum_transfers == ((STEP, 0, 0, 2),)


def test_a_leaving_worker_finishes_as_many_micro_batches_as_it_has_time_for() -> None:
    whole = len(actions(recover_with_leaver(begun=2, summed=0), 0))
    ended = [len(actions(recover_with_leaver(begun=2, summed=0, patience=units), 0)) for units in range(12)]
    assert ended == sorted(ended)
    assert {0, whole // 2, whole} == set(ended)


def test_no_worker_waits_for_a_leaving_one_to_end_the_step() -> None:
    result = recover_with_leaver(begun=1, summed=1)
    assert result.weight_versions[0] == {}
    assert 0 not in result.slots_behind(STEP)
    assert result.runners == {STEP: ((2,), (1, 3))}


def test_recomputed_tensors_are_placed_after_their_inputs() -> None:
    """2 x 2: of micro-batch 0 only the sum of stage 1 is left. So stage 0 runs its forward, and stage 1 runs its own
    only for the gradient. No leaving worker waits for that, so it must not be placed before the forward."""
    inventories = {
        2: WorkerInventory(weight_versions=VERSIONS[2], tapes_after_forward=work_keys(0, 1), outputs=work_keys(0, 1)),
        3: WorkerInventory(
            weight_versions={0: STEP, 1: STEP},
            tapes_after_forward=work_keys(1, 1),
            outputs=work_keys(1, 1),
            accumulated_grads=work_keys(1, 0),
        ),
    }
    runners = {0: (3,), 1: (3,)}
    problem = RecoveryProblem(
        stages=2, segments=2, slot_count=4, micro_batches=2, runners=runners, first_open_step=STEP, leaving_slots=[2]
    )
    result = plan_recovery(problem, inventories)
    order = actions(result, 3)
    assert order.index("1I1") < order.index("0F0") < order.index("1F0") < order.index("1I0")
    assert actions(result, 2) == ["0I1", "0W1"]


@given(
    shape=st.sampled_from([(1, 2, 2), (1, 3, 3), (2, 2, 4), (2, 3, 4), (3, 2, 5)]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb"]),
    strategy=st.sampled_from(["shadow", "shadow-lazy", "reroute"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_lists_are_runnable_and_every_gradient_is_added_once_for_any_leaving_workers(
    shape: tuple[int, int, int], schedule: str, strategy: str, seed: int
) -> None:
    D, P, M = shape
    plan = generate_plan(schedule, pipelines=D, stages=P, micro_batches=M)
    case = interrupt_and_recover(plan, Random(seed), strategy, notices=True)
    workers = replay_recovery(case)
    complete = {(step, g) for step, g, _ in case.recovery.complete_sums}
    for step in case.recovery.steps:
        for g in (g for g in range(plan.segments) if (step, g) not in complete):
            givers = [
                giver for at, segment, giver, _ in case.recovery.partial_sum_transfers if (at, segment) == (step, g)
            ]
            adding = {*case.recovery.runners[step][g], *givers}
            both = [
                key
                for slot in adding
                for key in (*case.inventories[slot].accumulated_grads, *workers[slot].accumulated_grads)
            ]
            added = Counter(key.micro for key in both if (key.step, key.segment) == (step, g))
            assert added == Counter(range(M)), (step, g, added)
