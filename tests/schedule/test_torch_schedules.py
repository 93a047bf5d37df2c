"""culm's schedules have the order of torch.distributed.pipelining. Skipped if torch's private helpers are missing."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace
from typing import Any

import pytest

from culm.schedule import Kind, Plan, check_plan, generate_plan


def torch_helper(*path: str) -> Any:
    result: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in path:
        result = getattr(result, name, None)
    if result is None:
        pytest.skip(f"torch has no {'.'.join(path)} any more")
    return result


def compute_actions(plan: Plan, rank: int) -> list[str]:
    return [str(action) for action in plan.workers[rank] if action.kind not in (Kind.R, Kind.S)]


def torch_actions(actions: list[Any]) -> list[str]:
    return [str(action) for action in actions if action is not None and action.microbatch_index is not None]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 2), (4, 3), (4, 9)])
def test_gpipe_has_the_order_of_torch(stages: int, micro_batches: int) -> None:
    theirs = torch_helper("ScheduleGPipe", "_get_pipeline_order")(
        SimpleNamespace(_num_stages=stages, _n_microbatches=micro_batches)
    )
    ours = generate_plan("gpipe", pipelines=1, stages=stages, micro_batches=micro_batches)
    assert [compute_actions(ours, rank) for rank in range(stages)] == [
        torch_actions(theirs[rank]) for rank in range(stages)
    ]


@pytest.mark.parametrize(("name", "split"), [("1f1b", False), ("zb", True)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 2), (4, 3), (4, 9)])
def test_1f1b_and_zero_bubble_have_the_order_of_torch(name: str, split: bool, stages: int, micro_batches: int) -> None:
    ours = generate_plan(name, pipelines=1, stages=stages, micro_batches=micro_batches)
    warmup_ops, rank_ops = torch_helper("_get_warmup_ops"), torch_helper("_get_1f1b_rank_ops")
    for rank in range(stages):
        warm = warmup_ops(rank, 1, micro_batches, stages, micro_batches, multiply_factor=1)

        def stage_index(_: int, rank: int = rank) -> int:
            return rank

        counts = (1, stages, warm, micro_batches - warm, warm, rank)
        theirs = rank_ops(*counts, stage_index, stage_index, rank, enable_zero_bubble=split)
        assert compute_actions(ours, rank) == torch_actions(theirs)


@pytest.mark.parametrize(("stages", "micro_batches", "ranges"), [(2, 4, 2), (4, 8, 3), (4, 10, 2), (4, 3, 2)])
def test_interleaved_has_the_order_of_torch(stages: int, micro_batches: int, ranges: int) -> None:
    rounds = max(1, micro_batches // stages)
    asked = SimpleNamespace(
        n_local_stages=ranges,
        microbatches_per_round=micro_batches // rounds,
        pp_group_size=stages,
        _n_microbatches=micro_batches,
    )
    theirs = [
        torch_helper("ScheduleInterleaved1F1B", "_calculate_single_rank_operations")(asked, rank)
        for rank in range(stages)
    ]
    ours = generate_plan("interleaved", pipelines=1, stages=stages, micro_batches=micro_batches, ranges=ranges)
    assert [compute_actions(ours, rank) for rank in range(stages)] == [torch_actions(actions) for actions in theirs]
    dump = io.StringIO(newline="")
    csv.writer(dump).writerows(theirs)
    read = Plan.from_csv(dump.getvalue(), name="interleaved").with_reduce_and_step()
    assert read == ours
    assert check_plan(read).action_count == sum(map(len, ours.workers))
