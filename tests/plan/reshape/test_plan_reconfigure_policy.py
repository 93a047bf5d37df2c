"""Reconfiguration: the gain until the next loss, stages with one holder first, and Bamboo's rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan import Slot
from culm.plan.reshape.reconfigure_policy import (
    RECONFIGURE_POLICIES,
    PipelineLayout,
    ReconfigureCosts,
    ReconfigureKind,
    ReconfigureState,
    count_remote_neighbours,
    decide_by_cost,
    find_reconfigure_policy,
    possible_layouts,
)


def reconfigure_state(
    pipelines: int, stages: int, *, gone: tuple[Slot, ...] = (), standby: int = 0
) -> ReconfigureState:
    """Every slot of D x P filled by a node named after it, one zone per pipeline; then some removed and some new."""
    slots = {Slot(d, s): f"n{d}.{s}" for d in range(pipelines) for s in range(stages)}
    alive = {node: f"zone{slot.pipeline}" for slot, node in slots.items() if slot not in gone}
    alive |= {f"new{i}": f"zone{i % 3}" for i in range(standby)}
    return ReconfigureState(zone_by_node=alive, node_by_slot=slots, depths=(stages,) * pipelines)


def reconfigure_costs(steps: dict[PipelineLayout, float], within: float, **pauses: float) -> ReconfigureCosts:
    return ReconfigureCosts(
        step_s_by_layout=steps, next_loss_at=1000.0 + within, **{"fill_s": 2.0, "move_s": 20.0, **pauses}
    )


STATE_WITH_EMPTY_SLOT = reconfigure_state(3, 4, gone=(Slot(1, 2),))
STEP_S_BY_LAYOUT = {
    PipelineLayout((4, 4, 4), 1): 1.3,
    PipelineLayout((4, 4, 4)): 1.0,
    PipelineLayout((4, 4)): 1.5,
    PipelineLayout((4, 4, 3)): 1.1,
}


def test_a_hole_is_filled_when_that_gains_more_than_the_pause_costs() -> None:
    state = reconfigure_state(3, 4, gone=(Slot(1, 2),), standby=1)
    decision, why = decide_by_cost(state, reconfigure_costs(STEP_S_BY_LAYOUT, 600), 1000.0)
    assert (decision.kind, decision.layout) == ("fill", PipelineLayout((4, 4, 4)))
    assert decision.node_by_slot[Slot(1, 2)] == "new0"
    assert "598 steps in the 600 s" in why


def test_of_equal_layouts_the_one_with_more_neighbours_on_one_machine_is_chosen() -> None:
    """Ten workers on five machines: 5 stages need three machines, 4 stages two."""
    state = reconfigure_state(3, 4, gone=(Slot(2, 2), Slot(2, 3)))
    split, whole = PipelineLayout((5, 5)), PipelineLayout((4, 4, 2))
    costs = reconfigure_costs({state.layout: 9.0, split: 1.0, whole: 1.005}, 6000)
    found: dict[PipelineLayout, ReconfigureKind] = {state.layout: "stay", split: "uneven", whole: "uneven"}
    machines = {node: f"machine{index // 2}" for index, node in enumerate(sorted(state.zone_by_node))}
    for place, best in ((machines, whole), ({}, split)):
        placed = replace(state, machine_by_node=place)
        assert decide_by_cost(placed, costs, 1000.0, candidates=found, tolerance=0.02)[0].layout == best


@pytest.mark.parametrize(
    ("depths", "workers", "remote"),
    [((4, 4, 2), (2,) * 5, 2), ((5, 5), (2,) * 5, 4), ((4, 4), (4, 4), 0), ((3, 3), (4, 4), 0), ((3, 3), (4, 2), 1)],
)
def test_neighbours_on_different_machines_are_counted(
    depths: tuple[int, ...], workers: tuple[int, ...], remote: int
) -> None:
    assert count_remote_neighbours(depths, workers) == remote


def test_nothing_changes_shortly_before_the_next_loss() -> None:
    state = reconfigure_state(3, 4, gone=(Slot(1, 2),), standby=1)
    decision, why = decide_by_cost(state, reconfigure_costs(STEP_S_BY_LAYOUT, 5), 1000.0)
    assert decision.kind == "stay"
    assert decision.node_by_slot == {slot: node for slot, node in state.node_by_slot.items() if slot != Slot(1, 2)}
    assert why.startswith("the present 3 x 4 with 1 empty slot trains ")


def test_uneven_pipelines_are_built_if_the_gain_exceeds_the_cost_of_moving_layers() -> None:
    for within, kind in ((100, "stay"), (600, "uneven")):
        decision, _ = decide_by_cost(
            STATE_WITH_EMPTY_SLOT, reconfigure_costs(STEP_S_BY_LAYOUT, within), 1000.0, depths=[3]
        )
        assert decision.kind == kind
    assert decision.layout == PipelineLayout((4, 4, 3))
    assert len(decision.node_by_slot) == len(set(decision.node_by_slot.values())) == 11


def test_a_further_pipeline_is_built_from_standby_nodes() -> None:
    state = reconfigure_state(2, 3, standby=4)
    steps = {PipelineLayout((3, 3)): 1.0, PipelineLayout((3, 3, 3)): 0.7}
    decision, _ = decide_by_cost(state, reconfigure_costs(steps, 600), 1000.0)
    assert (decision.kind, decision.layout) == ("grow", PipelineLayout((3, 3, 3)))
    assert len(decision.node_by_slot) == 9
    assert all(decision.node_by_slot[slot] == node for slot, node in state.node_by_slot.items())


def test_a_stage_with_one_holder_is_filled_whatever_the_gain() -> None:
    state = reconfigure_state(2, 3, gone=(Slot(0, 1),), standby=1)
    steps = {PipelineLayout((3, 3), 1): 1.0, PipelineLayout((3, 3)): 1.0}
    decision, why = decide_by_cost(state, reconfigure_costs(steps, 1), 1000.0)
    assert decision.kind == "fill"
    assert why == "stage 1 has one holder left: its empty slot is filled first"


def test_new_nodes_go_to_stages_with_the_fewest_holders_in_their_zone() -> None:
    slots = {Slot(0, 0): "a", Slot(0, 1): "b"}
    alive = {"a": "east", "b": "west", "c": "east", "d": "west"}
    state = ReconfigureState(zone_by_node=alive, node_by_slot=slots, depths=(2,))
    decision, _ = decide_by_cost(
        state, reconfigure_costs({PipelineLayout((2,)): 1.0, PipelineLayout((2, 2)): 0.5}, 600), 1000.0
    )
    assert decision.node_by_slot == {**slots, Slot(1, 0): "d", Slot(1, 1): "c"}


def test_max_pipelines_limits_the_pipelines() -> None:
    state = replace(reconfigure_state(2, 3, standby=9), max_pipelines=3)
    assert max(len(layout.depths) for layout in possible_layouts(state, depths=[2, 3])) == 3


def test_before_the_start_the_depth_is_free() -> None:
    state = ReconfigureState(zone_by_node={f"n{i}": "z" for i in range(7)}, node_by_slot={}, depths=())
    steps = {PipelineLayout((3, 3)): 1.0, PipelineLayout((4, 3)): 0.9, PipelineLayout((2, 2, 2)): 1.2}
    decision, _ = decide_by_cost(state, reconfigure_costs(steps, 600), 1000.0, depths=[2, 3])
    assert decision.layout == PipelineLayout((4, 3))
    assert len(decision.node_by_slot) == 7


def test_without_any_step_time_the_error_says_what_to_pass() -> None:
    with pytest.raises(PlanError, match="no layout of 11 nodes has a step time"):
        decide_by_cost(STATE_WITH_EMPTY_SLOT, reconfigure_costs({}, 600), 1000.0)


@pytest.mark.parametrize(
    ("state", "kind", "why"),
    [
        (reconfigure_state(4, 12), "stay", "no condition of the rule holds"),
        (reconfigure_state(4, 12, gone=(Slot(0, 3),), standby=1), "fill", "1 standby nodes relieve 1"),
        (reconfigure_state(4, 12, gone=(Slot(0, 3),)), "stay", "no condition of the rule holds"),
        (reconfigure_state(4, 12, gone=(Slot(0, 3), Slot(1, 7))), "shrink", "4 of 46 losses would be fatal"),
        (reconfigure_state(3, 12, standby=12), "grow", "a further pipeline fits: 4"),
    ],
)
def test_the_published_rule_of_bamboo(state: ReconfigureState, kind: str, why: str) -> None:
    decision, text = find_reconfigure_policy("bamboo")(state, reconfigure_costs({}, 0), 0.0)
    assert decision.kind == kind
    assert text.startswith(why)


def test_an_unknown_policy_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="there is no policy 'bambo': did you mean 'bamboo'"):
        find_reconfigure_policy("bambo")
    assert set(RECONFIGURE_POLICIES) == {"cost", "bamboo", "never"}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.data())
def test_a_decision_puts_each_live_node_into_one_slot(D: int, P: int, standby: int, data: st.DataObject) -> None:
    every = [Slot(d, s) for d in range(D) for s in range(P)]
    gone = tuple(data.draw(st.sets(st.sampled_from(every), max_size=len(every) - 1)))
    state = reconfigure_state(D, P, gone=gone, standby=standby)
    offers = possible_layouts(state, depths=range(1, 5))
    steps = {layout: data.draw(st.floats(0.1, 9.0)) for layout in offers}
    decision, why = decide_by_cost(
        state, reconfigure_costs(steps, data.draw(st.floats(0.0, 900.0))), 1000.0, depths=range(1, 5)
    )
    assert decision.layout in offers
    assert why
    assert max(Counter(decision.node_by_slot.values()).values(), default=0) <= 1
    assert set(decision.node_by_slot.values()) <= set(state.zone_by_node)
    assert len(decision.node_by_slot) == decision.layout.nodes
    assert all(slot.stage < decision.layout.depths[slot.pipeline] for slot in decision.node_by_slot)
