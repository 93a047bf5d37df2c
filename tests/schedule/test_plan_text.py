"""A plan is a plain value with a shape; errors in its file name line and cell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from culm.errors import ScheduleError
from culm.schedule import Action, Kind, Plan, check_plan, generate_plan, split_micro_batches

TEXT = """\
plan 1f1b: pipelines=1 stages=2 segments=2 micro_batches=2
0.0: 0F0 0F1 0B0 0B1 0R 0S
0.1: 1F0 1B0 1F1 1B1 1R 1S
"""


def test_text_has_a_header_and_a_line_for_each_worker() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2)
    assert plan.to_text() == TEXT
    assert Plan.from_text(TEXT) == plan


def test_comments_blank_lines_and_the_order_of_workers_do_not_matter() -> None:
    header, first, second = TEXT.splitlines()
    assert Plan.from_text(f"# made by hand\n\n{header}\n  {second}\n# first\n{first}\n") == Plan.from_text(TEXT)


def test_a_worker_may_have_nothing_to_do_in_a_file() -> None:
    text = "plan idle: pipelines=1 stages=2 segments=2 micro_batches=1\n0.0: 0F0\n0.1:\n"
    assert Plan.from_text(text).to_text() == text


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (TEXT, "", "line 1: '' does not describe a plan"),
        ("plan 1f1b:", "plan:", "line 1: 'plan: pipelines=1"),
        ("stages=2", "stages=two", "line 1: "),
        ("1F1", "1X1", "line 3, cell 3: '1X1' is not an action"),
        ("0.1:", "0.2:", "line 3: '0.2: 1F0 1B0 1F1 1B1 1R 1S' does not belong to a worker without a line"),
        ("0.1:", "0.0:", "line 3: '0.0: 1F0"),
        ("0.1:", "0.1", "line 3: '0.1 1F0"),
        ("stages=2", "stages=3", "there are 2 worker lines: write one for each of 1 pipelines x 3 stages"),
        ("pipelines=1", "pipelines=999999999", "there are 2 worker lines"),
        ("segments=2", "segments=3", "Plan.segments is 3: use a multiple of the 2 stages"),
        ("micro_batches=2", "micro_batches=0", "micro_batches is 0: use a whole number of at least 1"),
    ],
)
def test_a_broken_file_is_refused_with_line_and_cell(old: str, new: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Plan.from_text(TEXT.replace(old, new))
    assert says in str(error.value)


def test_a_csv_has_a_row_for_each_worker_and_a_cell_for_each_action() -> None:
    plan = Plan.from_text(TEXT)
    assert plan.to_csv() == "0F0,0F1,0B0,0B1,0R,0S\n1F0,1B0,1F1,1B1,1R,1S\n"
    assert Plan.from_csv(plan.to_csv(), name="1f1b") == plan


def test_empty_cells_and_carriage_returns_of_torch_are_skipped() -> None:
    plan = Plan.from_csv("0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n", name="1f1b")
    assert plan.with_reduce_and_step() == Plan.from_text(TEXT)


def test_the_pipelines_of_a_csv_are_found_by_their_first_segment() -> None:
    plan = generate_plan("zb", pipelines=3, stages=2, micro_batches=7)
    assert Plan.from_csv(plan.to_csv(), name="zb") == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,1B\n", "line 2, cell 2: '1B' has no micro-batch"),
        ("0F0,0RECV_B0\n", "line 1, cell 2: '0RECV_B0' is communication"),
        ("", "0 of 0 rows have actions of segment 0"),
        ("1F0\n", "0 of 1 rows"),
        ("0F0\n0F1\n1F0\n", "2 of 3 rows have actions of segment 0"),
        ("0F0," + "x" * 200_000, "this is not a CSV of actions"),
    ],
)
def test_a_broken_csv_is_refused_with_line_and_cell(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Plan.from_csv(text)
    assert says in str(error.value)


def test_reduce_and_step_are_added_once_and_replaced_on_a_second_call() -> None:
    plan = generate_plan("interleaved", pipelines=2, stages=2, micro_batches=4)
    bare = replace(plan, workers=tuple(tuple(a for a in row if a.micro is not None) for row in plan.workers))
    assert bare.with_reduce_and_step() == plan
    assert plan.with_reduce_and_step() == plan


def test_reduce_follows_the_last_backward_of_its_segment_and_the_steps_end_the_list() -> None:
    row = generate_plan("interleaved", pipelines=1, stages=1, micro_batches=2).workers[0]
    assert " ".join(map(str, row)) == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 1R 0B1 0R 0S 1S"


def test_the_first_pipelines_get_the_remaining_micro_batches() -> None:
    assert split_micro_batches(3, 8) == (range(3), range(3, 6), range(6, 8))
    assert split_micro_batches(4, 4) == (range(1), range(1, 2), range(2, 3), range(3, 4))


def test_a_segment_belongs_to_the_stage_of_its_number_modulo_the_stages() -> None:
    plan = generate_plan("interleaved", pipelines=2, stages=3, micro_batches=6, ranges=2)
    assert plan.segments == 6
    assert [plan.segments_of(worker) for worker in range(6)] == [(0, 3), (1, 4), (2, 5)] * 2
    assert plan.holders_of(4) == (1, 4)
    assert list(plan.micros_of(4)) == [3, 4, 5]
    assert plan.slot_label(4) == "1.1"


def test_the_placement_names_the_worker_of_each_action_but_reduce_and_step() -> None:
    plan = generate_plan("1f1b", pipelines=2, stages=2, micro_batches=4)
    placement = plan.placement()
    assert placement[Action(1, Kind.B, 3)] == 3
    assert placement[Action(0, Kind.F, 1)] == 0
    assert {action.kind for action in placement} == {Kind.F, Kind.B}
    assert len(placement) == 2 * 4 * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "my plan"}, "Plan.name is 'my plan': use one word"),
        ({"name": ""}, "Plan.name is ''"),
        ({"name": "a\x00"}, "Plan.name is"),
        ({"pipelines": 0}, "pipelines is 0: use a whole number of at least 1"),
        ({"stages": True}, "stages is True"),
        ({"micro_batches": 2.0}, "micro_batches is 2.0"),
        ({"segments": 0}, "Plan.segments is 0"),
        ({"workers": ()}, "Plan.workers has 0 lists: use one for each of 1 pipelines x 2 stages"),
    ],
)
def test_invalid_shapes_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        replace(Plan.from_text(TEXT), **change)  # type: ignore[arg-type]
    assert says in str(error.value)


def test_a_torch_plan_is_valid_after_reduce_and_step_are_added() -> None:
    torch_dump = "0F0,0F1,0F2,,,0B0,0B1,0B2,0REDUCE_GRAD\n,1F0,1B0,1F1,1B1,1F2,1B2,1REDUCE_GRAD\n"
    assert check_plan(Plan.from_csv(torch_dump).with_reduce_and_step()).peak_activations == (3, 1)
