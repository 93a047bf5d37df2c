"""Holders of a layer are on different nodes: property tests of slots, shadows and copies."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from culm.plan.model.model_profile import LayerCost
from culm.plan.recover.role_assignment import (
    SurvivingCluster,
    assign_roles,
    precompute_next_plans,
    shadows_on_other_nodes,
    stages_without_holder,
)
from culm.plan.replan.plan_cache import PlanCache
from culm.plan.reshape.pipeline_shape import PipelineShape, ShapeInputs, build_shape
from culm.plan.reshape.slot_assignment import WorkerPlace, assign_slots
from culm.schedule import Plan, generate_plan
from culm.strategies import get

LAYER = LayerCost(
    name="layer",
    forward_s=1.0,
    input_s=1.0,
    weight_s=1.0,
    parameter_bytes=4,
    state_bytes=8,
    activation_bytes=4,
    output_bytes=4,
)


def shape_of(pipelines: int, stages: int) -> PipelineShape:
    inputs = ShapeInputs(layers=(LAYER,) * 8, micro_batches=8, schedule="1f1b", ranges=1, memory=None)
    return build_shape(inputs, (stages,) * pipelines)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, int, dict[int, WorkerPlace]]:
    """(D, P, places): nodes with K workers each, at least as many workers as slots."""
    D, P, K = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    nodes = -(-D * P // K) + draw(st.integers(0, 2))
    zones = (
        draw(st.lists(st.sampled_from("ab"), min_size=nodes, max_size=nodes)) if draw(st.booleans()) else [""] * nodes
    )
    return D, P, {worker: WorkerPlace(worker // K, zones[worker // K]) for worker in range(nodes * K)}


@given(clusters())
def test_no_stage_has_all_of_its_workers_on_one_node_if_another_node_exists(
    cluster: tuple[int, int, dict[int, WorkerPlace]],
) -> None:
    D, P, places = cluster
    assigned = assign_slots(shape_of(D, P), get("reroute"), places, {}, ())
    assert len(set(assigned.values())) == D * P
    nodes = {place.node for place in places.values()}
    assume(D > 1 and len(nodes) > 1)
    for stage in range(P):
        assert len({places[assigned[slot]].node for slot in range(stage, D * P, P)}) > 1


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 4))
def test_holders_share_a_node_only_if_there_are_more_holders_than_nodes(D: int, P: int, K: int) -> None:
    """Without zones, on nodes that have a slot for each of their workers."""
    assume(D * P % K == 0 and D * P > K)
    places = {worker: WorkerPlace(worker // K) for worker in range(D * P)}
    assigned = assign_slots(shape_of(D, P), get("reroute"), places, {}, ())
    nodes = D * P // K
    for stage in range(P):
        shares = Counter(places[assigned[slot]].node for slot in range(stage, D * P, P))
        assert max(shares.values()) <= max(1, -(-K // P)) <= -(-D // nodes) + 1
        if K <= P:
            assert max(shares.values()) == 1


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_a_pipeline_runs_through_the_workers_of_a_node_first(D: int, P: int, K: int) -> None:
    assume(D * P % K == 0)
    places = {worker: WorkerPlace(worker // K) for worker in range(D * P)}
    assigned = assign_slots(shape_of(D, P), get("reroute"), places, {}, ())
    changes = sum(
        places[assigned[slot]].node != places[assigned[slot + 1]].node for slot in range(D * P) if slot % P < P - 1
    )
    natural = sum(slot // K != (slot + 1) // K for slot in range(D * P) if slot % P < P - 1)
    assert changes <= natural


@given(clusters(), st.sampled_from(["shadow", "shadow-lazy"]))
def test_a_shadow_is_on_another_node_than_the_worker_it_shadows(
    cluster: tuple[int, int, dict[int, WorkerPlace]], strategy: str
) -> None:
    D, P, places = cluster
    assume(P > 1)
    plan = Plan.from_text(shape_of(D, P).plan_text)
    assigned = assign_slots(shape_of(D, P), get(strategy), places, {}, ())
    nodes = {slot: places[worker].node for slot, worker in assigned.items()}
    before = get(strategy).initial_shadows(plan)
    replicas = shadows_on_other_nodes(before, plan, nodes)
    assert Counter((r.stage, r.source) for r in replicas) == Counter((r.stage, r.source) for r in before)
    if len(set(nodes.values())) == len(nodes):
        assert replicas == before  # nothing changes for nodes with one worker
    for replica in replicas:
        free = [slot for slot in nodes if slot % P != replica.stage and nodes[slot] != nodes[replica.source]]
        taken = {other.slot for other in replicas if other.stage == replica.stage}
        assert nodes[replica.slot] != nodes[replica.source] or taken.issuperset(free)


@given(
    st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (1, 4)]),
    st.integers(1, 4),
    st.sampled_from(["reroute", "shadow", "templates"]),
    st.data(),
)
def test_a_new_copy_never_shares_a_node_with_another_holder(
    shape: tuple[int, int], K: int, strategy: str, data: st.DataObject
) -> None:
    """After the loss of whole nodes. Every stage that is left on one node is copied to another one."""
    D, P = shape
    full, policy = generate_plan("1f1b", pipelines=D, stages=P, micro_batches=6), get(strategy)
    node_count = -(-D * P // K)
    lost = data.draw(st.sets(st.integers(0, node_count - 1), max_size=node_count - 1))
    nodes = {slot: slot // K for slot in range(D * P)}
    held = {slot: {slot % P} for slot in range(D * P)}
    for replica in shadows_on_other_nodes(policy.initial_shadows(full), full, nodes):
        held[replica.slot].add(replica.stage)
    cluster = SurvivingCluster(
        full_plan=full,
        policy=policy,
        held_stages={slot: frozenset(stages) for slot, stages in held.items() if nodes[slot] not in lost},
        nodes={slot: node for slot, node in nodes.items() if node not in lost},
    )
    assume(not stages_without_holder(cluster))
    roles = assign_roles(cluster)
    for stage in range(P):
        holders = {*roles.runners[stage], *(r.slot for r in roles.shadows if r.stage == stage and not r.needs_copy)}
        copies = [r.slot for r in roles.shadows if r.stage == stage and r.needs_copy]
        assert cluster.nodes_of(copies).isdisjoint(cluster.nodes_of(holders))
        if len(set(cluster.nodes.values())) > 1:
            assert len(cluster.nodes_of({*holders, *copies})) > 1


def test_plans_are_made_ahead_for_the_loss_of_any_node() -> None:
    full, cache = generate_plan("1f1b", pipelines=2, stages=4, micro_batches=8), PlanCache()
    cluster = SurvivingCluster(
        full_plan=full,
        policy=get("reroute"),
        held_stages={slot: frozenset({slot % 4}) for slot in range(8)},
        nodes={slot: slot // 2 for slot in range(8)},
        plan_cache=cache,
    )
    planned = [sorted(solution.plan.failed) for solution in precompute_next_plans(cluster)]
    names = [[0, 1], [2, 3], [4, 5], [6, 7]]  # of the losses; their plans have canonical pipeline names
    assert [[slot % 2 for slot in each] for each in planned] == [[slot % 2 for slot in each] for each in names]
