"""Each validity rule: break a valid plan in one place, and the error marks that place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from culm.errors import ScheduleError
from culm.schedule import Action, Kind, Plan, check_plan, forward_only, generate_plan, time_plan

Row = list[Action]
Edit = Callable[[Row], object]


def with_edited_row(plan: Plan, worker: int, edit: Edit) -> Plan:
    rows = [list(row) for row in plan.workers]
    edit(rows[worker])
    return replace(plan, workers=tuple(map(tuple, rows)))


def insert_actions(row: Row, index: int, *texts: str) -> None:
    row[index:index] = map(Action.parse, texts)


def remove_action(row: Row, text: str) -> None:
    row.remove(Action.parse(text))


def move_action(row: Row, text: str, before: str) -> None:
    remove_action(row, text)
    insert_actions(row, row.index(Action.parse(before)), text)


def check_error(plan: Plan, **options: int) -> str:
    with pytest.raises(ScheduleError) as error:
        check_plan(plan, **options)  # type: ignore[arg-type]
    return str(error.value)


PLAN_1F1B = generate_plan("1f1b", pipelines=1, stages=3, micro_batches=4)
PLAN_ZB = generate_plan("zb", pipelines=1, stages=3, micro_batches=4)
TWO_PIPELINES = generate_plan("1f1b", pipelines=2, stages=2, micro_batches=4)


@pytest.mark.parametrize(
    ("plan", "worker", "edit", "cell"),
    [
        (PLAN_1F1B, 1, lambda row: insert_actions(row, 2, "1F0"), "1.  [1F0] <-- here: occurs twice"),
        (
            PLAN_1F1B,
            2,
            lambda row: insert_actions(row, 1, "1F0"),
            "2.  [1F0] <-- here: this worker holds the segments 2",
        ),
        (
            PLAN_1F1B,
            2,
            lambda row: insert_actions(row, 1, "5F0"),
            "2.  [5F0] <-- here: this worker holds the segments 2",
        ),
        (
            PLAN_1F1B,
            0,
            lambda row: insert_actions(row, 1, "0F4"),
            "0.  [0F4] <-- here: this pipeline runs the micro-batches 0 to 3",
        ),
        (
            TWO_PIPELINES,
            2,
            lambda row: insert_actions(row, 0, "0F1"),
            "2.  [0F1] <-- here: this pipeline runs the micro-batches 2 to 3",
        ),
        (PLAN_1F1B, 1, lambda row: remove_action(row, "1F3"), "1.  [] <-- here: 1F3 is missing"),
        (PLAN_1F1B, 1, lambda row: remove_action(row, "1B2"), "1.  [] <-- here: 1B2 is missing"),
        (PLAN_ZB, 1, lambda row: remove_action(row, "1I2"), "1.  [] <-- here: 1I2 is missing"),
        (PLAN_ZB, 1, lambda row: remove_action(row, "1W2"), "1.  [] <-- here: 1W2 is missing"),
        (PLAN_1F1B, 1, lambda row: remove_action(row, "1R"), "1.  [] <-- here: 1R is missing"),
        (PLAN_1F1B, 1, lambda row: remove_action(row, "1S"), "1.  [] <-- here: 1S is missing"),
        (
            PLAN_ZB,
            2,
            lambda row: insert_actions(row, 4, "2B0"),
            "2.  [2I0] <-- here: is a part of 2B0, which is in the list too",
        ),
        (
            PLAN_1F1B,
            2,
            lambda row: insert_actions(row, 1, "2W0"),
            "2.  [2W0] <-- here: is a part of 2B0, which is in the list too",
        ),
        (PLAN_1F1B, 2, lambda row: move_action(row, "2B1", "2F1"), "2.  [2B1] <-- here: needs 2F1, which comes later"),
        (PLAN_ZB, 2, lambda row: move_action(row, "2I1", "2F1"), "2.  [2I1] <-- here: needs 2F1, which comes later"),
        (PLAN_ZB, 2, lambda row: move_action(row, "2W0", "2I0"), "2.  [2W0] <-- here: needs 2I0, which comes later"),
        (PLAN_ZB, 2, lambda row: move_action(row, "2W1", "2W0"), "2.  [2W1] <-- here: needs 2W0, which comes later"),
        (PLAN_1F1B, 0, lambda row: move_action(row, "0B1", "0B0"), "0.  [0B1] <-- here: needs 0B0, which comes later"),
        (PLAN_1F1B, 0, lambda row: move_action(row, "0R", "0B3"), "0.  [0R] <-- here: needs 0B3, which comes later"),
        (PLAN_ZB, 0, lambda row: move_action(row, "0R", "0W3"), "0.  [0R] <-- here: needs 0W3, which comes later"),
        (PLAN_1F1B, 0, lambda row: move_action(row, "0S", "0R"), "0.  [0S] <-- here: needs 0R, which comes later"),
    ],
)
def test_a_violated_rule_is_marked_in_its_cell(plan: Plan, worker: int, edit: Edit, cell: str) -> None:
    message = check_error(with_edited_row(plan, worker, edit))
    row, mark = cell.split(".  ")
    marked = [line for line in message.splitlines() if "<--" in line]
    assert len(marked) == 1
    assert marked[0].startswith(f"  {plan.slot_label(int(row))}: ")
    assert marked[0].endswith(mark)
    assert mark.split("here: ")[1] in message.splitlines()[0]


def test_error_has_one_sentence_and_the_lists_with_the_rest_of_the_row_below_the_mark() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2)
    assert check_error(with_edited_row(plan, 1, lambda row: move_action(row, "1B1", "1F1"))).splitlines() == [
        "1B1 (cell 3 of worker 0.1) breaks the plan: needs 1F1, which comes later",
        "  0.0: 0F0 0F1 0B0 0B1 0R 0S",
        "  0.1: 1F0 1B0 [1B1] <-- here: needs 1F1, which comes later",
        "       1F1 1R 1S",
    ]


def test_a_long_plan_is_shown_around_the_mark() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=40)
    lines = check_error(with_edited_row(plan, 1, lambda row: move_action(row, "1B20", "1F20"))).splitlines()
    assert lines[2].startswith("  0.1: ... 1F16 1B16 ")
    assert lines[2].endswith("[1B20] <-- here: needs 1F20, which comes later")
    assert lines[3].endswith("1F24 ...")
    assert (
        lines[1]
        == "  0.0: ... 0B15 0F17 0B16 0F18 0B17 0F19 0B18 0F20 0B19 0F21 0B20 0F22 0B21 0F23 0B22 0F24 0B23 ..."
    )


@pytest.mark.parametrize("bad", [Action(0, Kind.F), Action(0, Kind.R, 1)])
def test_a_micro_batch_is_needed_where_the_kind_has_one_and_nowhere_else(bad: Action) -> None:
    plan = with_edited_row(PLAN_1F1B, 0, lambda row: row.insert(0, bad))
    assert f"[{bad}] <-- here: R and S have no micro-batch, and all others have one" in check_error(plan)


def test_workers_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    plan = with_edited_row(PLAN_1F1B, 0, lambda row: move_action(row, "0B0", "0F1"))
    message = check_error(plan)
    assert message.splitlines()[0] == (
        "no worker can go on: 0.0 at 0B0 waits for 1B0 of 0.1; 0.1 at 1F1 waits for 0F1 of 0.0"
    )
    assert "0F0 [0B0] <-- here: waits for 1B0 of 0.1" in message
    assert "1F0 [1F1] <-- here: waits for 0F1 of 0.0" in message
    assert message.count("<--") == 2


def test_error_of_a_worker_that_waits_for_itself_names_the_later_action() -> None:
    plan = generate_plan("interleaved", pipelines=1, stages=1, micro_batches=2)
    message = check_error(with_edited_row(plan, 0, lambda row: move_action(row, "1F0", "0F0")))
    assert "[1F0] <-- here: needs 0F0, which comes later" in message


def test_holders_that_reduce_segments_in_different_orders_deadlock() -> None:
    plan = generate_plan("interleaved", pipelines=2, stages=1, micro_batches=2)
    message = check_error(with_edited_row(plan, 1, lambda row: move_action(row, "1R", "0S")))
    assert "0.0 at 1R waits for 1.0 to reach 1R; 1.0 at 0R waits for 0.0 to reach 0R" in message


def test_memory_is_counted_from_forward_to_the_gradient_of_the_weights() -> None:
    assert check_plan(PLAN_1F1B).peak_activations == (3, 2, 1)
    assert check_plan(PLAN_ZB).peak_activations == (3, 3, 3)
    assert check_plan(PLAN_1F1B, max_activations=3).max_peak_activations == 3
    late = with_edited_row(PLAN_ZB, 2, lambda row: move_action(row, "2F3", "2W0"))
    assert check_plan(late).peak_activations == (3, 3, 4)


def test_the_forward_beyond_the_memory_limit_is_marked() -> None:
    message = check_error(PLAN_1F1B, max_activations=2)
    assert "0F0 0F1 [0F2] <-- here: is activation 3 alive at once, but the limit is 2" in message


def test_forward_only_plans_are_valid_only_with_forward_only() -> None:
    plan = forward_only(pipelines=1, stages=2, micro_batches=2)
    assert check_plan(plan, forward_only=True).action_count == 4
    assert "0B0 is missing" in check_error(plan)
    trained = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2)
    assert "[0B0] <-- here: an evaluation has only F" in check_error(trained, forward_only=True)
    assert "0F1 is missing" in check_error(
        with_edited_row(plan, 0, lambda row: remove_action(row, "0F1")), forward_only=True
    )


def test_backward_may_be_whole_for_one_micro_batch_and_in_halves_for_another() -> None:
    def fuse(row: Row) -> None:
        remove_action(row, "2W0")
        row[row.index(Action.parse("2I0"))] = Action.parse("2B0")

    assert check_plan(with_edited_row(PLAN_ZB, 2, fuse)).action_count == check_plan(PLAN_ZB).action_count - 1


def test_timing_refuses_an_unchecked_plan_that_deadlocks() -> None:
    missing = with_edited_row(PLAN_1F1B, 2, lambda row: remove_action(row, "2B3"))
    with pytest.raises(ScheduleError, match=r"\[1B3\] <-- here: needs 2B3, which no worker runs"):
        time_plan(missing)
    with pytest.raises(ScheduleError, match=r"0.0 at 0R waits for 1.0, which does not run 0R later"):
        time_plan(with_edited_row(TWO_PIPELINES, 2, lambda row: remove_action(row, "0R")))
