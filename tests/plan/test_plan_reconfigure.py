"""Reconfiguration: what gains until the next loss, protection first, and Bamboo's rule by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan import Slot
from culm.plan.reconfigure import POLICIES, Layout, Outlook, State, decide, layouts, policy


def cluster(pipelines: int, stages: int, *, gone: tuple[Slot, ...] = (), standby: int = 0) -> State:
    """Every slot of D x P filled by a node named after it, one zone a pipeline; then some gone and some new."""
    slots = {Slot(d, s): f"n{d}.{s}" for d in range(pipelines) for s in range(stages)}
    alive = {node: f"zone{slot.pipeline}" for slot, node in slots.items() if slot not in gone}
    alive |= {f"new{i}": f"zone{i % 3}" for i in range(standby)}
    return State(alive=alive, slots=slots, depths=(stages,) * pipelines)


def outlook(steps: dict[Layout, float], within: float, **pauses: float) -> Outlook:
    return Outlook(steps=steps, next_event=1000.0 + within, **{"fill_s": 2.0, "move_s": 20.0, **pauses})


HOLE = cluster(3, 4, gone=(Slot(1, 2),))
STEPS = {Layout((4, 4, 4), 1): 1.3, Layout((4, 4, 4)): 1.0, Layout((4, 4)): 1.5, Layout((4, 4, 3)): 1.1}


def test_a_hole_is_filled_when_that_gains_more_than_the_pause_costs() -> None:
    state = cluster(3, 4, gone=(Slot(1, 2),), standby=1)
    decision, why = decide(state, outlook(STEPS, 600), 1000.0)
    assert (decision.kind, decision.layout) == ("fill", Layout((4, 4, 4)))
    assert decision.slots[Slot(1, 2)] == "new0"
    assert "598 steps in the 600 s" in why


def test_nothing_is_done_shortly_before_the_next_loss() -> None:
    state = cluster(3, 4, gone=(Slot(1, 2),), standby=1)
    decision, why = decide(state, outlook(STEPS, 5), 1000.0)
    assert decision.kind == "stay"
    assert decision.slots == {slot: node for slot, node in state.slots.items() if slot != Slot(1, 2)}
    assert why.startswith("stay to 3 x 4 less 1")


def test_uneven_pipelines_are_made_when_the_gain_outlasts_moving_all_layers() -> None:
    for within, kind in ((100, "stay"), (600, "uneven")):
        decision, _ = decide(HOLE, outlook(STEPS, within), 1000.0, depths=[3])
        assert decision.kind == kind
    assert decision.layout == Layout((4, 4, 3))
    assert len(decision.slots) == len(set(decision.slots.values())) == 11


def test_a_further_pipeline_is_added_out_of_those_standing_by() -> None:
    state = cluster(2, 3, standby=4)
    steps = {Layout((3, 3)): 1.0, Layout((3, 3, 3)): 0.7}
    decision, _ = decide(state, outlook(steps, 600), 1000.0)
    assert (decision.kind, decision.layout) == ("grow", Layout((3, 3, 3)))
    assert len(decision.slots) == 9
    assert all(decision.slots[slot] == node for slot, node in state.slots.items())


def test_the_last_holder_of_a_stage_is_relieved_whatever_it_gains() -> None:
    state = cluster(2, 3, gone=(Slot(0, 1),), standby=1)
    steps = {Layout((3, 3), 1): 1.0, Layout((3, 3)): 1.0}
    decision, why = decide(state, outlook(steps, 1), 1000.0)
    assert decision.kind == "fill"
    assert why == "stage 1 has one holder left: protection first"


def test_newcomers_go_where_their_zone_holds_the_stage_least() -> None:
    slots = {Slot(0, 0): "a", Slot(0, 1): "b"}
    alive = {"a": "east", "b": "west", "c": "east", "d": "west"}
    state = State(alive=alive, slots=slots, depths=(2,))
    decision, _ = decide(state, outlook({Layout((2,)): 1.0, Layout((2, 2)): 0.5}, 600), 1000.0)
    assert decision.slots == {**slots, Slot(1, 0): "d", Slot(1, 1): "c"}


def test_most_limits_the_pipelines() -> None:
    state = replace(cluster(2, 3, standby=9), most=3)
    assert max(len(layout.depths) for layout in layouts(state, depths=[2, 3])) == 3


def test_before_the_start_the_depth_is_free() -> None:
    state = State(alive={f"n{i}": "z" for i in range(7)}, slots={}, depths=())
    steps = {Layout((3, 3)): 1.0, Layout((4, 3)): 0.9, Layout((2, 2, 2)): 1.2}
    decision, _ = decide(state, outlook(steps, 600), 1000.0, depths=[2, 3])
    assert decision.layout == Layout((4, 3))
    assert len(decision.slots) == 7


def test_without_a_step_time_for_anything_the_sentence_says_what_to_give() -> None:
    with pytest.raises(PlanError, match="no layout of 11 nodes has a step time"):
        decide(HOLE, outlook({}, 600), 1000.0)


@pytest.mark.parametrize(
    ("state", "kind", "why"),
    [
        (cluster(4, 12), "stay", "nothing that the rule looks at"),
        (cluster(4, 12, gone=(Slot(0, 3),), standby=1), "fill", "1 standing by relieve 1"),
        (cluster(4, 12, gone=(Slot(0, 3),)), "stay", "nothing that the rule looks at"),
        (cluster(4, 12, gone=(Slot(0, 3), Slot(1, 7))), "shrink", "4 of 46 losses would be fatal"),
        (cluster(3, 12, standby=12), "grow", "a further pipeline fits: 4"),
    ],
)
def test_the_published_rule_of_bamboo(state: State, kind: str, why: str) -> None:
    decision, told = policy("bamboo")(state, outlook({}, 0), 0.0)
    assert decision.kind == kind
    assert told.startswith(why)


def test_an_unknown_policy_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="there is no policy 'bambo': did you mean 'bamboo'"):
        policy("bambo")
    assert set(POLICIES) == {"cost", "bamboo", "never"}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.data())
def test_a_decision_puts_each_live_node_into_one_slot(D: int, P: int, standby: int, data: st.DataObject) -> None:
    every = [Slot(d, s) for d in range(D) for s in range(P)]
    gone = tuple(data.draw(st.sets(st.sampled_from(every), max_size=len(every) - 1)))
    state = cluster(D, P, gone=gone, standby=standby)
    offers = layouts(state, depths=range(1, 5))
    steps = {layout: data.draw(st.floats(0.1, 9.0)) for layout in offers}
    decision, why = decide(state, outlook(steps, data.draw(st.floats(0.0, 900.0))), 1000.0, depths=range(1, 5))
    assert decision.layout in offers
    assert why
    assert max(Counter(decision.slots.values()).values(), default=0) <= 1
    assert set(decision.slots.values()) <= set(state.alive)
    assert len(decision.slots) == decision.layout.nodes
    assert all(slot.stage < decision.layout.depths[slot.pipeline] for slot in decision.slots)
