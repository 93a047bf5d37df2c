"""Other shapes of a model: cut and planned for any depths, seats in several zones, who gives which layers to whom."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan.layout import World, arrange_around, first_layout
from culm.plan.profile import LayerCost
from culm.plan.relayout import (
    Depths,
    Model,
    Shape,
    layers_of,
    parse,
    posts,
    shape_of,
    step_s,
    template,
    templates,
    written,
)
from culm.plan.seating import moves, seating, unseated
from culm.schedule import Plan, check


def model(layers: int = 8, micro_batches: int = 8, **fields: Any) -> Model:
    cost: dict[str, Any] = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0, "parameter_bytes": 8, "state_bytes": 16}
    every = (LayerCost(name=f"layer {i}", **cost, activation_bytes=4, output_bytes=1) for i in range(layers))
    return Model(layers=tuple(every), micro_batches=micro_batches, **fields)


depths_of = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(lambda d: tuple(sorted(d, reverse=True)))


@given(depths_of, st.sampled_from(["gpipe", "1f1b", "zb"]))
def test_pipelines_of_any_depths_have_a_plan_that_the_checker_accepts(depths: Depths, schedule: str) -> None:
    shape = shape_of(model(schedule=schedule), depths)
    plan = Plan.from_text(shape.plan)
    check(plan)
    assert len(posts(plan)) == sum(depths), "every node has a post"
    for pipeline in range(len(depths)):
        own = [slot for slot in posts(plan) if slot // plan.stages == pipeline]
        assert [layer for slot in own for layer in layers_of(shape, plan, slot)] == list(range(8))


@given(depths_of, st.sampled_from(["reroute", "shadow"]), st.data())
def test_a_loss_in_any_shape_leaves_a_plan_that_can_run_while_every_stage_has_a_holder(
    depths: Depths, strategy: str, data: st.DataObject
) -> None:
    plan = Plan.from_text(shape_of(model(), depths).plan)
    held = {slot: set(plan.stages_of(slot)) for slot in posts(plan)}
    for replica in first_layout(plan, strategy):
        held[replica.slot].add(replica.stage)
    lost = data.draw(st.sampled_from(posts(plan)))
    left = {slot: frozenset(stages) for slot, stages in held.items() if slot != lost}
    if set(range(plan.stages)) - {stage for stages in left.values() for stage in stages}:
        return
    layout = arrange_around(World(plan=plan, strategy=strategy, held=left))
    check(layout.plan)
    assert all(stage in left[slot] for stage, runners in layout.runners.items() for slot in runners)


def test_a_shorter_pipeline_runs_fewer_micro_batches() -> None:
    plan = Plan.from_text(shape_of(model(6), (3, 2)).plan)
    assert plan.shares == (5, 3)
    assert Plan.from_text(plan.to_text()) == plan


def test_unequal_pipelines_beat_leaving_a_node_idle() -> None:
    described = model(6, 12)
    times = {depths: step_s(described, shape_of(described, depths)) for depths in ((3, 2), (2, 2))}
    assert times[3, 2] < times[2, 2]


@pytest.mark.parametrize(("text", "depths"), [("2x3", (3, 3)), ("3+2", (3, 2)), ("2+3+3", (3, 3, 2)), ("1x1", (1,))])
def test_layouts_are_written_as_people_do(text: str, depths: Depths) -> None:
    assert parse(text) == depths
    assert parse(written(depths)) == depths


@pytest.mark.parametrize("text", ["", "0x2", "2x", "3+0", "3 + 2", "9999999x1"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="write 2x3 for two pipelines of three nodes"):
        parse(text)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="3 pipelines have 2 micro-batches to share: use at most 2"):
        shape_of(model(6, 2), (2, 2, 2))
    with pytest.raises(PlanError, match="stages is 7: 6 layers can fill at most 6 stages"):
        shape_of(model(6), (7, 1))
    with pytest.raises(PlanError, match="uneven, which the interleaved schedule can not be"):
        shape_of(model(8, schedule="interleaved", ranges=2), (3, 2))


def test_there_is_a_template_for_every_number_of_nodes_that_can_hold_the_model() -> None:
    memory = 3 * 24 + 4 * 3 * 6  # three layers with their activations, and not all six
    found = templates(model(6, 6, memory=memory), 9)
    assert min(found) == 2
    assert all(sum(depths) == nodes for nodes, depths in found.items())
    assert all(len(depths) > 1 for nodes, depths in found.items() if nodes >= 4), "a loss leaves a holder of each layer"
    with pytest.raises(PlanError, match="1 node can not hold the model: it needs 2"):
        template(model(6, 6, memory=memory), 1)


def test_under_the_interleaved_schedule_templates_are_even_and_leave_as_few_nodes_over_as_that_allows() -> None:
    found = templates(model(6, 6, schedule="interleaved", ranges=2), 9)
    assert sorted(found) == list(range(1, 10)), "also for numbers that no pipelines of one depth have"
    assert all(len(set(depths)) == 1 for depths in found.values())
    assert all(nodes - sum(depths) < len(depths) or depths[0] == 3 for nodes, depths in found.items())


def even(pipelines: int, stages: int) -> Shape:
    return shape_of(model(8, 8), (stages,) * pipelines)


@given(st.integers(2, 4), st.integers(1, 4), st.integers(2, 4), st.data())
def test_the_loss_of_a_zone_orphans_no_layer_where_that_is_possible(
    D: int, P: int, zones: int, data: st.DataObject
) -> None:
    where = {node: data.draw(st.sampled_from("abcd"[:zones])) for node in range(D * P)}
    shape = even(D, P)
    seats = seating(shape, "reroute", where, {}, ())
    assert sorted(seats.values()) == sorted(where)
    most = max(Counter(where.values()).values())
    if D * P - most < P:
        return  # so many are in one zone that some stage has nobody elsewhere
    for stage in range(P):
        assert len({where[seats[slot]] for slot in range(stage, D * P, P)}) > 1


@pytest.mark.parametrize("zones", ["aabb", "abba", "aabbcc", "aaabbbcc"])
def test_a_shadow_is_in_another_zone_than_what_it_shadows(zones: str) -> None:
    shape = even(1, len(zones))
    seats = seating(shape, "shadow", dict(enumerate(zones)), {}, ())
    for replica in first_layout(Plan.from_text(shape.plan), "shadow"):
        assert zones[seats[replica.slot]] != zones[seats[replica.stage]]


def test_without_zones_nodes_take_slots_in_order() -> None:
    assert seating(even(2, 3), "reroute", dict.fromkeys(range(6), ""), {}, ()) == {slot: slot for slot in range(6)}


def test_whoever_has_the_layers_of_a_post_takes_it() -> None:
    holders = {layer: {layer // 2, 4 + layer // 2} for layer in range(8)}  # two pipelines of four
    seats = seating(even(2, 4), "reroute", dict.fromkeys(range(8), ""), holders, [1.0] * 8)
    assert moves(even(2, 4), seats, holders) == ()


def test_every_worker_gets_the_layers_that_it_lacks_from_a_holder() -> None:
    holders = {layer: {layer // 4, 2 + layer // 4} for layer in range(8)}  # two pipelines of two
    shape = even(1, 4)
    seats = seating(shape, "reroute", dict.fromkeys(range(4), ""), holders, [1.0] * 8)
    assert not unseated(range(8), seats, holders)
    plan, had = Plan.from_text(shape.plan), {layer: {*held} for layer, held in holders.items()}
    for move in moves(shape, seats, holders):
        assert all(seats[move.source] in holders[layer] for layer in move.layers)
        for layer in move.layers:
            had[layer].add(seats[move.target])
    for slot, node in seats.items():
        assert all(node in had[layer] for layer in layers_of(shape, plan, slot))


def test_of_more_nodes_than_posts_the_only_holder_of_a_layer_is_not_left_out() -> None:
    holders = {layer: {2} if layer == 7 else {0, 1} for layer in range(8)}
    seats = seating(even(2, 1), "reroute", dict.fromkeys(range(3), ""), holders, [1.0] * 8)
    assert 2 in seats.values()


def test_fewer_nodes_than_posts_are_refused() -> None:
    with pytest.raises(PlanError, match="2x3 needs 6 nodes: 5 are there"):
        seating(even(2, 3), "reroute", dict.fromkeys(range(5), ""), {}, ())
