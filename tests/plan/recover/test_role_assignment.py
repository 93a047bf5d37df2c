"""Who runs and who shadows what when slots are empty."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.recover.role_assignment import (
    RoleAssignment,
    ShadowReplica,
    SurvivingCluster,
    assign_roles,
    precompute_next_plans,
    stages_without_holder,
)
from culm.plan.replan.plan_cache import PlanCache
from culm.schedule import Costs, Plan, check_plan, generate_plan
from culm.strategies import get

SHAPES = [(1, 2, 2), (1, 4, 4), (2, 1, 2), (2, 3, 5), (3, 2, 6), (3, 3, 7)]


def surviving_cluster(plan: Plan, strategy: str, lost: set[int], plans: PlanCache | None = None) -> SurvivingCluster:
    """After the first losses: the own stage, and what the strategy keeps beside it."""
    held = {slot: {slot % plan.stages} for slot in range(len(plan.workers)) if slot not in lost}
    for replica in get(strategy).initial_shadows(plan):
        if replica.slot in held:
            held[replica.slot].add(replica.stage)
    return SurvivingCluster(
        full_plan=plan,
        policy=get(strategy),
        held_stages={slot: frozenset(stages) for slot, stages in held.items()},
        plan_cache=plans or PlanCache(),
    )


@st.composite
def surviving_clusters(draw: st.DrawFn) -> SurvivingCluster:
    """Any losses that leave each stage a holder."""
    D, P, M = draw(st.sampled_from(SHAPES))
    able = [*(["shadow", "shadow-lazy"] if P > 1 else []), *(["reroute"] if D > 1 else [])]
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb", "interleaved"]))
    M += -M % (D * P) if schedule == "interleaved" else 0
    ranges = 2 if schedule == "interleaved" else 1
    plan = generate_plan(schedule, pipelines=D, stages=P, micro_batches=M, ranges=ranges)
    strategy = draw(st.sampled_from(able))
    dice = Random(draw(st.integers(0, 2**32 - 1)))
    lost: set[int] = set()
    for slot in dice.sample(range(D * P), dice.randint(0, D * P - 1)):
        if not stages_without_holder(surviving_cluster(plan, strategy, lost | {slot})):
            lost.add(slot)
    return surviving_cluster(plan, strategy, lost)


@given(surviving_clusters())
def test_the_plan_around_the_holes_is_one_that_the_checker_accepts(given: SurvivingCluster) -> None:
    layout = assign_roles(given)
    check_plan(layout.plan)
    assert Plan.from_text(layout.plan.to_text()) == layout.plan


@given(surviving_clusters())
def test_every_stage_is_run_by_workers_that_hold_it_and_by_all_of_its_own(given: SurvivingCluster) -> None:
    layout = assign_roles(given)
    for stage in range(given.full_plan.stages):
        runners = layout.runners[stage]
        assert runners == layout.plan.holders_of(stage)
        assert all(stage in given.held_stages[slot] for slot in runners)
        own = {
            slot
            for slot in given.held_stages
            if slot % given.full_plan.stages == stage and stage in given.held_stages[slot]
        }
        assert own <= set(runners)


@given(surviving_clusters())
def test_a_shadow_replica_is_not_on_a_runner_of_its_stage_and_has_one_as_its_source(given: SurvivingCluster) -> None:
    layout = assign_roles(given)
    copies = [(replica.slot, replica.stage) for replica in layout.shadows]
    assert len(copies) == len(set(copies))
    for replica in layout.shadows:
        assert replica.slot in given.held_stages
        assert replica.slot not in layout.runners[replica.stage]
        assert replica.source in layout.runners[replica.stage]
        assert replica.needs_copy == (replica.stage not in given.held_stages[replica.slot])


@given(surviving_clusters())
def test_afterwards_every_stage_has_two_holders_wherever_there_are_two_workers(given: SurvivingCluster) -> None:
    layout = assign_roles(given)
    for stage in range(given.full_plan.stages):
        assert len(holders(layout, stage)) >= min(2, len(given.held_stages)), f"stage {stage} is left unprotected"


def holders(layout: RoleAssignment, stage: int) -> set[int]:
    return {*layout.runners[stage], *(replica.slot for replica in layout.shadows if replica.stage == stage)}


@given(surviving_clusters())
def test_a_micro_batch_is_at_home_with_a_runner_of_its_stage(given: SurvivingCluster) -> None:
    layout = assign_roles(given)
    for (segment, _), slot in layout.default_runners.items():
        assert slot in layout.runners[segment % given.full_plan.stages]


@given(surviving_clusters())
def test_a_stand_in_stays_while_no_further_node_is_lost(given: SurvivingCluster) -> None:
    """A connection that broke is no reason to move anything."""
    first = assign_roles(given)
    again = assign_roles(
        SurvivingCluster(
            full_plan=given.full_plan, policy=given.policy, held_stages=given.held_stages, current_plan=first.plan
        ),
    )
    assert again.plan == first.plan
    assert again.runners == first.runners


# The words of the strategies

PLAN = generate_plan("1f1b", pipelines=2, stages=3, micro_batches=4)


def test_a_worker_shadows_its_successor_and_the_last_one_the_first() -> None:
    alone = generate_plan("1f1b", pipelines=1, stages=3, micro_batches=3)
    assert get("shadow").initial_shadows(alone) == (
        ShadowReplica(1, 0, 1),
        ShadowReplica(2, 1, 2),
        ShadowReplica(0, 2, 0),
    )
    assert len(get("shadow-lazy").initial_shadows(PLAN)) == 6
    assert get("reroute").initial_shadows(PLAN) == ()


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_a_shadow_stands_in_though_there_are_peers(strategy: str) -> None:
    layout = assign_roles(surviving_cluster(PLAN, strategy, {4}))
    assert (layout.recovery_source, layout.runners[1]) == ("shadow", (1, 3))
    assert layout.plan.stages_of(3) == (0, 1)


def test_peers_share_what_a_lost_worker_would_have_run() -> None:
    layout = assign_roles(surviving_cluster(PLAN, "reroute", {4}))
    assert (layout.recovery_source, layout.runners[1], layout.plan.stage_overrides) == ("peers", (1,), ())


def test_where_the_shadow_is_lost_too_the_peers_do() -> None:
    layout = assign_roles(surviving_cluster(PLAN, "shadow", {3, 4}))
    assert layout.runners[1] == (1,) or 3 not in layout.runners[1]
    assert all(layout.runners.values())


def test_peers_first_and_a_new_copy_where_a_stage_would_have_one_holder() -> None:
    layout = assign_roles(surviving_cluster(PLAN, "reroute", {4}))
    assert [(r.stage, r.needs_copy) for r in layout.shadows] == [(1, True)]
    assert layout.shadows[0].slot != 1


def test_a_stage_without_a_holder_is_named() -> None:
    assert stages_without_holder(surviving_cluster(PLAN, "reroute", {1, 4})) == [1]
    assert stages_without_holder(surviving_cluster(PLAN, "shadow", {1, 4})) == []
    assert stages_without_holder(surviving_cluster(PLAN, "shadow", {0, 1, 3, 4})) == [1]


@pytest.mark.parametrize("copies", [{0}, {0, 1}], ids=["nobody has a copy", "who has a copy stands in"])
def test_nothing_is_planned_ahead_where_a_stage_has_lost_all_of_its_own(copies: set[int]) -> None:
    plan = generate_plan("zb", pipelines=2, stages=2, micro_batches=4)
    left = SurvivingCluster(
        full_plan=plan, policy=get("reroute"), held_stages={0: frozenset(copies), 2: frozenset({0})}
    )
    assert list(precompute_next_plans(left)) == []


def test_where_every_stage_has_one_of_its_own_the_next_losses_are_planned_for_that_leave_it_so() -> None:
    plan = generate_plan("zb", pipelines=3, stages=2, micro_batches=6)
    cluster = surviving_cluster(plan, "reroute", {1, 3})
    assert len(list(precompute_next_plans(cluster))) == 3
    planned = cluster.plan_cache.misses
    for lost in (0, 2, 4):
        assert assign_roles(surviving_cluster(plan, "reroute", {1, 3, lost}, cluster.plan_cache)).plan.failed
    assert cluster.plan_cache.misses == planned


@pytest.mark.parametrize("shuffled", [{0: 1, 1: 0}, {0: 1, 1: 0, 2: 1, 3: 0}, {2: 1, 5: 0}])
def test_workers_that_have_moved_into_each_others_slots_run_every_action_once(shuffled: dict[int, int]) -> None:
    full = generate_plan("1f1b", pipelines=3, stages=2, micro_batches=6)
    held = {slot: frozenset((shuffled.get(slot, slot % 2),)) for slot in range(6)}
    plan = assign_roles(
        SurvivingCluster(full_plan=full, policy=get("reroute"), held_stages=held, current_plan=full)
    ).plan
    assert plan.placement().keys() == full.placement().keys()
    assert all(plan.stages_of(slot) == (stage,) for slot, stage in shuffled.items())


def two_lost() -> SurvivingCluster:
    """2 x 3 without slots 4 and 5: slot 3 is to move from stage 0 to stage 2, as stage 0 has less to do."""
    hurt = surviving_cluster(generate_plan("1f1b", pipelines=2, stages=3, micro_batches=6), "reroute", {4, 5})
    return replace(hurt, costs=Costs(forward=(1.0, 1.1, 1.1), input=(1.0, 1.1, 1.1), weight=(0.01, 0.01, 0.01)))


def test_a_stage_that_a_worker_will_leave_is_copied_first_if_one_holder_would_remain() -> None:
    layout = assign_roles(two_lost())
    (mover,) = [replica for replica in layout.shadows if replica.moves_worker]
    assert (mover.slot, mover.stage, mover.needs_copy) == (3, 2, True)
    copies = {
        replica.stage: replica.slot for replica in layout.shadows if replica.needs_copy and not replica.moves_worker
    }
    assert copies.keys() == {0, 1, 2}
    assert copies[0] not in (0, 3)


def test_a_worker_with_the_copy_of_its_next_stage_still_moves() -> None:
    """It could not leave its stage when the epoch began: it does when the stage has holders enough."""
    hurt = two_lost()
    layout = assign_roles(replace(hurt, held_stages={**hurt.held_stages, 3: frozenset({0, 2})}))
    (mover,) = [replica for replica in layout.shadows if replica.moves_worker]
    assert (mover.slot, mover.stage, mover.needs_copy) == (3, 2, False)
    assert any(replica.stage == 0 and replica.needs_copy for replica in layout.shadows)
