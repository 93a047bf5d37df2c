"""When a shape changes: after a while of quiet, within what the model and the strategy allow, by what is known then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from culm.plan import BANDWIDTH, Slot
from culm.plan.reconfigure import Layout, State
from culm.plan.reshape import QUIET, QUIET_S, Bounds, Pace, Quiet, judge, offers, outlook, patience

PEERS = Bounds(strategy="reroute", shallowest=2, deepest=12)
PACE = Pace(lately_s=2.0, running_s=1.0, left_s=600.0, calm_s=math.inf, state_bytes=0.0)


def cluster(pipelines: int, stages: int, *, gone: tuple[Slot, ...] = (), standby: int = 0) -> State:
    slots = {Slot(d, s): f"n{d}.{s}" for d in range(pipelines) for s in range(stages)}
    alive = {node: "" for slot, node in slots.items() if slot not in gone}
    alive |= {f"new{i}": "" for i in range(standby)}
    return State(alive=alive, slots=slots, depths=(stages,) * pipelines)


HURT = cluster(3, 4, gone=(Slot(1, 2),))


def test_it_is_judged_once_and_only_when_it_has_been_quiet_for_long_enough() -> None:
    quiet = Quiet()
    quiet.look("eleven nodes", 7, 0.0)
    assert not quiet.due(7 + QUIET - 1, 1.0)
    quiet.look("eleven nodes", 7 + QUIET, 1.0)
    assert quiet.due(7 + QUIET, 1.0)
    quiet.judged = True
    assert not quiet.due(7 + 2 * QUIET, 2.0)


def test_whoever_comes_or_goes_begins_the_wait_anew() -> None:
    quiet = Quiet()
    quiet.look("eleven nodes", 7, 0.0)
    quiet.judged = True
    quiet.look("ten nodes", 20, 2.0)
    assert not quiet.due(20, 2.0)
    assert quiet.due(20 + QUIET, 3.0)


def test_where_steps_are_long_one_of_them_is_quiet_enough() -> None:
    quiet = Quiet()
    quiet.look("eleven nodes", 7, 100.0)
    assert not quiet.due(7, 100.0 + QUIET_S)
    assert not quiet.due(8, 99.0 + QUIET_S)
    assert quiet.due(8, 100.0 + QUIET_S)
    assert [patience(step_s) for step_s in (0.0, 1.0, QUIET_S / 2, QUIET_S, 9 * QUIET_S)] == [QUIET, QUIET, 2, 1, 1]


def test_peers_that_protect_are_not_given_up_and_shadows_need_none() -> None:
    two = cluster(2, 4, gone=(Slot(0, 1), Slot(0, 2), Slot(0, 3)))
    assert all(len(layout.depths) > 1 for layout in offers(two, PEERS))
    assert any(len(layout.depths) == 1 for layout in offers(two, replace(PEERS, strategy="shadow")))


def test_only_what_fits_the_model_is_offered() -> None:
    found = offers(HURT, replace(PEERS, shallowest=3, deepest=5))
    assert {depth for layout in found for depth in layout.depths} <= {3, 4, 5}
    assert any(len(set(layout.depths)) > 1 for layout in found)
    assert all(len(set(layout.depths)) == 1 for layout in offers(HURT, replace(PEERS, even=True)))


def test_predictions_are_as_far_off_as_that_of_the_running_plan_was() -> None:
    ahead = outlook(HURT, offers(HURT, PEERS), PACE, lambda layout: 1.5 if layout.depths == (4, 4, 3) else 9.0, 100.0)
    assert ahead.steps[Layout((4, 4, 3))] == 3.0
    assert ahead.steps[HURT.layout] == 2.0
    assert ahead.next_event == 700.0


@pytest.mark.parametrize(("calm", "until"), [(60.0, 60.0), (math.inf, 600.0)])
def test_it_looks_as_far_as_the_next_loss_or_the_end(calm: float, until: float) -> None:
    ahead = outlook(HURT, offers(HURT, PEERS), replace(PACE, calm_s=calm), lambda _: 1.0, 0.0)
    assert ahead.next_event == until


def test_a_change_is_taken_to_last_as_long_as_the_last_one_did() -> None:
    moving = replace(PACE, state_bytes=5 * BANDWIDTH)
    assert moving.move_s == 5 + 2.0 / 2
    assert replace(moving, moved_s=0.5).move_s == 0.5 + 2.0 / 2


def test_by_the_rule_of_bamboo_cost_does_not_count_but_for_templates() -> None:
    two = cluster(3, 4, gone=(Slot(0, 1), Slot(1, 2)))
    among = offers(two, PEERS)
    ahead = outlook(two, among, PACE, lambda _: 50.0, 0.0)
    assert judge("bamboo", "reroute", two, among, ahead, 0.0)[0].layout == Layout((4, 4))
    for policy, strategy in (("cost", "reroute"), ("bamboo", "templates")):
        found, _ = judge(policy, strategy, two, among, ahead, 0.0)
        assert not found.reshapes
