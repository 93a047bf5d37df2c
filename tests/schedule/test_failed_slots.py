"""Plans with failed slots: peers run their micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from culm.errors import ScheduleError
from culm.schedule import Action, Plan, check_plan, time_plan

REROUTED_PLAN_TEXT = """plan reroute: pipelines=2 stages=2 segments=2 micro_batches=4 failed=1.1
0.0: 0F0 0F1 0B0 0B1 0R 0S
0.1: 1F0 1B0 1F2 1B2 1F1 1B1 1F3 1B3 1R 1S
1.0: 0F2 0F3 0B2 0B3 0R 0S
1.1:
"""
PLAN = Plan.from_text(REROUTED_PLAN_TEXT)


def with_row(worker: int, text: str, plan: Plan = PLAN) -> Plan:
    rows = list(plan.workers)
    rows[worker] = tuple(map(Action.parse, text.split()))
    return replace(plan, workers=tuple(rows))


def test_a_peer_may_run_the_micro_batches_of_a_failed_slot() -> None:
    assert check_plan(PLAN).peak_activations == (2, 1, 2, 0)
    assert PLAN.failed == (3,)
    assert PLAN.orphans_of(1) == (2, 3)
    assert PLAN.orphans_of(0) == ()


def test_failed_slots_round_trip_through_text() -> None:
    assert PLAN.to_text().splitlines() == REROUTED_PLAN_TEXT.splitlines()
    assert Plan.from_text(PLAN.to_text()) == PLAN


def test_a_failed_worker_reduces_nothing_and_its_idle_time_does_not_count() -> None:
    assert PLAN.holders_of(1) == (1,)
    timeline = time_plan(PLAN)
    assert timeline.bubble_fraction == pytest.approx(1 - (6 + 12 + 6) / (3 * timeline.makespan))


@pytest.mark.parametrize(
    ("worker", "row", "note"),
    [
        (3, "1F2 1B2 1R 1S", "this worker has failed and cannot run anything"),
        (1, "1F0 1B0 1F1 1B1 1F2 1B2 1R 1S", "1F3 of a failed worker is missing"),
        (1, "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1R 1S", "1B3 is missing"),
        (1, "1F0 1B0 1F1 1B1 1F3 1B3 1F2 1R 1B2 1S", "needs 1B2, which comes later"),
        (1, "1F0 1B0 1F1 1B1 1B3 1F3 1F2 1B2 1R 1S", "needs 1F3, which comes later"),
        (0, "0F0 0F1 0F2 0B0 0B1 0B2 0R 0S", "this pipeline runs the micro-batches 0 to 1"),
    ],
)
def test_errors_of_peers_are_marked_in_their_cell(worker: int, row: str, note: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check_plan(with_row(worker, row))
    assert f"<-- here: {note}" in str(error.value)


def test_an_orphan_is_run_by_only_one_peer() -> None:
    wide = Plan.from_text(
        "plan twice: pipelines=3 stages=1 segments=1 micro_batches=3 failed=1.0\n"
        "0.0: 0F0 0B0 0F1 0B1 0R 0S\n1.0:\n2.0: 0F2 0B2 0F1 0B1 0R 0S\n"
    )
    with pytest.raises(ScheduleError, match=r"\[0F1\] <-- here: worker 0.0 runs it too"):
        check_plan(wide)
    check_plan(with_row(2, "0F2 0B2 0R 0S", wide))


@pytest.mark.parametrize(
    ("failed", "sentence"),
    [
        ((1, 3), "Plan.failed has every worker of stage 1: leave at least one alive"),
        ((4,), r"Plan.failed is \(4,\): use slot numbers below 4"),
        ((3, 0), r"Plan.failed is \(3, 0\): use slot numbers below 4, ascending"),
    ],
)
def test_invalid_failed_slots_are_refused(failed: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        replace(PLAN, failed=failed)


def test_a_text_with_a_failed_slot_outside_the_shape_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"the failed slot 0\.2 does not exist: use 0\.0 to 1\.1"):
        Plan.from_text(REROUTED_PLAN_TEXT.replace("failed=1.1", "failed=0.2"))
