"""Other shapes of a model: partitioned and planned for any depths, slots over zones, and layer transfers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan.model.model_profile import LayerCost
from culm.plan.recover.role_assignment import SurvivingCluster, assign_roles
from culm.plan.rent.link_costs import NodeLinks, links_of_instance
from culm.plan.reshape.pipeline_shape import (
    Depths,
    PipelineShape,
    ShapeInputs,
    best_depths,
    build_shape,
    format_depths,
    layers_of_slot,
    parse_depths,
    predict_shape_step_s,
    slots_to_fill,
)
from culm.plan.reshape.slot_assignment import WorkerPlace, assign_slots, layer_transfers, layers_without_holder
from culm.schedule import Plan, check_plan
from culm.strategies import get


def shape_inputs(layers: int = 8, micro_batches: int = 8, **fields: Any) -> ShapeInputs:
    cost: dict[str, Any] = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0, "parameter_bytes": 8, "state_bytes": 16}
    every = (LayerCost(name=f"layer {i}", **cost, activation_bytes=4, output_bytes=1) for i in range(layers))
    return ShapeInputs(layers=tuple(every), micro_batches=micro_batches, **fields)


depths_of = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(lambda d: tuple(sorted(d, reverse=True)))


@given(depths_of, st.sampled_from(["gpipe", "1f1b", "zb"]))
def test_pipelines_of_any_depths_have_a_plan_that_the_checker_accepts(depths: Depths, schedule: str) -> None:
    shape = build_shape(shape_inputs(schedule=schedule), depths)
    plan = Plan.from_text(shape.plan_text)
    check_plan(plan)
    assert len(slots_to_fill(plan)) == sum(depths), "every node has a post"
    for pipeline in range(len(depths)):
        own = [slot for slot in slots_to_fill(plan) if slot // plan.stages == pipeline]
        assert [layer for slot in own for layer in layers_of_slot(shape, plan, slot)] == list(range(8))


@given(depths_of, st.sampled_from(["reroute", "shadow"]), st.data())
def test_a_loss_in_any_shape_leaves_a_plan_that_can_run_while_every_stage_has_a_holder(
    depths: Depths, strategy: str, data: st.DataObject
) -> None:
    plan = Plan.from_text(build_shape(shape_inputs(), depths).plan_text)
    held = {slot: set(plan.stages_of(slot)) for slot in slots_to_fill(plan)}
    for replica in get(strategy).initial_shadows(plan):
        held[replica.slot].add(replica.stage)
    lost = data.draw(st.sampled_from(slots_to_fill(plan)))
    left = {slot: frozenset(stages) for slot, stages in held.items() if slot != lost}
    if set(range(plan.stages)) - {stage for stages in left.values() for stage in stages}:
        return
    layout = assign_roles(SurvivingCluster(full_plan=plan, policy=get(strategy), held_stages=left))
    check_plan(layout.plan)
    assert all(stage in left[slot] for stage, runners in layout.runners.items() for slot in runners)


def test_a_shorter_pipeline_runs_fewer_micro_batches() -> None:
    plan = Plan.from_text(build_shape(shape_inputs(6), (3, 2)).plan_text)
    assert plan.micro_batch_shares == (5, 3)
    assert Plan.from_text(plan.to_text()) == plan


def test_unequal_pipelines_beat_leaving_a_node_idle() -> None:
    described = shape_inputs(6, 12)
    times = {depths: predict_shape_step_s(described, build_shape(described, depths)) for depths in ((3, 2), (2, 2))}
    assert times[3, 2] < times[2, 2]


@pytest.mark.parametrize(("text", "depths"), [("2x3", (3, 3)), ("3+2", (3, 2)), ("2+3+3", (3, 3, 2)), ("1x1", (1,))])
def test_layouts_round_trip_through_text(text: str, depths: Depths) -> None:
    assert parse_depths(text) == depths
    assert parse_depths(format_depths(depths)) == depths


@pytest.mark.parametrize("text", ["", "0x2", "2x", "3+0", "3 + 2", "9999999x1"])
def test_invalid_layout_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="write 2x3 for two pipelines of three nodes"):
        parse_depths(text)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="3 pipelines have 2 micro-batches to share: use at most 2"):
        build_shape(shape_inputs(6, 2), (2, 2, 2))
    with pytest.raises(PlanError, match="stages is 7: 6 layers can fill at most 6 stages"):
        build_shape(shape_inputs(6), (7, 1))
    with pytest.raises(PlanError, match="uneven, which the interleaved schedule does not support"):
        build_shape(shape_inputs(8, schedule="interleaved", ranges=2), (3, 2))


def test_there_is_a_template_for_every_number_of_nodes_that_can_hold_the_model() -> None:
    memory = 3 * 24 + 4 * 3 * 6  # fits three layers with their activations, but not six
    result = {nodes: best_depths(shape_inputs(6, 6, memory=memory), nodes) for nodes in range(2, 10)}
    assert all(sum(depths) == nodes for nodes, depths in result.items())
    assert all(len(depths) > 1 for nodes, depths in result.items() if nodes >= 4), (
        "a loss leaves a holder of each layer"
    )
    with pytest.raises(PlanError, match="1 node cannot hold the model: use at least 2"):
        best_depths(shape_inputs(6, 6, memory=memory), 1)


def test_under_the_interleaved_schedule_templates_are_even_and_leave_as_few_nodes_over_as_that_allows() -> None:
    inputs = shape_inputs(6, 6, schedule="interleaved", ranges=2)
    result = {nodes: best_depths(inputs, nodes) for nodes in range(1, 10)}
    assert all(len(set(depths)) == 1 for depths in result.values())
    assert all(nodes - sum(depths) < len(depths) or depths[0] == 3 for nodes, depths in result.items())


def places(zones: str, count: int | None = None) -> dict[int, WorkerPlace]:
    """Nodes with one worker each: one for each letter, which is its zone, or `count` nodes without a zone."""
    return {node: WorkerPlace(node, zone) for node, zone in enumerate(zones if count is None else [""] * count)}


def even_shape(pipelines: int, stages: int) -> PipelineShape:
    return build_shape(shape_inputs(8, 8), (stages,) * pipelines)


@given(st.integers(2, 4), st.integers(1, 4), st.integers(2, 4), st.data())
def test_the_loss_of_a_zone_leaves_a_holder_of_every_layer_if_possible(
    D: int, P: int, zones: int, data: st.DataObject
) -> None:
    where = {node: data.draw(st.sampled_from("abcd"[:zones])) for node in range(D * P)}
    shape = even_shape(D, P)
    assigned = assign_slots(
        shape, get("reroute"), {node: WorkerPlace(node, zone) for node, zone in where.items()}, {}, ()
    )
    assert sorted(assigned.values()) == sorted(where)
    most = max(Counter(where.values()).values())
    if D * P - most < P:
        return  # one zone has so many nodes that some stage has no holder elsewhere
    for stage in range(P):
        assert len({where[assigned[slot]] for slot in range(stage, D * P, P)}) > 1


@pytest.mark.parametrize("zones", ["aabb", "abba", "aabbcc", "aaabbbcc"])
def test_a_shadow_is_in_another_zone_than_what_it_shadows(zones: str) -> None:
    shape = even_shape(1, len(zones))
    assigned = assign_slots(shape, get("shadow"), places(zones), {}, ())
    for replica in get("shadow").initial_shadows(Plan.from_text(shape.plan_text)):
        assert zones[assigned[replica.slot]] != zones[assigned[replica.stage]]


def test_without_zones_nodes_take_slots_in_order() -> None:
    assert assign_slots(even_shape(2, 3), get("reroute"), places("", 6), {}, ()) == {slot: slot for slot in range(6)}


def test_a_slot_goes_to_the_node_that_has_its_layers() -> None:
    holders = {layer: {layer // 2, 4 + layer // 2} for layer in range(8)}  # two pipelines of four
    assigned = assign_slots(even_shape(2, 4), get("reroute"), places("", 8), holders, [1.0] * 8)
    assert layer_transfers(even_shape(2, 4), assigned, holders) == ()


def test_every_worker_gets_the_layers_that_it_lacks_from_a_holder() -> None:
    holders = {layer: {layer // 4, 2 + layer // 4} for layer in range(8)}  # two pipelines of two
    shape = even_shape(1, 4)
    assigned = assign_slots(shape, get("reroute"), places("", 4), holders, [1.0] * 8)
    assert not layers_without_holder(range(8), assigned, holders)
    plan, had = Plan.from_text(shape.plan_text), {layer: {*held} for layer, held in holders.items()}
    for move in layer_transfers(shape, assigned, holders):
        assert all(assigned[move.source] in holders[layer] for layer in move.layers)
        for layer in move.layers:
            had[layer].add(assigned[move.target])
    for slot, node in assigned.items():
        assert all(node in had[layer] for layer in layers_of_slot(shape, plan, slot))


def test_with_spare_nodes_the_only_holder_of_a_layer_is_assigned() -> None:
    holders = {layer: {2} if layer == 7 else {0, 1} for layer in range(8)}
    assigned = assign_slots(even_shape(2, 1), get("reroute"), places("", 3), holders, [1.0] * 8)
    assert 2 in assigned.values()


def test_fewer_nodes_than_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="2x3 needs 6 workers, but there are 5"):
        assign_slots(even_shape(2, 3), get("reroute"), places("", 5), {}, ())


def test_the_links_of_an_instance_decide_between_shapes() -> None:
    """On nodes with a fast network one stage per worker is best; without the links, the sums of gradients that it needs
    seem to take longer than the sends of a deeper pipeline."""
    layer = LayerCost(
        name="layer",
        forward_s=0.01,
        input_s=0.01,
        weight_s=0.01,
        parameter_bytes=1 << 30,
        output_bytes=1 << 30,
        state_bytes=0,
        activation_bytes=4,
    )
    deep, wide = (4, 4), (1,) * 8

    def step_s(depths: Depths, links: NodeLinks | None) -> float:
        model = ShapeInputs(layers=(layer,) * 8, micro_batches=8, links=links)
        return predict_shape_step_s(model, build_shape(model, depths))

    links = links_of_instance("p4d.24xlarge", "A100", 4)
    assert step_s(wide, links) < step_s(deep, links)
    assert step_s(deep, None) < step_s(wide, None)
