"""Split backwards where another stage waits for the gradient: the step is shorter, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.model.early_grad_send import send_gradients_early
from culm.plan.model.model_profile import LayerCost
from culm.schedule import SCHEDULES, Action, Kind, Plan, check_plan, generate_plan, time_plan


def layer(halving_s: float | None) -> LayerCost:
    """F, I and W take a second each."""
    sizes = {"parameter_bytes": 8, "state_bytes": 16, "activation_bytes": 4, "output_bytes": 1}
    return LayerCost(name="layer", forward_s=1.0, input_s=1.0, weight_s=1.0, **sizes, halving_s=halving_s)


def send_early(plan: Plan, halving_s: float | None) -> Plan:
    return send_gradients_early(plan, [layer(halving_s)] * plan.segments, tuple(range(1, plan.segments)))


def with_whole_backwards(row: tuple[Action, ...]) -> list[Action]:
    """The list with each I and the W that must directly follow it merged into a B."""
    for action, following in pairwise(row):
        assert action.kind is not Kind.I or following == action._replace(kind=Kind.W)
    return [action._replace(kind=Kind.B) if action.kind is Kind.W else action for action in row if action.kind != "I"]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_step_is_shorter_by_one_w_per_stage_except_the_first(schedule: str, stages: int) -> None:
    plan = generate_plan(schedule, pipelines=1, stages=stages, micro_batches=8)
    assert time_plan(send_early(plan, 0.01)).makespan == time_plan(plan).makespan - (stages - 1)


def test_in_1f1b_only_the_last_backwards_are_split_and_never_those_of_the_first_stage() -> None:
    plan = send_early(generate_plan("1f1b", pipelines=2, stages=4, micro_batches=16), 0.01)
    halved = [[action.micro for action in row if action.kind is Kind.I] for row in plan.workers]
    assert halved == [[], [5, 6, 7], [5, 6, 7], [5, 6, 7], [], [13, 14, 15], [13, 14, 15], [13, 14, 15]]


@given(
    st.sampled_from([name for name in SCHEDULES if name != "zb"]),
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(3, 12)),
    st.floats(0.0, 2.0),
)
def test_order_and_live_activations_stay_and_no_step_gets_longer(
    schedule: str, shape: tuple[int, int, int], halving_s: float
) -> None:
    pipelines, stages, micro_batches = shape
    plan = generate_plan(schedule, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
    result = send_early(plan, halving_s)
    assert check_plan(result).max_peak_activations == check_plan(plan).max_peak_activations
    assert [with_whole_backwards(row) for row in result.workers] == [list(row) for row in plan.workers]
    assert time_plan(result).makespan <= time_plan(plan).makespan


@pytest.mark.parametrize("halving_s", [None, 1.0, 50.0], ids=["not known", "all of the gain", "far more"])
def test_backwards_are_not_split_if_it_does_not_pay(halving_s: float | None) -> None:
    plan = generate_plan("1f1b", pipelines=1, stages=4, micro_batches=8)
    assert send_early(plan, halving_s) == plan


def test_a_backward_that_is_already_split_is_not_changed() -> None:
    plan = generate_plan("zb", pipelines=1, stages=4, micro_batches=8)
    assert send_early(plan, 0.01) == plan
