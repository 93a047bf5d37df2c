"""Backwards in halves where somebody waits for the gradient: the step is shorter, and nothing else is different."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.haste import hastened
from culm.plan.profile import LayerCost
from culm.schedule import SCHEDULES, Action, Kind, Plan, check, generate, timing


def layer(halving_s: float | None) -> LayerCost:
    """F, I and W take a second each."""
    sizes = {"parameter_bytes": 8, "state_bytes": 16, "activation_bytes": 4, "output_bytes": 1}
    return LayerCost(name="layer", forward_s=1.0, input_s=1.0, weight_s=1.0, **sizes, halving_s=halving_s)


def haste(plan: Plan, halving_s: float | None) -> Plan:
    return hastened(plan, [layer(halving_s)] * plan.segments, tuple(range(1, plan.segments)))


def whole(row: tuple[Action, ...]) -> list[Action]:
    """The list with each I, which must come right before its W, and the W as a B."""
    for action, following in pairwise(row):
        assert action.kind is not Kind.I or following == action._replace(kind=Kind.W)
    return [action._replace(kind=Kind.B) if action.kind is Kind.W else action for action in row if action.kind != "I"]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_is_shorter_by_a_w_for_each_stage_but_one(schedule: str, stages: int) -> None:
    plan = generate(schedule, pipelines=1, stages=stages, micro_batches=8)
    assert timing(haste(plan, 0.01)).makespan == timing(plan).makespan - (stages - 1)


def test_under_1f1b_only_the_last_backwards_are_halved_and_never_those_of_the_first_stage() -> None:
    plan = haste(generate("1f1b", pipelines=2, stages=4, micro_batches=16), 0.01)
    halved = [[action.micro for action in row if action.kind is Kind.I] for row in plan.workers]
    assert halved == [[], [5, 6, 7], [5, 6, 7], [5, 6, 7], [], [13, 14, 15], [13, 14, 15], [13, 14, 15]]


@given(
    st.sampled_from([name for name in SCHEDULES if name != "zb"]),
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(3, 12)),
    st.floats(0.0, 2.0),
)
def test_the_order_and_what_is_kept_alive_stay_and_no_step_gets_longer(
    schedule: str, shape: tuple[int, int, int], halving_s: float
) -> None:
    pipelines, stages, micro_batches = shape
    plan = generate(schedule, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
    found = haste(plan, halving_s)
    assert check(found).peak == check(plan).peak
    assert [whole(row) for row in found.workers] == [list(row) for row in plan.workers]
    assert timing(found).makespan <= timing(plan).makespan


@pytest.mark.parametrize("halving_s", [None, 1.0, 50.0], ids=["not known", "all of the gain", "far more"])
def test_nothing_is_halved_that_does_not_pay(halving_s: float | None) -> None:
    plan = generate("1f1b", pipelines=1, stages=4, micro_batches=8)
    assert haste(plan, halving_s) == plan


def test_a_backward_that_is_in_halves_already_is_left_alone() -> None:
    plan = generate("zb", pipelines=1, stages=4, micro_batches=8)
    assert haste(plan, 0.01) == plan
