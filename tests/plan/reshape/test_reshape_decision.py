"""When a shape changes: after a while of quiet, within what the model and the strategy allow, by what is known then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from culm.plan import DEFAULT_BANDWIDTH, Slot
from culm.plan.reshape.reconfigure_policy import PipelineLayout, ReconfigureState
from culm.plan.reshape.reshape_decision import (
    SETTLE_S,
    SETTLE_STEPS,
    RunSpeed,
    SettleTimer,
    ShapeLimits,
    decide_reshape,
    estimate_reshape_costs,
    reshape_options,
    settle_steps,
)

REROUTE_LIMITS = ShapeLimits(min_depth=2, max_depth=12)
RUN_SPEED = RunSpeed(
    measured_step_s=2.0, predicted_step_s=1.0, remaining_s=600.0, time_between_losses_s=math.inf, state_bytes=0.0
)


def reconfigure_state(
    pipelines: int, stages: int, *, gone: tuple[Slot, ...] = (), standby: int = 0
) -> ReconfigureState:
    slots = {Slot(d, s): f"n{d}.{s}" for d in range(pipelines) for s in range(stages)}
    alive = {node: "" for slot, node in slots.items() if slot not in gone}
    alive |= {f"new{i}": "" for i in range(standby)}
    return ReconfigureState(zone_by_node=alive, node_by_slot=slots, depths=(stages,) * pipelines)


STATE_WITH_EMPTY_SLOT = reconfigure_state(3, 4, gone=(Slot(1, 2),))


def test_it_is_judged_once_and_only_when_it_has_been_quiet_for_long_enough() -> None:
    quiet = SettleTimer()
    quiet.observe("eleven nodes", 7, 0.0)
    assert not quiet.is_due(7 + SETTLE_STEPS - 1, 1.0)
    quiet.observe("eleven nodes", 7 + SETTLE_STEPS, 1.0)
    assert quiet.is_due(7 + SETTLE_STEPS, 1.0)
    quiet.is_decided = True
    assert not quiet.is_due(7 + 2 * SETTLE_STEPS, 2.0)


def test_a_join_or_a_loss_restarts_the_settle_time() -> None:
    quiet = SettleTimer()
    quiet.observe("eleven nodes", 7, 0.0)
    quiet.is_decided = True
    quiet.observe("ten nodes", 20, 2.0)
    assert not quiet.is_due(20, 2.0)
    assert quiet.is_due(20 + SETTLE_STEPS, 3.0)


def test_where_steps_are_long_one_of_them_is_quiet_enough() -> None:
    quiet = SettleTimer()
    quiet.observe("eleven nodes", 7, 100.0)
    assert not quiet.is_due(7, 100.0 + SETTLE_S)
    assert not quiet.is_due(8, 99.0 + SETTLE_S)
    assert quiet.is_due(8, 100.0 + SETTLE_S)
    assert [settle_steps(step_s) for step_s in (0.0, 1.0, SETTLE_S / 2, SETTLE_S, 9 * SETTLE_S)] == [
        SETTLE_STEPS,
        SETTLE_STEPS,
        2,
        1,
        1,
    ]


def test_peers_that_protect_are_not_given_up_and_shadows_need_none() -> None:
    two = reconfigure_state(2, 4, gone=(Slot(0, 1), Slot(0, 2), Slot(0, 3)))
    assert all(len(layout.depths) > 1 for layout in reshape_options(two, REROUTE_LIMITS))
    assert any(
        len(layout.depths) == 1 for layout in reshape_options(two, replace(REROUTE_LIMITS, allows_one_pipeline=True))
    )


def test_only_what_fits_the_model_is_offered() -> None:
    found = reshape_options(STATE_WITH_EMPTY_SLOT, replace(REROUTE_LIMITS, min_depth=3, max_depth=5))
    assert {depth for layout in found for depth in layout.depths} <= {3, 4, 5}
    assert any(len(set(layout.depths)) > 1 for layout in found)
    assert all(
        len(set(layout.depths)) == 1
        for layout in reshape_options(STATE_WITH_EMPTY_SLOT, replace(REROUTE_LIMITS, equal_depths=True))
    )


def test_predictions_are_as_far_off_as_that_of_the_running_plan_was() -> None:
    ahead = estimate_reshape_costs(
        STATE_WITH_EMPTY_SLOT,
        reshape_options(STATE_WITH_EMPTY_SLOT, REROUTE_LIMITS),
        RUN_SPEED,
        lambda layout: 1.5 if layout.depths == (4, 4, 3) else 9.0,
        100.0,
    )
    assert ahead.step_s_by_layout[PipelineLayout((4, 4, 3))] == 3.0
    assert ahead.step_s_by_layout[STATE_WITH_EMPTY_SLOT.layout] == 2.0
    assert ahead.next_loss_at == 700.0


@pytest.mark.parametrize(("calm", "until"), [(60.0, 60.0), (math.inf, 600.0)])
def test_the_horizon_is_the_next_loss_or_the_end(calm: float, until: float) -> None:
    ahead = estimate_reshape_costs(
        STATE_WITH_EMPTY_SLOT,
        reshape_options(STATE_WITH_EMPTY_SLOT, REROUTE_LIMITS),
        replace(RUN_SPEED, time_between_losses_s=calm),
        lambda _: 1.0,
        0.0,
    )
    assert ahead.next_loss_at == until


def test_a_change_is_taken_to_last_as_long_as_the_last_one_did() -> None:
    moving = replace(RUN_SPEED, state_bytes=5 * DEFAULT_BANDWIDTH)
    assert moving.expected_reshape_s == 5 + 2.0 / 2
    assert replace(moving, measured_reshape_s=0.5).expected_reshape_s == 0.5 + 2.0 / 2


def test_bamboos_rule_ignores_costs() -> None:
    two = reconfigure_state(3, 4, gone=(Slot(0, 1), Slot(1, 2)))
    among = reshape_options(two, REROUTE_LIMITS)
    ahead = estimate_reshape_costs(two, among, RUN_SPEED, lambda _: 50.0, 0.0)
    assert decide_reshape("bamboo", two, among, ahead, 0.0)[0].layout == PipelineLayout((4, 4))
    assert not decide_reshape("cost", two, among, ahead, 0.0)[0].changes_shape
