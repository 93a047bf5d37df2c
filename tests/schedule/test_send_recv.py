"""Communication is derived from the placement."""

from __future__ import annotations

import pytest

from culm.schedule import (
    SCHEDULES,
    Action,
    ActionWithTransfers,
    Kind,
    Plan,
    TensorTransfer,
    derive_transfers,
    generate_plan,
)


def step(plan: Plan, worker: int, text: str) -> ActionWithTransfers:
    return next(step for step in derive_transfers(plan)[worker] if step.action == Action.parse(text))


def edge(text: str, source: int, target: int) -> TensorTransfer:
    return TensorTransfer(Action.parse(text), source, target)


def test_activations_go_to_the_next_stage_and_gradients_to_the_one_before() -> None:
    plan = generate_plan("1f1b", pipelines=2, stages=3, micro_batches=4)
    assert step(plan, 4, "1F2") == (Action.parse("1F2"), (edge("0F2", 3, 4),), (edge("1F2", 4, 5),))
    assert step(plan, 4, "1B2") == (Action.parse("1B2"), (edge("2B2", 5, 4),), (edge("1B2", 4, 3),))


def test_the_ends_of_the_pipeline_have_only_one_neighbour() -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=2, micro_batches=2)
    assert step(plan, 0, "0F1").receives == ()
    assert step(plan, 0, "0B1").sends == ()
    assert step(plan, 1, "1F1").sends == ()
    assert step(plan, 1, "1B1").receives == ()


def test_a_split_backward_sends_after_its_input_half() -> None:
    plan = generate_plan("zb", pipelines=1, stages=2, micro_batches=2)
    assert step(plan, 1, "1I0").sends == step(plan, 0, "0I0").receives == (edge("1I0", 1, 0),)
    assert step(plan, 1, "1W0") == (Action.parse("1W0"), (), ())


def test_tensors_that_stay_on_a_worker_are_not_sent() -> None:
    alone = generate_plan("interleaved", pipelines=2, stages=1, micro_batches=4, ranges=3)
    assert all(not step.receives and not step.sends for row in derive_transfers(alone) for step in row)


def test_interleaved_ranges_send_from_the_last_stage_back_to_the_first() -> None:
    plan = generate_plan("interleaved", pipelines=1, stages=2, micro_batches=2)
    assert step(plan, 0, "2F1").receives == (edge("1F1", 1, 0),)
    assert step(plan, 1, "1B1").receives == (edge("2B1", 0, 1),)


def test_backward_takes_the_half_or_the_whole_that_the_next_segment_runs() -> None:
    text = """plan mixed: pipelines=1 stages=2 segments=2 micro_batches=2
    0.0: 0F0 0F1 0B0 0B1 0R 0S
    0.1: 1F0 1I0 1W0 1F1 1B1 1R 1S"""
    plan = Plan.from_text(text)
    assert step(plan, 0, "0B0").receives == (edge("1I0", 1, 0),)
    assert step(plan, 0, "0B1").receives == (edge("1B1", 1, 0),)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_edge_is_sent_once_by_its_source_and_received_once_by_its_target(name: str) -> None:
    plan = generate_plan(name, pipelines=2, stages=3, micro_batches=7)
    lowered = derive_transfers(plan)
    assert tuple(tuple(step.action for step in row) for row in lowered) == plan.workers
    sent = [(worker, edge) for worker, row in enumerate(lowered) for step in row for edge in step.sends]
    received = [(worker, edge) for worker, row in enumerate(lowered) for step in row for edge in step.receives]
    assert all(worker == edge.source for worker, edge in sent)
    assert all(worker == edge.target for worker, edge in received)
    assert sorted(edge for _, edge in sent) == sorted(edge for _, edge in received)
    assert len(set(sent)) == len(sent) == 2 * (plan.segments - 1) * 7
    assert all(not step.sends and not step.receives for row in lowered for step in row if step.action.kind in "RSW")
    assert Kind.R in {step.action.kind for step in lowered[0]}
